#include <string>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tools/cli/cli_session.h"
#include "tools/cli/command_line.h"
#include "tools/cli/command_texts.h"
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

// The help of each setting as a comment, and below it the key.
std::string settings_of(const CommandText& command) {
  std::string text;
  for (const OptionText& option : command.options) {
    const std::string key = option.names.front().substr(2);
    if (!is_setting(key)) continue;
    text += "\n# ";
    for (const char c : option.help) {
      text += c;
      if (c == '\n') text += "# ";
    }
    text += fmt::format("\n#{} = {}\n", key, value_of(option));
  }
  return text;
}

}  // namespace

void add_config(Command& app, Session& session) {
  Command sub = app.command("config", "Help with the configuration file of the daemons");
  sub.require_command();
  Command example = sub.command(
      "example", "Print a file with every key explained, and none set: a start for your own");
  example.runs(session, "config", [app]() -> Result<int> {
    const CommandText root = describe(app);
    std::string text = kHead + settings_of(root);
    for (const CommandText& command : root.commands) {
      if (!is_daemon(command.name)) continue;
      text += fmt::format("\n[{}]\n{}", command.name, settings_of(command));
    }
    print(text);
    return kExitOk;
  });
}

}  // namespace rekindle::cli
