#pragma once

#include <string>
#include <utility>
#include <vector>

#include "recovery/agent/agent_daemon.h"
#include "recovery/coordinator/coordinator.h"
#include "src/base/result.h"
#include "tools/cli/cli_session.h"
#include "tools/cli/daemon_options.h"

// The settings of a daemon: from its command line, then the environment, then its file. The start
// of a daemon, its SIGHUP and `rekindle config` read them with the same code.
namespace rekindle::cli {

struct Setting {
  // "" for an option of every command, else the daemon.
  std::string section;
  // The long name, without dashes.
  std::string name;
  // Several values are joined by commas. By default: as the help writes it.
  std::string value;
  // "command line", "REKINDLE_AGENT_LISTEN", "/etc/rekindle/rekindle.toml:12", or "default".
  std::string origin;
};

struct DaemonSettings {
  Settings shared;
  // Of these two, the one of the other daemon has its defaults.
  agent::AgentOptions agent;
  coordinator::CoordinatorOptions coordinator;
  // In the order of the help.
  std::vector<Setting> all;
  // A key at the top level of the file that the daemon's section has, too.
  struct Shadowed {
    // As in Problem.
    std::string where;
    // One line that says which line wins.
    std::string text;
  };
  std::vector<Shadowed> shadowed;
  // Variables named like those of a daemon's options that set none.
  std::vector<std::string> unknown_variables;
};

enum class Environment { kApplies, kIgnored };

// `words`: a command line without the name of the program; it names the daemon. The result is
// complete only if nothing was added to `problems`.
DaemonSettings read_daemon_settings(const std::vector<std::string>& words, Environment environment,
                                    Problems& problems);

// For a daemon that was started with these words and runs with `running`. Reads the settings again
// and logs each change. After an error nothing has changed.
class Reloader {
 public:
  Reloader(std::vector<std::string> words, std::vector<Setting> running)
      : words_(std::move(words)), running_(std::move(running)) {}
  Result<DaemonSettings> read();

 private:
  const std::vector<std::string> words_;
  std::vector<Setting> running_;
};

}  // namespace rekindle::cli
