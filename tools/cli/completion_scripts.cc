#include <map>
#include <set>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tools/cli/command_texts.h"

// One script for each shell. `%` in a template stands for what is put in, so that the shell's
// braces need no escapes.
namespace rekindle::cli {

namespace {

using Words = std::set<std::string>;

std::string filled(const std::string& pattern, const std::vector<std::string>& parts) {
  std::string text;
  std::size_t next = 0;
  for (const char c : pattern) {
    if (c == '%') {
      text += parts.at(next++);
    } else {
      text += c;
    }
  }
  return text;
}

std::string joined(const Words& words) { return fmt::format("{}", fmt::join(words, " ")); }

// Within single quotes.
std::string single_quoted(const std::string& text) {
  std::string out = "'";
  for (const char c : text) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return out + "'";
}

Words long_names(const CommandText& command) {
  Words names;
  for (const OptionText& option : command.options) {
    for (const std::string& name : option.names) {
      if (name.starts_with("--")) names.insert(name);
    }
  }
  return names;
}

// --- bash

// What follows an option, whichever command it belongs to.
struct Arguments {
  Words directories;
  Words files;
  std::map<std::string, std::string> values;
};

void collect(const CommandText& command, Arguments& arguments) {
  for (const OptionText& option : command.options) {
    for (const std::string& name : option.names) {
      if (option.takes_directory()) arguments.directories.insert(name);
      if (option.takes_file()) arguments.files.insert(name);
      if (option.positional || option.values.empty()) continue;
      arguments.values.emplace(name, fmt::format("{}", fmt::join(option.values, " ")));
    }
  }
  for (const CommandText& inner : command.commands) collect(inner, arguments);
}

constexpr const char* kBash = R"(# bash completion for rekindle: source <(rekindle completion bash)
_rekindle() {
  local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} command= word words= inner=
  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
    case " % " in *" $word "*) command=$word; break ;; esac
  done
  COMPREPLY=()
  case $prev in
    %) compopt -o filenames; mapfile -t COMPREPLY < <(compgen -d -- "$cur"); return ;;
    %) compopt -o filenames; mapfile -t COMPREPLY < <(compgen -f -- "$cur"); return ;;
%  esac
  case $command in
    '') words="%" ;;
%  esac
  words+=" %"
  if [[ $cur == -* || -z $command ]]; then
    mapfile -t COMPREPLY < <(compgen -W "$words" -- "$cur")
  elif [[ -n $inner ]]; then
    mapfile -t COMPREPLY < <(compgen -W "$inner" -- "$cur")
  else
    compopt -o filenames 2>/dev/null
    mapfile -t COMPREPLY < <(compgen -f -- "$cur")
  fi
}
complete -F _rekindle rekindle
)";

// --- zsh

std::string zsh_text(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == ']' || c == '[' || c == ':' || c == '\\') out += '\\';
    out += c;
  }
  return out;
}

std::string zsh_action(const OptionText& option) {
  if (option.takes_directory()) return "_files -/";
  if (option.takes_file()) return "_files";
  if (!option.values.empty()) return fmt::format("({})", fmt::join(option.values, " "));
  return " ";
}

// The arguments of _arguments for the options of a command.
std::string zsh_options(const CommandText& command) {
  std::string out;
  for (const OptionText& option : command.options) {
    if (option.positional) continue;
    for (const std::string& name : option.names) {
      const bool is_long = name.starts_with("--");
      std::string spec =
          fmt::format("{}{}{}[{}]", option.repeatable ? "*" : "", name,
                      option.type.empty() ? "" : (is_long ? "=" : "+"), zsh_text(option.help));
      if (!option.type.empty()) {
        spec += fmt::format(":{}:{}", zsh_text(option.type), zsh_action(option));
      }
      out += "    " + single_quoted(spec) + " \\\n";
    }
  }
  return out;
}

