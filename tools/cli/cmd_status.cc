#include <cstdio>
#include <memory>
#include <string>

#include <unistd.h>

#include <time.h>

#include "recovery/agent/local_agent.h"
#include "recovery/rpc/address.h"
#include "tools/cli/arguments.h"
#include "tools/cli/cli_session.h"
#include "tools/cli/command_line.h"
#include "tools/cli/output.h"
#include "tools/cli/remote.h"
#include "tools/cli/status_view.h"

namespace rekindle::cli {
namespace {

constexpr std::chrono::milliseconds kShortestInterval{10};

struct StatusArgs {
  std::string agent;
  bool watch = false;
  std::string interval = "1s";
};

struct Report {
  Json json;
  std::string text;
};

// The node that is asked: a given agent, the coordinator, or the agent of this host.
class StatusSource {
 public:
  static Result<StatusSource> create(const Settings& settings, const StatusArgs& args) {
    StatusSource source;
    source.cluster_ = args.agent.empty() && !settings.coordinator.empty();
    std::string address = source.cluster_ ? settings.coordinator : args.agent;
    if (address.empty()) {
      const std::filesystem::path socket = agent::agent_socket(settings.store);
      std::error_code error;
      const bool runs = std::filesystem::exists(socket, error);
      if (error) return fail_errno(error.value(), socket.string());
      if (!runs) {
        return fail(ErrorCode::kNotFound,
                    "no agent runs here ({} does not exist); name a --coordinator or an --agent",
                    socket.string());
      }
      address = "unix:" + socket.string();
    }
    TRY(source.remote_, Remote::create(settings, address));
    return source;
  }

  Result<Report> fetch() {
    if (cluster_) {
      TRY(const auto status, (remote_->call<proto::COORDINATOR_STATUS>({})));
      return Report{to_json(status), to_text(status)};
    }
    TRY(const auto status, (remote_->call<proto::AGENT_STATUS>({})));
    return Report{to_json(status), to_text(status)};
  }

 private:
  std::unique_ptr<Remote> remote_;
  bool cluster_ = false;
};

// Repaints a terminal; elsewhere prints one report after the other, or one JSON document a line. An
// unreachable coordinator does not end the watch.
Result<int> watch(const Settings& settings, StatusSource source,
                  std::chrono::milliseconds interval) {
  Interrupts interrupts;
  const bool in_place = terminal(STDOUT_FILENO) && !settings.json;
  do {
    const auto report = source.fetch();
    if (in_place) print("\x1b[H\x1b[2J");
    if (settings.json) {
      print_json_line(report ? report->json : to_json(report.error()));
    } else {
      print(report ? report->text
                   : "rekindle status: " + printable(report.error().message()) + "\n");
      if (!in_place) print("\n");
    }
    TRY_VOID(flush_output());
    // Nobody reads any more.
    if (std::ferror(stdout) != 0) return kExitOk;
  } while (!interrupts.within(interval));
  return kExitOk;
}

Result<int> status(const Settings& settings, const StatusArgs& args) {
  TRY(const auto interval, parse_duration("--interval", args.interval));
  if (interval < kShortestInterval) {
    return fail(ErrorCode::kInvalid, "--interval: {} is too short, 10ms is the shortest",
                args.interval);
  }
  if (!args.agent.empty() && !args.agent.starts_with(rpc::kUnixPrefix)) {
    TRY_VOID(check_address("--agent", args.agent));
  }
  TRY(StatusSource source, StatusSource::create(settings, args));
  if (args.watch) return watch(settings, std::move(source), interval);
  TRY(const Report report, source.fetch());
  print_result(settings.json, report.json, report.text);
  return kExitOk;
}

}  // namespace

void add_status(Command& app, Session& session) {
  Command sub = app.command(
      "status",
      "Show the fleet (with --coordinator): hosts, versions, running pulls and updates; or one\n"
      "agent: the one named with --agent, else this host's.");
  auto args = std::make_shared<StatusArgs>();
  sub.option("--agent", args->agent, "Ask this agent").type_name("HOST:PORT");
  sub.flag("-w,--watch", args->watch, "Repeat until interrupted");
  sub.option("--interval", args->interval, "Time between the reports of --watch [1s]")
      .type_name("TIME");
  sub.runs(session, "status", [&session, args] { return status(session.settings, *args); });
}

}  // namespace rekindle::cli
