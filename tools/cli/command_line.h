#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "src/base/result.h"
#include "tools/cli/cli_session.h"
#include "transport/verbs/host/hca_filter.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

// The options of commands. Only the implementation includes CLI11, whose templates take seconds to
// compile; commands see these plain functions. The handles live as long as the parser.
namespace rekindle::cli {

// One option of a command. Each method returns the option itself.
class CommandOption {
 public:
  explicit CommandOption(CLI::Option* option) : option_(option) {}
  CommandOption& type_name(const std::string& name);
  CommandOption& group(const std::string& name);
  CommandOption& required();
  // May be given only without, or only with, the other.
  CommandOption& excludes(CommandOption other);
  CommandOption& needs(CommandOption other);
  CommandOption& one_of(std::initializer_list<const char*> values);
  template <typename Number>
  CommandOption& between(Number least, Number most);
  // `problem` returns "" for a text that is right.
  CommandOption& check(std::function<std::string(const std::string&)> problem);
  // Refuses an empty text, which would silently turn off what the file is for.
  CommandOption& not_empty();
  // Takes one word each time it is given, so that words without a dash may follow.
  CommandOption& one_word();
  // Separates several values in one text.
  CommandOption& delimiter(char separator);

 private:
  CLI::Option* option_;
};

// A command, or a command of a command ("bench transfer").
class Command {
 public:
  explicit Command(CLI::App& app) : app_(&app) {}

  Command command(const std::string& name, const std::string& about);
  // `name`: "--to", "-w,--watch", or "PATH" for a word without a dash. The value that the variable
  // has is the default. It must outlive the parser.
  // `Value`: a string, a list of strings, a path, or a number; see the end of command_line.cc.
  template <typename Value>
  CommandOption option(const std::string& name, Value& value, const std::string& help);
  CommandOption flag(const std::string& name, bool& value, const std::string& help);
  void footer(const std::string& text);
  void require_command();
  // Keeps the command out of the list of commands.
  void hide();
  // Runs when the command was chosen; returns the exit code. `name` is for messages.
  void runs(Session& session, const std::string& name, std::function<Result<int>()> body);
  // The same for a daemon, which logs at info and reads the configuration file.
  void runs_daemon(Session& session, const std::string& name, std::function<Result<int>()> body);

  // For command_texts.h.
  CLI::App& parser() const { return *app_; }

 private:
  CLI::App* app_;
};

// --hca, --gid-index, --topology, …: for every command that opens RDMA devices. Wrong text ends the
// parse with a line that says why. Builds without libibverbs have them too, so that one
// configuration file fits all.
// The rails of `options` that need no encryption.
void add_trusted_rails_option(Command& command, transport::verbs::FabricOptions& options);
void add_fabric_options(Command& command, transport::verbs::FabricOptions& options);

// --otlp.
void add_otlp_option(Command& command, std::string& url);

bool is_daemon(std::string_view command);

// Whether the configuration file may set the option of this long name, without dashes.
bool is_setting(std::string_view option);

// The environment variable of an option: REKINDLE_LOG_FORMAT, REKINDLE_AGENT_MAX_RATE. `section`:
// "" for an option of every command, else a daemon.
std::string variable_of(std::string_view section, std::string_view option);

// Whether a daemon takes a new value of the setting at SIGHUP.
bool applies_at_reload(std::string_view section, std::string_view option);

inline constexpr const char* kEveryCommand = "Options of every command";
void add_shared_options(CLI::App& app, Settings& settings);

}  // namespace rekindle::cli
