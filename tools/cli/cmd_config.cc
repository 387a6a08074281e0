#include <algorithm>
#include <memory>
#include <string>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tools/cli/cli_session.h"
#include "tools/cli/command_line.h"
#include "tools/cli/command_texts.h"
#include "tools/cli/daemon_settings.h"
#include "tools/cli/output.h"

namespace rekindle::cli {
namespace {

constexpr const char* kHead =
    R"(# Settings of the daemons. A line without # in front sets one; `[…]` is the default.
# The command line and REKINDLE_… in the environment win over this file.
)";

// An example of the value: its type, or the texts that it may be.
std::string value_of(const OptionText& option) {
  if (option.type.empty()) return "true";
  if (option.type == "N") return option.type;
  if (option.values.empty()) return "\"" + option.type + "\"";
  return fmt::format("\"{}\"", fmt::join(option.values, "|"));
}

// The help of each setting as a comment, and below it the key. `section`: "" for those of every
// command.
std::string settings_of(const CommandText& command, const std::string& section) {
  std::string text;
  for (const OptionText& option : command.options) {
    const std::string key = option.names.front().substr(2);
    if (!is_setting(key)) continue;
    text += "\n# ";
    for (const char c : option.help) {
      text += c;
      if (c == '\n') text += "# ";
    }
    text += fmt::format("\n# Environment: {}.{}", option.environment,
                        applies_at_reload(section, key) ? " Applies at SIGHUP." : "");
    text += fmt::format("\n#{} = {}\n", key, value_of(option));
  }
  return text;
}

struct FileArgs {
  std::string file;
  std::string daemon;

  std::vector<std::string> daemons() const {
    if (daemon.empty()) return {"coordinator", "agent"};
    return {daemon};
  }
  std::vector<std::string> words(const std::string& name) const {
    std::vector<std::string> line = {name};
    if (!file.empty()) line.insert(line.end(), {"--config", file});
    return line;
  }
};

Result<int> check(const Settings& settings, const FileArgs& args) {
  std::vector<std::string> problems;
  std::vector<std::string> shadowed;
  for (const std::string& daemon : args.daemons()) {
    Problems found;
    const DaemonSettings read =
        read_daemon_settings(args.words(daemon), Environment::kIgnored, found);
    for (const Problem& problem : found.all()) {
      const std::string line = problem.in_line().message();
      // A file that both daemons read is wrong once, not twice.
      if (std::ranges::find(problems, line) == problems.end()) problems.push_back(line);
    }
    for (const auto& entry : read.shadowed) shadowed.push_back(entry.text);
  }
  if (settings.json) {
    print_json({{"file", args.file}, {"problems", problems}, {"shadowed", shadowed}});
  } else {
    for (const std::string& line : problems) print_line(printable(line));
    for (const std::string& line : shadowed) print_line(printable(line));
    if (problems.empty()) {
      print_line(fmt::format("{} is right for: {}", printable(args.file),
                             fmt::join(args.daemons(), ", ")));
    }
  }
  return problems.empty() ? kExitOk : kExitFailed;
}

Result<int> show(const Settings& settings, const FileArgs& args) {
  Problems problems;
  FileArgs given = args;
  if (given.file.empty()) given.file = settings.config;
  const DaemonSettings read =
      read_daemon_settings(given.words(args.daemon), Environment::kApplies, problems);
  TRY_VOID(problems.none());
  Json json = Json::array();
  std::vector<std::vector<std::string>> rows;
  for (const Setting& setting : read.all) {
    const bool reload = applies_at_reload(setting.section, setting.name);
    json.push_back({{"setting", setting.name},
                    {"value", setting.value},
                    {"origin", setting.origin},
                    {"reload", reload}});
    rows.push_back({setting.name, setting.value, setting.origin, reload ? "SIGHUP" : "restart"});
  }
  print_result(settings.json, {{"daemon", args.daemon}, {"settings", json}},
               table({{"SETTING"}, {"VALUE"}, {"ORIGIN"}, {"CHANGES AT"}}, rows));
  return kExitOk;
}

void add_example(Command& config, Command app, Session& session) {
  Command sub = config.command(
      "example", "Print a file with every key explained, and none set: a start for your own");
  sub.runs(session, "config", [app]() -> Result<int> {
    const CommandText root = describe(app);
    std::string text = kHead + settings_of(root, "");
    for (const CommandText& command : root.commands) {
      if (!is_daemon(command.name)) continue;
      text += fmt::format("\n[{}]\n{}", command.name, settings_of(command, command.name));
    }
    print(text);
    return kExitOk;
  });
}

void add_check(Command& config, Session& session) {
  Command sub = config.command(
      "check",
      "Check a file as the daemons would, and start none: each unknown key, wrong value,\n"
      "contradiction, and file that is missing, in one line. Exit code 1 if anything is wrong.\n"
      "The environment is ignored.");
  auto args = std::make_shared<FileArgs>();
  sub.option("FILE", args->file, "The TOML file").required();
  sub.option("--daemon", args->daemon, "Check it for this daemon only [both]")
      .one_of({"agent", "coordinator"})
      .type_name("NAME");
  sub.runs(session, "config", [&session, args] { return check(session.settings, *args); });
}

void add_show(Command& config, Session& session) {
  Command sub = config.command(
      "show",
      "Show the settings that a daemon gets here from the environment and a file, and where each\n"
      "comes from. CHANGES AT tells whether SIGHUP applies a new value.");
  auto args = std::make_shared<FileArgs>();
  sub.option("DAEMON", args->daemon, "agent or coordinator")
      .required()
      .one_of({"agent", "coordinator"});
  sub.option("FILE", args->file, "The TOML file [--config]");
  sub.runs(session, "config", [&session, args] { return show(session.settings, *args); });
}

}  // namespace

void add_config(Command& app, Session& session) {
  Command sub = app.command("config", "Help with the configuration of the daemons");
  sub.require_command();
  add_check(sub, session);
  add_show(sub, session);
  add_example(sub, app, session);
}

}  // namespace rekindle::cli