void zsh_function(const CommandText& root, const CommandText& command, const std::string& function,
                  std::string& out) {
  std::string body = filled("%() {\n  local curcontext=$curcontext state line\n", {function});
  std::string options = zsh_options(command);
  if (&command != &root) options += zsh_options(root);
  if (command.commands.empty()) {
    out += body + "  _arguments -s \\\n" + options + "    '*:file:_files'\n}\n";
    return;
  }
  std::string list;
  std::string cases;
  for (const CommandText& inner : command.commands) {
    const std::string name = function + "_" + inner.name;
    list += "    " + single_quoted(inner.name + ":" + summary(inner.about)) + "\n";
    cases += filled("    %) % ;;\n", {inner.name, name});
    zsh_function(root, inner, name, out);
  }
  body += filled(
      "  local -a commands=(\n%  )\n"
      "  _arguments -C -s \\\n%    '1: :->command' '*:: :->rest' && return\n"
      "  case $state in\n"
      "    command) _describe -t commands command commands ;;\n"
      "    rest) case $line[1] in\n%    esac ;;\n"
      "  esac\n}\n",
      {list, options, cases});
  out += body;
}

// --- fish

std::string fish_quoted(const std::string& text) {
  std::string out = "'";
  for (const char c : text) {
    if (c == '\'' || c == '\\') out += '\\';
    out += c == '\n' ? ' ' : c;
  }
  return out + "'";
}

void fish_options(const CommandText& command, const std::string& condition, std::string& out) {
  for (const OptionText& option : command.options) {
    if (option.positional) continue;
    out += "complete -c rekindle" + condition;
    for (const std::string& name : option.names) {
      out += name.starts_with("--") ? " -l " + name.substr(2) : " -s " + name.substr(1);
    }
    if (option.takes_directory()) {
      out += " -x -a '(__fish_complete_directories)'";
    } else if (option.takes_file()) {
      out += " -r -F";
    } else if (!option.values.empty()) {
      out += fmt::format(" -x -a '{}'", fmt::join(option.values, " "));
    } else if (!option.type.empty()) {
      out += " -x";
    }
    out += " -d " + fish_quoted(option.help) + "\n";
  }
}

}  // namespace

std::string bash_completion(const CommandText& root) {
  Arguments arguments;
  collect(root, arguments);
  Words commands;
  std::string per_command;
  for (const CommandText& command : root.commands) {
    commands.insert(command.name);
    Words names = long_names(command);
    Words inner_commands;
    for (const CommandText& inner : command.commands) {
      inner_commands.insert(inner.name);
      names.merge(long_names(inner));
    }
    per_command += fmt::format("    {}) words=\"{}\" inner=\"{}\" ;;\n", command.name,
                               joined(names), joined(inner_commands));
  }
  std::string values;
  for (const auto& [name, words] : arguments.values) {
    values +=
        fmt::format("    {}) mapfile -t COMPREPLY < <(compgen -W \"{}\" -- \"$cur\"); return ;;\n",
                    name, words);
  }
  return filled(kBash, {joined(commands), fmt::format("{}", fmt::join(arguments.directories, "|")),
                        fmt::format("{}", fmt::join(arguments.files, "|")), values,
                        joined(commands), per_command, joined(long_names(root))});
}

std::string zsh_completion(const CommandText& root) {
  std::string out =
      "#compdef rekindle\n# zsh completion for rekindle: source <(rekindle completion zsh)\n";
  zsh_function(root, root, "_rekindle", out);
  return out +
         "if [[ $funcstack[1] == _rekindle ]]; then\n  _rekindle \"$@\"\nelse\n"
         "  compdef _rekindle rekindle\nfi\n";
}

std::string fish_completion(const CommandText& root) {
  std::string out =
      "# fish completion for rekindle: rekindle completion fish | source\n"
      "complete -c rekindle -f\n";
  fish_options(root, "", out);
  for (const CommandText& command : root.commands) {
    out += fmt::format("complete -c rekindle -n __fish_use_subcommand -a {} -d {}\n", command.name,
                       fish_quoted(summary(command.about)));
    const std::string chosen = "__fish_seen_subcommand_from " + command.name;
    fish_options(command, fmt::format(" -n '{}'", chosen), out);
    if (command.commands.empty()) {
      out += fmt::format("complete -c rekindle -n '{}' -F\n", chosen);
      continue;
    }
    Words inner_names;
    for (const CommandText& inner : command.commands) inner_names.insert(inner.name);
    for (const CommandText& inner : command.commands) {
      out += fmt::format(
          "complete -c rekindle -n '{}; and not __fish_seen_subcommand_from {}' -a {} -d {}\n",
          chosen, joined(inner_names), inner.name, fish_quoted(summary(inner.about)));
      fish_options(inner,
                   fmt::format(" -n '{}; and __fish_seen_subcommand_from {}'", chosen, inner.name),
                   out);
    }
  }
  return out;
}

}  // namespace rekindle::cli
