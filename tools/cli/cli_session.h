#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "recovery/rpc/credentials.h"
#include "src/base/result.h"

namespace rekindle::cli {

// Part of the command's interface: scripts depend on these (`rekindle --help` lists them).
inline constexpr int kExitOk = 0;
inline constexpr int kExitFailed = 1;
inline constexpr int kExitUsage = 2;
inline constexpr int kExitNotFound = 3;
inline constexpr int kExitCorrupt = 4;
inline constexpr int kExitUnavailable = 5;
inline constexpr int kExitExhausted = 6;
inline constexpr int kExitDenied = 7;
inline constexpr int kExitCrashLoop = 8;
// Plus the number of the signal.
inline constexpr int kExitSignal = 128;

int exit_code(ErrorCode code);
const char* exit_code_help();

inline constexpr std::string_view kDefaultStore = "/dev/shm/rekindle";

// The options that all commands share, as the command line, the environment and the configuration
// file (in this order) set them.
struct Settings {
  std::string coordinator;
  std::string store{kDefaultStore};
  rpc::CredentialOptions credentials;
  // "": info for daemons, error for other commands.
  std::string log_level;
  std::string log_format = "text";
  std::string config;
  bool json = false;
  bool quiet = false;
};

// What a daemon logs.
inline std::string daemon_log_level(const Settings& settings) {
  return settings.log_level.empty() ? "info" : settings.log_level;
}

struct DaemonSettings;

struct Session {
  Settings settings;
  // The command line without the name of the program.
  std::vector<std::string> words;
  // The command that was chosen: "pull".
  std::string command;
  // It logs at info and reads --config.
  bool daemon = false;
  // Of a daemon, when it runs.
  std::shared_ptr<const DaemonSettings> daemon_settings;
  // The signal that ended the command, or 0.
  int interrupted_by = 0;
  // Runs the command and returns the exit code.
  std::function<Result<int>()> run;

  // The command line names this command.
  void choose(std::string name, std::function<Result<int>()> body) {
    command = std::move(name);
    run = std::move(body);
  }
};

class Command;

// Each adds its command to the parser. Called once, by main.
void add_coordinator(Command& app, Session& session);
void add_agent(Command& app, Session& session);
void add_demo(Command& app, Session& session);
void add_publish(Command& app, Session& session);
void add_pull(Command& app, Session& session);
void add_run(Command& app, Session& session);
void add_artifacts(Command& app, Session& session);
void add_wait_ready(Command& app, Session& session);
void add_status(Command& app, Session& session);
void add_top(Command& app, Session& session);
void add_events(Command& app, Session& session);
void add_inspect(Command& app, Session& session);
void add_verify(Command& app, Session& session);
void add_retire(Command& app, Session& session);
void add_release(Command& app, Session& session);
void add_switch(Command& app, Session& session);
void add_drain(Command& app, Session& session);
void add_drill(Command& app, Session& session);
void add_update(Command& app, Session& session);
void add_bench(Command& app, Session& session);
void add_bench_fleet(Command& bench, Session& session);
void add_topo(Command& app, Session& session);
void add_doctor(Command& app, Session& session);
void add_support_bundle(Command& app, Session& session);
void add_config(Command& app, Session& session);
void add_certs(Command& app, Session& session);
void add_completion(Command& app, Session& session);
void add_man(Command& app, Session& session);
void add_trace(Command& app, Session& session);
void add_explain(Command& app, Session& session);
void add_whoami(Command& app, Session& session);
void add_auth(Command& app, Session& session);
void add_audit(Command& app, Session& session);
void add_version(Command& app, Session& session);
void add_device_process(Command& app, Session& session);
void add_keeper(Command& app, Session& session);
void add_keys(Command& app, Session& session);

struct BuildInfo {
  std::string version, compiler, build_type;
  bool verbs = false, cuda = false, nccl = false;
  // The instruction set that this CPU uses.
  std::string digest_simd;
};
BuildInfo build_info();

}  // namespace rekindle::cli
