#include <memory>
#include <string>

#include "proto/coordinator.pb.h"
#include "tools/cli/cli_session.h"
#include "tools/cli/command_line.h"
#include "tools/cli/output.h"
#include "tools/cli/remote.h"

namespace rekindle::cli {
namespace {

struct DrainArgs {
  std::string node;
  bool undo = false;
};

Result<int> drain(const Settings& settings, const DrainArgs& args) {
  if (settings.coordinator.empty()) {
    return fail(ErrorCode::kInvalid, "give the fleet's --coordinator HOST:PORT");
  }
  TRY(const auto coordinator, Remote::create(settings, settings.coordinator));
  proto::DrainRequest request;
  request.set_node_id(args.node);
  request.set_undo(args.undo);
  TRY(const auto response, (coordinator->call<proto::COORDINATOR_DRAIN>(request)));
  if (settings.json) {
    Json sole = Json::array();
    for (const auto& id : response.sole_copies()) {
      sole.push_back({{"model", id.model()}, {"version", id.version()}});
    }
    print_json({{"node", args.node},
                {"drained", !args.undo},
                {"pullers", response.pullers()},
                {"sole_copies", sole}});
    return kExitOk;
  }
  if (args.undo) {
    print_line(fmt::format("{} takes part again", printable(args.node)));
    return kExitOk;
  }
  print_line(fmt::format("{} gets no new readers; {} pulls still read there", printable(args.node),
                         response.pullers()));
  for (const auto& id : response.sole_copies()) {
    print_line(fmt::format(
        "  {}@{} has no whole copy elsewhere: pull it on another host before this one stops",
        printable(id.model()), id.version()));
  }
  return kExitOk;
}

}  // namespace

void add_drain(Command& app, Session& session) {
  Command sub = app.command(
      "drain",
      "Take a host out of the fleet's plans before it is stopped. No new pull reads there; "
      "present\n"
      "pulls finish. The host stays drained over restarts, until --undo. `rekindle status` counts\n"
      "the pulls that are left; with --replicas other hosts get its copies.");
  auto args = std::make_shared<DrainArgs>();
  sub.option("NODE", args->node, "The agent's --node-id (see `rekindle status`)").required();
  sub.flag("--undo", args->undo, "Let it take part again");
  sub.runs(session, "drain", [&session, args] { return drain(session.settings, *args); });
}

}  // namespace rekindle::cli
