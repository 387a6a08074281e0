#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>

#include <fcntl.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "recovery/agent/agent_daemon.h"
#include "recovery/coordinator/coordinator.h"
#include "recovery/device/device_child.h"
#include "recovery/device/process/device_process.h"
#include "recovery/keeper/keeper.h"
#include "src/base/log.h"
#include "tools/cli/cli_session.h"
#include "tools/cli/command_line.h"
#include "tools/cli/daemon_options.h"
#include "tools/cli/daemon_settings.h"
#include "tools/cli/output.h"

namespace rekindle::cli {
namespace {

// The first lines that a daemon prints, for people and for scripts that wait for them.
void announce(const Settings& settings, const char* what, const agent::AgentOptions::Listening& at,
              const std::string& http = {}) {
  struct Line {
    const char* key;
    const char* does;
    const std::string& address;
  };
  const Line lines[] = {{"listen", "listening", at.control},
                        {"data", "serving data", at.data},
                        {"health", "answering health", at.health},
                        {"metrics", "answering metrics", at.metrics},
                        {"http", "showing the status page", http}};
  Json json = {{"event", "ready"}, {"role", what}};
  for (const Line& line : lines) {
    if (line.address.empty()) continue;
    if (settings.json) {
      json[line.key] = line.address;
    } else {
      print_line(fmt::format("{} {} on {}", what, line.does, line.address));
    }
  }
  if (settings.json) print_line(json.dump());
  (void)flush_output();
}

void warn_of_unknown_variables(const DaemonSettings& settings) {
  for (const std::string& name : settings.unknown_variables) {
    log::warn("config.unknown_variable", "variable", name, "hint",
              "no option has this variable; `rekindle config example` lists all");
  }
}

Result<int> run_coordinator_command(const Session& session) {
  const DaemonSettings& read = *session.daemon_settings;
  warn_of_unknown_variables(read);
  coordinator::CoordinatorOptions options = read.coordinator;
  options.on_ready = [shared = read.shared](const coordinator::CoordinatorOptions::Listening& at) {
    announce(shared, "coordinator", {at.control, "", "", at.metrics}, at.http);
  };
  const auto reloader = std::make_shared<Reloader>(session.words, read.all);
  options.reread = [reloader]() -> Result<coordinator::CoordinatorOptions> {
    TRY(DaemonSettings settings, reloader->read());
    return settings.coordinator;
  };
  TRY_VOID(coordinator::run_coordinator(options));
  return kExitOk;
}

Result<int> run_agent_command(const Session& session) {
  const DaemonSettings& read = *session.daemon_settings;
  warn_of_unknown_variables(read);
  agent::AgentOptions options = read.agent;
  options.on_ready = [shared = read.shared](const agent::AgentOptions::Listening& at) {
    announce(shared, "agent", at);
  };
  const auto reloader = std::make_shared<Reloader>(session.words, read.all);
  options.reread = [reloader]() -> Result<agent::AgentOptions> {
    TRY(DaemonSettings settings, reloader->read());
    return settings.agent;
  };
  TRY_VOID(agent::run_agent(options));
  return kExitOk;
}

}  // namespace

void add_coordinator(Command& app, Session& session) {
  Command sub = app.command(
      "coordinator",
      "Run the control plane. It knows the agents and their copies, and grants pulls.\n"
      "It carries no weight bytes. Stops on SIGTERM or SIGINT; may be restarted at any moment.\n"
      "SIGHUP: reads its settings again.");
  // Only the parser uses them; read_daemon_settings() reads the values.
  auto args = std::make_shared<CoordinatorArgs>();
  add_coordinator_options(sub, *args);
  sub.runs_daemon(session, "coordinator",
                  [&session, args] { return run_coordinator_command(session); });
}

void add_agent(Command& app, Session& session) {
  Command sub = app.command(
      "agent",
      "Run this host's agent: keeps checkpoints in the store, serves them to peers, pulls for "
      "this\n"
      "host. Committed checkpoints outlive the process. Stops on SIGTERM or SIGINT.\n"
      "SIGHUP: reads its settings again.");
  auto args = std::make_shared<AgentArgs>();
  add_agent_options(sub, *args);
  sub.runs_daemon(session, "agent", [&session, args] { return run_agent_command(session); });
}

namespace {

struct DeviceProcessArgs {
  int fd = -1;
  std::string doubles;
  std::uint64_t keep_rate = device::SessionTimes{}.keep_bytes_per_second;
  std::uint32_t helpers = device::GpuOptions::kAutoHelpers;
};

Result<int> run_device_process_command(const DeviceProcessArgs& args) {
  device::DeviceProcessOptions options;
  if (!args.doubles.empty()) {
    TRY(options.doubles, device::parse_doubles(args.doubles));
  }
  options.times.keep_bytes_per_second = args.keep_rate;
  options.helpers = args.helpers;
  if (::fcntl(args.fd, F_SETFD, FD_CLOEXEC) != 0) {
    return fail(ErrorCode::kInvalid,
                "--fd {}: this command is started by an agent, which gives it a socket", args.fd);
  }
  // It ends with its agent, even if it hangs. A signal to the whole process group may reach it
  // first.
  std::signal(SIGINT, SIG_IGN);
  std::signal(SIGTERM, SIG_IGN);
  std::signal(SIGHUP, SIG_IGN);
  (void)::prctl(PR_SET_PDEATHSIG, SIGKILL);
  (void)::prctl(PR_SET_NAME, "rekindle-device");
  const auto ran = device::run_device_process(UniqueFd(args.fd), options);
  if (ran) return kExitOk;
  log::error("device.lost", "why", ran.error());
  std::fflush(nullptr);
  std::_Exit(device::kDeviceLostExit);
}

}  // namespace

void add_device_process(Command& app, Session& session) {
  Command sub = app.command("device-process",
                            "Fill buckets on this host's GPUs. For agents, which start it.");
  sub.hide();
  auto args = std::make_shared<DeviceProcessArgs>();
  sub.option("--fd", args->fd, "Descriptor of the socket to the agent").required();
  sub.option("--double", args->doubles, "GPUs made of host memory, for tests").type_name("N:BYTES");
  sub.option("--keep-rate", args->keep_rate,
             "Bytes of a broadcast that each device copies to its host in a second");
  sub.option("--helpers", args->helpers, "Idle GPUs whose links one upload may use");
  sub.runs(session, "device-process", [args] { return run_device_process_command(*args); });
}

namespace {

struct KeeperArgs {
  std::string directory;
  std::int64_t idle_s = 0;
};

Result<int> run_keeper_command(const KeeperArgs& args) {
  keeper::KeeperOptions options;
  options.directory = args.directory;
  if (args.idle_s > 0) options.idle = std::chrono::seconds(args.idle_s);
  std::signal(SIGHUP, SIG_IGN);
  (void)::prctl(PR_SET_NAME, "rekindle-keeper");
  TRY_VOID(keeper::run_keeper(options));
  return kExitOk;
}

}  // namespace

void add_keeper(Command& app, Session& session) {
  Command sub =
      app.command("keeper", "Hold resident copies of workers. For agents, which start it.");
  sub.hide();
  auto args = std::make_shared<KeeperArgs>();
  sub.option("--directory", args->directory, "DIR/agent of the agent's store").required();
  sub.option("--idle", args->idle_s, "Seconds without copies and agents after which it ends")
      .type_name("SECONDS");
  sub.runs(session, "keeper", [args] { return run_keeper_command(*args); });
}

}  // namespace rekindle::cli
