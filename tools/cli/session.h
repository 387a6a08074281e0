#pragma once

#include <functional>
#include <string>

#include "src/base/result.h"

namespace CLI {
class App;
}

namespace rekindle::cli {

// What every command shares: the global options, as the command line, the environment and the
// configuration file (in this order) set them.
struct Settings {
  std::string coordinator;
  std::string store = "/dev/shm/rekindle";
  std::string secret_file;
  std::string log_level;  // "" = info for daemons, error for commands
  std::string log_format = "text";
  std::string config;
  bool json = false;
  bool quiet = false;
};

struct Session {
  Settings settings;
  std::string command;               // the subcommand that was chosen: "pull"
  bool daemon = false;               // it logs at info and reads --config
  int interrupted_by = 0;            // a signal that the body was ended by
  std::function<Result<int>()> run;  // its body; returns the exit code

  // The subcommand `name` was chosen on the command line.
  void choose(std::string name, std::function<Result<int>()> body) {
    command = std::move(name);
    run = std::move(body);
  }
};

// Each adds its subcommand. Called once, by main.
void add_coordinator(CLI::App& app, Session& session);
void add_agent(CLI::App& app, Session& session);
void add_demo(CLI::App& app, Session& session);
void add_publish(CLI::App& app, Session& session);
void add_pull(CLI::App& app, Session& session);
void add_run(CLI::App& app, Session& session);
void add_wait_ready(CLI::App& app, Session& session);
void add_status(CLI::App& app, Session& session);
void add_events(CLI::App& app, Session& session);
void add_inspect(CLI::App& app, Session& session);
void add_verify(CLI::App& app, Session& session);
void add_retire(CLI::App& app, Session& session);
void add_drain(CLI::App& app, Session& session);
void add_update(CLI::App& app, Session& session);
void add_bench(CLI::App& app, Session& session);
void add_topo(CLI::App& app, Session& session);
void add_doctor(CLI::App& app, Session& session);
void add_completion(CLI::App& app, Session& session);
void add_version(CLI::App& app, Session& session);
void add_device_process(CLI::App& app, Session& session);

}  // namespace rekindle::cli
