#include "tools/cli/config_file.h"

#include <array>
#include <string_view>

#include <CLI/CLI.hpp>

#include "tools/cli/output.h"

namespace rekindle::cli {
namespace {

constexpr std::array<std::string_view, 2> kDaemons = {"agent", "coordinator"};

bool known_to_a_daemon(CLI::App& app, const std::string& option) {
  for (const std::string_view name : kDaemons) {
    if (app.get_subcommand(std::string(name))->get_option_no_throw(option) != nullptr) return true;
  }
  return false;
}

Result<void> apply_item(CLI::App& app, CLI::App& chosen, const CLI::ConfigItem& item) {
  if (item.name == "++" || item.name == "--") return {};  // section begins, ends
  if (item.parents.size() > 1) {
    return fail(ErrorCode::kInvalid, "section [{}.…] is nested; use [agent] and [coordinator]",
                printable(item.parents.front()));
  }
  const std::string section = item.parents.empty() ? "" : item.parents.front();
  bool ours = section.empty() || section == chosen.get_name();
  if (!ours && std::ranges::find(kDaemons, section) == kDaemons.end()) {
    return fail(ErrorCode::kInvalid, "unknown section [{}]; use [agent] and [coordinator]",
                printable(section));
  }
  const std::string flag = "--" + item.name;
  CLI::App& owner = ours ? chosen : *app.get_subcommand(section);
  CLI::Option* option = owner.get_option_no_throw(flag);
  if (option == nullptr) option = app.get_option_no_throw(flag);
  if (option == nullptr && section.empty() && known_to_a_daemon(app, flag)) return {};
  if (option == nullptr || item.name == "config" || item.name == "help") {
    return fail(ErrorCode::kInvalid, "unknown setting '{}'; `rekindle {} --help` lists them",
                printable(item.fullname()), chosen.get_name());
  }
  if (!ours || option->count() > 0) return {};
  const bool is_flag = option->get_expected_max() == 0;
  if (is_flag && item.inputs != std::vector<std::string>{"true"}) {
    if (item.inputs == std::vector<std::string>{"false"}) return {};
    return fail(ErrorCode::kInvalid, "'{}' is true or false", printable(item.fullname()));
  }
  try {
    for (const std::string& input : item.inputs) option->add_result(input);
    option->run_callback();
  } catch (const CLI::Error& error) {
    return fail(ErrorCode::kInvalid, "setting '{}': {}", printable(item.fullname()), error.what());
  }
  return {};
}

}  // namespace

Result<void> apply_config_file(CLI::App& app, CLI::App& chosen, const std::string& path) {
  std::vector<CLI::ConfigItem> items;
  try {
    items = CLI::ConfigTOML().from_file(path);
  } catch (const CLI::FileError&) {
    return fail(ErrorCode::kNotFound, "configuration file {} cannot be read", printable(path));
  } catch (const CLI::Error& error) {
    return fail(ErrorCode::kInvalid, "configuration file {}: {}", printable(path), error.what());
  }
  for (const CLI::ConfigItem& item : items) {
    if (auto applied = apply_item(app, chosen, item); !applied) {
      return fail(std::move(applied).error().with_context("configuration file " + printable(path)));
    }
  }
  return {};
}

}  // namespace rekindle::cli
