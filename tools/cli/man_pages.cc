#include <algorithm>

#include <fmt/format.h>

#include "src/base/version.h"
#include "tools/cli/command_texts.h"
#include "tools/cli/output.h"

namespace rekindle::cli {

namespace {

std::string upper(std::string text) {
  std::ranges::transform(text, text.begin(), [](char c) {
    return 'a' <= c && c <= 'z' ? static_cast<char>(c - 32) : c;
  });
  return text;
}

// A line of text, in which nothing is a request of roff.
std::string roff(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if ((c == '.' || c == '\'') && (out.empty() || out.back() == '\n')) out += "\\&";
    if (c == '\\') {
      out += "\\e";
    } else if (c == '-') {
      out += "\\-";
    } else {
      out += c;
    }
  }
  return out;
}

std::string section(const std::string& title, const std::string& body) {
  return body.empty() ? "" : ".SH " + title + "\n" + body;
}

std::string option_text(const OptionText& option) {
  std::string names;
  for (const std::string& name : option.names) {
    names += fmt::format("{}\\fB{}\\fR", names.empty() ? "" : ", ", roff(name));
  }
  std::string argument;
  if (!option.values.empty()) {
    argument = fmt::format(" {}", fmt::join(option.values, "|"));
  } else if (!option.type.empty() && !option.positional) {
    argument = fmt::format(" \\fI{}\\fR", roff(option.type));
  }
  std::string text = fmt::format(".TP\n{}{}\n{}\n", names, argument, roff(option.help));
  if (!option.environment.empty()) {
    text += fmt::format("Environment: \\fB{}\\fR.\n", option.environment);
  }
  return text;
}

// Options of other groups follow under the names of these.
std::string options_text(const CommandText& command) {
  std::string text;
  std::vector<std::string> groups;
  for (const OptionText& option : command.options) {
    if (std::ranges::find(groups, option.group) == groups.end()) groups.push_back(option.group);
  }
  for (const std::string& group : groups) {
    if (group != "Options" && group != "Positionals") text += ".SS " + roff(group) + "\n";
    for (const OptionText& option : command.options) {
      if (option.group == group) text += option_text(option);
    }
  }
  return text;
}

std::string literal(const std::string& text) {
  return text.empty() ? "" : ".nf\n" + roff(text) + (text.ends_with('\n') ? "" : "\n") + ".fi\n";
}

std::string synopsis(const CommandText& command, const std::string& name) {
  std::string text = fmt::format(".B {}\n[\\fIOPTIONS\\fR]\n", roff(name));
  for (const OptionText& option : command.options) {
    if (option.positional) text += fmt::format("\\fI{}\\fR\n", roff(option.names.front()));
  }
  if (!command.commands.empty()) text += "\\fICOMMAND\\fR\n";
  return text;
}

}  // namespace

std::string man_page(const CommandText& root, const CommandText* command) {
  const CommandText& own = command == nullptr ? root : *command;
  const std::string page = command == nullptr ? "rekindle" : "rekindle-" + own.name;
  const std::string called = command == nullptr ? "rekindle" : "rekindle " + own.name;
  std::string text =
      fmt::format(".TH {} 1 \"\" \"rekindle {}\" \"Rekindle\"\n", roff(upper(page)), version());
  text += section("NAME", fmt::format("{} \\- {}\n", roff(page), roff(summary(own.about))));
  text += section("SYNOPSIS", synopsis(own, called));
  text += section("DESCRIPTION", roff(own.about) + "\n");
  text += section("OPTIONS", options_text(own));
  std::string commands;
  for (const CommandText& inner : own.commands) {
    commands += fmt::format(".TP\n\\fB{}\\fR\n{}\n", roff(inner.name), roff(summary(inner.about)));
    if (command == nullptr) {
      commands += fmt::format("See \\fBrekindle\\-{}\\fR(1).\n", roff(inner.name));
    } else {
      commands += ".RS\n" + options_text(inner) + ".RE\n";
    }
  }
  text += section("COMMANDS", commands);
  if (command != nullptr) text += section("OPTIONS OF EVERY COMMAND", options_text(root));
  text += section("EXAMPLES", literal(own.footer));
  text += section("EXIT STATUS", literal(exit_code_help()));
  if (command != nullptr) text += section("SEE ALSO", "\\fBrekindle\\fR(1)\n");
  return text;
}

}  // namespace rekindle::cli
