#pragma once

#include <string>
#include <vector>

#include "tools/cli/command_line.h"

namespace rekindle::cli {

// What the parser knows of an option, for texts that are made from it: completion scripts and
// manual pages cannot lag behind it.
struct OptionText {
  // "--watch", "-w"; of a positional, its only name: "MODEL[@VERSION]".
  std::vector<std::string> names;
  // "DIR", "HOST:PORT"; "" for a flag.
  std::string type;
  // The only texts that it takes. Empty: any.
  std::vector<std::string> values;
  std::string help;
  // The environment variable that sets it, or "".
  std::string environment;
  std::string group;
  bool positional = false;
  bool repeatable = false;

  bool takes_directory() const { return type.starts_with("DIR"); }
  bool takes_file() const { return type.starts_with("FILE"); }
};
struct CommandText {
  std::string name;
  std::string about;
  // Examples.
  std::string footer;
  std::vector<OptionText> options;
  // Without those that are hidden.
  std::vector<CommandText> commands;
};

CommandText describe(const Command& command);
// The first sentence, in one line.
std::string summary(const std::string& about);

std::string bash_completion(const CommandText& root);
std::string zsh_completion(const CommandText& root);
std::string fish_completion(const CommandText& root);

// In roff, for man(1). `command`: null for the page of rekindle itself, else one of its commands.
std::string man_page(const CommandText& root, const CommandText* command);

}  // namespace rekindle::cli
