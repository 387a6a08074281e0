#include <memory>
#include <string>

#include "proto/local.pb.h"
#include "tools/cli/arguments.h"
#include "tools/cli/cli_session.h"
#include "tools/cli/command_line.h"
#include "tools/cli/output.h"

namespace rekindle::cli {
namespace {

struct SwitchArgs {
  std::string instance, what;
  std::string timeout = "2min";
};

Result<int> switch_model(const Settings& settings, const SwitchArgs& args) {
  TRY(const ModelRef what, ModelRef::parse(args.what));
  TRY(const std::chrono::milliseconds timeout, parse_duration("--timeout", args.timeout));
  constexpr std::chrono::hours kLongest{1};
  if (timeout.count() <= 0 || timeout > kLongest) {
    return fail(ErrorCode::kInvalid,
                "--timeout: {} is no time for a switch: more than 0, at most 1h", args.timeout);
  }
  proto::LocalSwitchRequest request;
  request.set_instance(args.instance);
  request.set_model(what.model);
  request.set_latest(!what.version);
  request.set_version(what.version.value_or(0));
  request.set_timeout_ms(static_cast<std::uint32_t>(timeout.count()));
  TRY(const auto host, agent::open_local_agent(local_agent_options(settings)));
  TRY(const auto response, host->switch_model(std::move(request)));
  const ModelVersion id{response.id().model(), response.id().version()};
  Json phases = Json::object();
  std::uint64_t total_us = 0;
  std::string text;
  for (const auto& phase : response.phases()) {
    phases[phase.name()] = phase.elapsed_us();
    total_us += phase.elapsed_us();
    text += fmt::format("{}{} {:.3f} s", text.empty() ? "" : ", ", phase.name(),
                        static_cast<double>(phase.elapsed_us()) / 1e6);
  }
  const std::string line =
      text.empty() ? fmt::format("{} serves {} already", args.instance, id.to_string())
                   : fmt::format("{} serves {} after {:.3f} s ({})", args.instance, id.to_string(),
                                 static_cast<double>(total_us) / 1e6, text);
  print_result(settings.json,
               {{"instance", args.instance},
                {"model", id.model},
                {"version", id.version},
                {"ranks", response.ranks()},
                {"phases_us", phases}},
               printable(line) + "\n");
  return kExitOk;
}

}  // namespace

void add_switch(Command& app, Session& session) {
  Command sub = app.command(
      "switch",
      "Have the workers of an instance serve another model, or another version. The worker ends\n"
      "its requests, gives up the memory of its present model, and loads the other one from this\n"
      "host's copy. If that fails it goes back. Only for workers that take orders\n"
      "(rekindle.torch.Models, Session.next_order), and an instance that is on this host alone.");
  auto args = std::make_shared<SwitchArgs>();
  sub.option("INSTANCE", args->instance, "As `rekindle status` lists it").required();
  sub.option("MODEL[@VERSION]", args->what, "What it serves then [the newest version]").required();
  sub.option("--timeout", args->timeout, "Until all of its workers have answered [2min]")
      .type_name("TIME");
  sub.runs(session, "switch", [&session, args] { return switch_model(session.settings, *args); });
}

}  // namespace rekindle::cli
