#include "tools/cli/command_texts.h"

#include <algorithm>

#include <CLI/CLI.hpp>

namespace rekindle::cli {

namespace {

// CLI11 appends what a validator says to the name of the type: "NAME:{tcp,shm}".
void split_type(const std::string& text, OptionText& option) {
  option.type = text.substr(0, text.find(':', text.starts_with("HOST:PORT") ? 9 : 0));
  const auto open = text.find(":{");
  const auto close = text.find('}');
  if (open == std::string::npos || close == std::string::npos) return;
  std::string value;
  for (const char c : text.substr(open + 2, close - open - 2)) {
    if (c != ',') {
      value += c;
      continue;
    }
    option.values.push_back(value);
    value.clear();
  }
  option.values.push_back(value);
}

OptionText describe(const CLI::Option& from) {
  OptionText option;
  option.positional = !from.nonpositional();
  if (option.positional) {
    option.names.push_back(from.get_name(true, false));
  } else {
    for (const std::string& name : from.get_lnames()) option.names.push_back("--" + name);
    for (const std::string& name : from.get_snames()) option.names.push_back("-" + name);
  }
  if (from.get_expected_max() != 0) split_type(from.get_type_name(), option);
  option.repeatable = from.get_expected_max() > 1;
  option.help = from.get_description();
  option.environment = from.get_envname();
  option.group = from.get_group();
  return option;
}

CommandText describe(const CLI::App& from) {
  CommandText command;
  command.name = from.get_name();
  command.about = from.get_description();
  command.footer = from.get_footer();
  for (const CLI::Option* option : from.get_options()) {
    if (option->get_group().empty()) continue;
    OptionText text = describe(*option);
    const std::string& name = text.names.front();
    if (is_daemon(command.name) && is_setting(name.substr(2))) {
      text.environment = variable_of(command.name, name.substr(2));
    }
    command.options.push_back(std::move(text));
  }
  for (const CLI::App* inner : from.get_subcommands({})) {
    if (!inner->get_group().empty()) command.commands.push_back(describe(*inner));
  }
  return command;
}

}  // namespace

CommandText describe(const Command& command) { return describe(command.parser()); }

std::string summary(const std::string& about) {
  std::string text = about;
  std::ranges::replace(text, '\n', ' ');
  if (const auto end = text.find_first_of(".:"); end != std::string::npos) text.resize(end);
  return text;
}

}  // namespace rekindle::cli
