#include <set>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "tools/cli/cli_session.h"
#include "tools/cli/command_line.h"
#include "tools/cli/output.h"

// The completion script is made from the parser itself, so that it cannot lag behind it.
namespace rekindle::cli {
namespace {

std::string join(const std::set<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : " ") + word;
  return text;
}

std::set<std::string> option_names(const CLI::App& app) {
  std::set<std::string> names;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) names.insert("--" + name);
  }
  return names;
}

struct Completion {
  // Options that take a path.
  std::set<std::string> directories, files;
  // An option and its values.
  std::vector<std::pair<std::string, std::string>> words;
};

void collect(const CLI::App& app, Completion& completion) {
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) {
      const std::string type = option->get_type_name();
      if (type.starts_with("DIR")) completion.directories.insert("--" + name);
      if (type.starts_with("FILE")) completion.files.insert("--" + name);
      if (name == "transport") completion.words.emplace_back("--transport", "tcp shm verbs");
      if (name == "log-format") completion.words.emplace_back("--log-format", "text json");
      if (name == "log-level") {
        completion.words.emplace_back("--log-level", "trace debug info warn error off");
      }
    }
  }
}

std::string pattern(const std::set<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : "|") + name;
  return text;
}

std::string bash_script(const CLI::App& app) {
  Completion completion;
  collect(app, completion);
  std::set<std::string> commands;
  std::string per_command;
  for (const CLI::App* sub : app.get_subcommands({})) {
    // Not a command for people.
    if (sub->get_group().empty()) continue;
    commands.insert(sub->get_name());
    collect(*sub, completion);
    std::set<std::string> names = option_names(*sub);
    std::set<std::string> inner_commands;
    for (const CLI::App* inner : sub->get_subcommands({})) {
      inner_commands.insert(inner->get_name());
      names.merge(option_names(*inner));
    }
    per_command += fmt::format("    {}) words=\"{}\" inner=\"{}\" ;;\n", sub->get_name(),
                               join(names), join(inner_commands));
  }
  std::string values;
  std::set<std::string> seen;
  for (const auto& [name, words] : completion.words) {
    if (!seen.insert(name).second) continue;
    values +=
        fmt::format("    {}) mapfile -t COMPREPLY < <(compgen -W \"{}\" -- \"$cur\"); return ;;\n",
                    name, words);
  }
  return fmt::format(
      R"(# bash completion for rekindle: source <(rekindle completion bash)
_rekindle() {{
  local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}} command= word words= inner=
  for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    case " {0} " in *" $word "*) command=$word; break ;; esac
  done
  COMPREPLY=()
  case $prev in
    {1}) compopt -o filenames; mapfile -t COMPREPLY < <(compgen -d -- "$cur"); return ;;
    {2}) compopt -o filenames; mapfile -t COMPREPLY < <(compgen -f -- "$cur"); return ;;
{3}  esac
  case $command in
    '') words="{0}" ;;
{4}  esac
  words+=" {5}"
  if [[ $cur == -* || -z $command ]]; then
    mapfile -t COMPREPLY < <(compgen -W "$words" -- "$cur")
  elif [[ -n $inner ]]; then
    mapfile -t COMPREPLY < <(compgen -W "$inner" -- "$cur")
  else
    compopt -o filenames 2>/dev/null
    mapfile -t COMPREPLY < <(compgen -f -- "$cur")
  fi
}}
complete -F _rekindle rekindle
)",
      join(commands), pattern(completion.directories), pattern(completion.files), values,
      per_command, join(option_names(app)));
}

}  // namespace

void add_completion(Command& app, Session& session) {
  Command sub =
      app.command("completion", "Print a completion script: source <(rekindle completion bash)");
  sub.require_command();
  Command bash = sub.command("bash", "For bash");
  bash.runs(session, "completion", [app]() -> Result<int> {
    print(bash_script(app.parser()));
    return kExitOk;
  });
}

}  // namespace rekindle::cli
