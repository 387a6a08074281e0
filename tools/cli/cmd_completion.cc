#include <filesystem>
#include <fstream>
#include <memory>
#include <string>

#include "tools/cli/cli_session.h"
#include "tools/cli/command_line.h"
#include "tools/cli/command_texts.h"
#include "tools/cli/output.h"

namespace rekindle::cli {

namespace {

Result<void> write_page(const std::filesystem::path& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << text;
  file.flush();
  if (!file) return fail(ErrorCode::kInternal, "{} cannot be written", path.string());
  return {};
}

Result<void> write_pages(const CommandText& root, const std::filesystem::path& directory) {
  TRY_VOID(write_page(directory / "rekindle.1", man_page(root, nullptr)));
  for (const CommandText& command : root.commands) {
    TRY_VOID(write_page(directory / ("rekindle-" + command.name + ".1"), man_page(root, &command)));
  }
  return {};
}

struct ManArguments {
  std::string command;
  std::filesystem::path to;
};

Result<int> run_man(const Command& app, const ManArguments& args) {
  const CommandText root = describe(app);
  if (!args.to.empty()) {
    TRY_VOID(write_pages(root, args.to));
    return kExitOk;
  }
  if (args.command.empty()) {
    print(man_page(root, nullptr));
    return kExitOk;
  }
  for (const CommandText& command : root.commands) {
    if (command.name != args.command) continue;
    print(man_page(root, &command));
    return kExitOk;
  }
  return fail(ErrorCode::kInvalid, "there is no command '{}'; `rekindle --help` lists them",
              printable(args.command));
}

}  // namespace

void add_completion(Command& app, Session& session) {
  Command sub = app.command("completion", "Print a completion script for a shell");
  sub.require_command();
  const auto shell = [&](const char* name, const char* about,
                         std::string (*script)(const CommandText&)) {
    sub.command(name, about).runs(session, "completion", [app, script]() -> Result<int> {
      print(script(describe(app)));
      return kExitOk;
    });
  };
  shell("bash", "For bash: source <(rekindle completion bash)", bash_completion);
  shell("zsh", "For zsh: source <(rekindle completion zsh)", zsh_completion);
  shell("fish", "For fish: rekindle completion fish | source", fish_completion);
}

void add_man(Command& app, Session& session) {
  const auto args = std::make_shared<ManArguments>();
  Command sub = app.command("man", "Print a manual page: rekindle man --command pull | man -l -");
  auto command = sub.option("--command", args->command, "Its page [that of rekindle]");
  command.type_name("COMMAND");
  sub.option("--to", args->to, "Write all pages into this directory instead")
      .type_name("DIR")
      .excludes(command);
  sub.runs(session, "man", [app, args] { return run_man(app, *args); });
}

}  // namespace rekindle::cli
