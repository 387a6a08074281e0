#include <filesystem>
#include <string>

#include <unistd.h>

#include "proto/agent.pb.h"
#include "proto/coordinator.pb.h"
#include "recovery/agent/local_agent.h"
#include "tools/cli/cli_session.h"
#include "tools/cli/command_line.h"
#include "tools/cli/doctor.h"
#include "tools/cli/output.h"
#include "tools/cli/remote.h"

namespace rekindle::cli {
namespace {

using doctor::Check;
using doctor::Level;

constexpr std::uint16_t kCoordinatorPort = 7300;
constexpr std::uint16_t kAgentPort = 7400;

Check check_coordinator(const Settings& settings) {
  if (settings.coordinator.empty()) {
    return {"coordinator", Level::kOk, "none given: --coordinator HOST:PORT checks it", ""};
  }
  auto remote = Remote::create(settings, settings.coordinator);
  if (!remote) return {"coordinator", Level::kFail, remote.error().message(), "see the identity"};
  const auto status = (*remote)->call<proto::COORDINATOR_STATUS>({});
  if (!status) {
    return {"coordinator", Level::kFail, status.error().message(),
            "running pulls go on without it; new ones need it, or --from"};
  }
  return {"coordinator", Level::kOk,
          fmt::format("{}: {} nodes, {} versions", settings.coordinator, status->nodes_size(),
                      status->versions_size()),
          ""};
}

Check check_agent(const Settings& settings) {
  const auto socket = agent::agent_socket(settings.store);
  std::error_code error;
  if (!std::filesystem::exists(socket, error)) {
    if (error) {
      return {"agent", Level::kFail, fmt::format("{}: {}", socket.string(), error.message()),
              "the store belongs to another user; name your own with --store"};
    }
    return {"agent", Level::kOk, "none runs on this store: commands embed one", ""};
  }
  auto remote = Remote::create(settings, "unix:" + socket.string());
  if (!remote) return {"agent", Level::kFail, remote.error().message(), "see the identity"};
  const auto status = (*remote)->call<proto::AGENT_STATUS>({});
  if (!status) {
    return {"agent", Level::kWarn, status.error().message(),
            "it died or is stopped; start it again, nothing in the store is lost"};
  }
  return {"agent", Level::kOk,
          fmt::format("{} at {}", status->node().node_id(), status->node().control_endpoint()), ""};
}

Result<int> run_doctor(const Settings& settings) {
  const doctor::Kernel kernel;
  doctor::Checks checks = doctor::host_checks(kernel, settings.store);
  for (Check& check : doctor::device_checks(kernel)) checks.push_back(std::move(check));
  checks.push_back(doctor::check_port("the coordinator", kCoordinatorPort));
  checks.push_back(doctor::check_port("the agent", kAgentPort));
  checks.push_back(doctor::check_identity(settings.credentials));
  checks.push_back(check_coordinator(settings));
  checks.push_back(check_agent(settings));

  Level worst = Level::kOk;
  for (const Check& check : checks) worst = std::max(worst, check.level);
  if (settings.json) {
    Json list = Json::array();
    for (const Check& check : checks) {
      list.push_back({{"name", check.name},
                      {"level", doctor::to_string(check.level)},
                      {"found", check.found},
                      {"advice", check.advice}});
    }
    print_json({{"level", doctor::to_string(worst)}, {"checks", list}});
  } else {
    const bool color = terminal(STDOUT_FILENO);
    for (const Check& check : checks) {
      const char* const paint = check.level == Level::kOk     ? "\x1b[32m"
                                : check.level == Level::kWarn ? "\x1b[33m"
                                                              : "\x1b[31m";
      print_line(fmt::format("{}{:<4}{}  {:<12} {}", color ? paint : "",
                             doctor::to_string(check.level), color ? "\x1b[0m" : "", check.name,
                             printable(check.found)));
      if (!check.advice.empty()) print_line(fmt::format("{:19}-> {}", "", check.advice));
    }
  }
  return worst == Level::kFail ? kExitFailed : kExitOk;
}

}  // namespace

void add_doctor(Command& app, Session& session) {
  Command sub = app.command(
      "doctor",
      "Check this host and say what to fix. Looks at memory, limits, huge pages, NICs, RDMA, "
      "GPUs,\n"
      "NUMA, ports, the store and what is compiled in. Exit code 1 when something must be fixed.");
  sub.runs(session, "doctor", [&session] { return run_doctor(session.settings); });
}

}  // namespace rekindle::cli
