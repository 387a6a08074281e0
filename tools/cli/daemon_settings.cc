#include "tools/cli/daemon_settings.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <sstream>

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <fmt/ranges.h>

#include "src/base/log.h"
#include "src/base/settings_file.h"
#include "tools/cli/arguments.h"
#include "tools/cli/command_line.h"
#include "tools/cli/output.h"

namespace rekindle::cli {
namespace {

// The file, with the line of each key.
class SettingsFile {
 public:
  static Result<SettingsFile> read(const std::string& path) {
    constexpr std::size_t kMaxBytes = std::size_t{1} << 20;
    SettingsFile file;
    file.path_ = path;
    auto text = read_trusted_file(path, kMaxBytes);
    if (!text) return fail(std::move(text).error().with_context("configuration file"));
    file.text_ = std::move(*text);
    try {
      std::istringstream stream(file.text_);
      file.items_ = CLI::ConfigTOML().from_config(stream);
    } catch (const CLI::Error& error) {
      return fail(ErrorCode::kInvalid, "configuration file {}: {}", printable(path), error.what());
    }
    return file;
  }
  const std::vector<CLI::ConfigItem>& items() const { return items_; }

  // "FILE:LINE" of each line that sets the key. The parser tells no lines, so this looks for the
  // key below its section.
  std::vector<std::string> places_of(const CLI::ConfigItem& item) const {
    const std::string wanted = item.parents.empty() ? "" : item.parents.front();
    std::vector<std::string> places;
    std::istringstream lines(text_);
    std::string line;
    std::string section;
    for (int number = 1; std::getline(lines, line); ++number) {
      std::erase_if(line, [](char c) { return c == ' ' || c == '\t' || c == '"'; });
      if (line.starts_with('[')) section = line.substr(1, line.find(']') - 1);
      const bool is_key = line.starts_with(item.name + "=") && section == wanted;
      const bool is_dotted = !wanted.empty() && line.starts_with(item.fullname() + "=");
      if (is_key || is_dotted) places.push_back(fmt::format("{}:{}", path_, number));
    }
    if (places.empty()) places.push_back(path_);
    return places;
  }

 private:
  std::string path_;
  std::string text_;
  std::vector<CLI::ConfigItem> items_;
};

// The value of a flag, as files, variables and other tools write it.
std::optional<bool> parse_switch(std::string text) {
  std::ranges::transform(text, text.begin(), [](char c) {
    return 'A' <= c && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  });
  if (text == "true" || text == "1" || text == "yes" || text == "on") return true;
  if (text == "false" || text == "0" || text == "no" || text == "off") return false;
  return std::nullopt;
}

// Of a key at the top level of the file and the same key in the daemon's section.
enum class Winner { kSection, kTopLevel };

// A parser that has only the daemons, and what it reads.
class Reading {
 public:
  explicit Reading(Winner winner) : winner_(winner) {
    app_.fallthrough();
    app_.require_subcommand(1);
    add_shared_options(app_, settings_.shared);
    Command root(app_);
    Command coordinator = root.command("coordinator", "");
    add_coordinator_options(coordinator, coordinator_);
    Command agent = root.command("agent", "");
    add_agent_options(agent, agent_);
    // apply_environment() looks at them, so that it knows which values come from there.
    for (CLI::Option* option : app_.get_options()) option->envname("");
  }

  DaemonSettings read(const std::vector<std::string>& words, Environment environment,
                      Problems& problems) {
    try {
      app_.parse(std::vector<std::string>(words.rbegin(), words.rend()));
    } catch (const CLI::Error& error) {
      problems.add("", Error(ErrorCode::kInvalid, error.what()));
      return settings_;
    }
    daemon_ = app_.get_subcommands().front();
    note_places("command line", "");
    if (environment == Environment::kApplies) apply_environment(problems);
    if (!settings_.shared.config.empty()) apply_file(problems);
    list();
    problems.set_places(places_);
    const bool is_agent = daemon_->get_name() == "agent";
    if (is_agent) {
      settings_.agent = agent_options(settings_.shared, agent_, problems);
    } else {
      settings_.coordinator = coordinator_options(settings_.shared, coordinator_, problems);
    }
    return settings_;
  }

 private:
  // Each option that may be set, with the section of its setting.
  template <typename Function>
  void for_each_option(Function function) {
    for (CLI::App* app : {&app_, daemon_}) {
      const std::string section = app == &app_ ? "" : app->get_name();
      for (CLI::Option* option : app->get_options()) {
        const auto& names = option->get_lnames();
        if (!names.empty() && names.front() != "help") function(*option, section, names.front());
      }
    }
  }

  // The options that have a value by now, and had none before, have it from there.
  void note_places(const std::string& origin, const std::string& place) {
    for_each_option([&](CLI::Option& option, const std::string&, const std::string& name) {
      if (!has_value(option) || !origins_.try_emplace(name, origin).second) return;
      places_[name] = place;
    });
  }

  bool has_value(const CLI::Option& option) const {
    return option.count() > 0 || switched_off_.contains(&option);
  }

  // Returns what is wrong with the value, or "".
  std::string set(CLI::Option& option, const std::vector<std::string>& inputs) {
    if (option.get_expected_max() == 0) {
      const auto on = parse_switch(fmt::format("{}", fmt::join(inputs, " ")));
      if (!on) {
        return fmt::format("{} '{}': write true or false; 1, 0, yes, no, on and off also do",
                           option.get_name(), printable(fmt::format("{}", fmt::join(inputs, " "))));
      }
      if (*on) {
        option.add_result("true");
        option.run_callback();
      } else {
        switched_off_.insert(&option);
      }
      return "";
    }
    try {
      for (const std::string& input : inputs) option.add_result(input);
      option.run_callback();
    } catch (const CLI::Error& error) {
      option.clear();
      return error.what();
    }
    return "";
  }

  void apply_environment(Problems& problems) {
    for_each_option([&](CLI::Option& option, const std::string& section, const std::string& name) {
      const std::string variable = variable_of(section, name);
      const char* value = std::getenv(variable.c_str());
      if (has_value(option) || value == nullptr) return;
      const bool is_empty = *value == 0;
      if (is_empty && option.get_type_name() != "FILE") return;
      if (const std::string wrong = set(option, {value}); !wrong.empty()) {
        problems.add(variable, Error(ErrorCode::kInvalid, wrong));
      }
      // An option that takes an empty name does not need the file.
      if (is_empty) option.clear();
      note_places(variable, variable);
    });
    settings_.unknown_variables = unknown_variables();
  }

  std::vector<std::string> unknown_variables() {
    std::vector<std::string> unknown;
    for (char** entry = environ; *entry != nullptr; ++entry) {
      const std::string name(*entry, std::string_view(*entry).find('='));
      for (const CLI::App* daemon : app_.get_subcommands({})) {
        if (!name.starts_with(variable_of(daemon->get_name(), "")) || is_of_kubernetes(name)) {
          continue;
        }
        const auto options = daemon->get_options();
        const auto has = [&](const CLI::Option* option) {
          const auto& names = option->get_lnames();
          return !names.empty() && variable_of(daemon->get_name(), names.front()) == name;
        };
        if (std::ranges::none_of(options, has)) unknown.push_back(name);
      }
    }
    std::ranges::sort(unknown);
    return unknown;
  }

  // For a Service named rekindle-agent, Kubernetes sets REKINDLE_AGENT_SERVICE_HOST, _PORT and
  // others in each pod.
  static bool is_of_kubernetes(const std::string& name) {
    return name.find("_SERVICE_HOST") != std::string::npos ||
           name.find("_SERVICE_PORT") != std::string::npos || name.ends_with("_PORT") ||
           name.find("_PORT_") != std::string::npos;
  }

  void apply_file(Problems& problems) {
    const auto file = SettingsFile::read(settings_.shared.config);
    if (!file) return problems.add("", file.error());
    auto items = file->items();
    std::ranges::stable_partition(items, [this](const CLI::ConfigItem& item) {
      return item.parents.empty() == (winner_ == Winner::kTopLevel);
    });
    std::set<std::string> repeated;
    for (const CLI::ConfigItem& item : items) {
      // A section begins or ends.
      if (item.name == "++" || item.name == "--") continue;
      const auto places = file->places_of(item);
      const std::string& place = places.front();
      const std::string where = "configuration file " + printable(place);
      if (places.size() > 1) {
        if (!repeated.insert(place).second) continue;
        problems.add(where, Error(ErrorCode::kInvalid,
                                  fmt::format("'{}' is given again at {}: keep one of them",
                                              printable(item.fullname()), printable(places[1]))));
        continue;
      }
      if (auto applied = apply(item, where); !applied) {
        problems.add(where, std::move(applied).error());
      }
      note_places(place, where);
    }
  }

  Result<void> apply(const CLI::ConfigItem& item, const std::string& where) {
    const std::string section = item.parents.empty() ? "" : item.parents.front();
    if (item.parents.size() > 1 || (!section.empty() && !is_daemon(section))) {
      return fail(ErrorCode::kInvalid, "unknown section [{}]; use [agent] and [coordinator]",
                  printable(fmt::format("{}", fmt::join(item.parents, "."))));
    }
    const std::string flag = "--" + item.name;
    CLI::App& owner = section.empty() ? *daemon_ : *app_.get_subcommand(section);
    CLI::Option* option = owner.get_option_no_throw(flag);
    if (option == nullptr) option = app_.get_option_no_throw(flag);
    if (!is_setting(item.name)) option = nullptr;
    // At the top level, a key may be for the other daemon.
    if (option == nullptr && section.empty()) {
      for (CLI::App* daemon : app_.get_subcommands({})) {
        if (is_setting(item.name) && daemon->get_option_no_throw(flag) != nullptr) return {};
      }
    }
    if (option == nullptr) {
      return fail(ErrorCode::kInvalid, "unknown setting '{}'; `rekindle {} --help` lists them",
                  printable(item.fullname()), owner.get_name());
    }
    const bool is_ours = section.empty() || section == daemon_->get_name();
    if (!is_ours) return {};
    if (has_value(*option)) {
      if (section.empty() && places_[item.name].starts_with("configuration file ")) {
        settings_.shadowed.push_back(
            {where, fmt::format("{}: '{}' has no effect on the {}, because {} sets it in [{}]",
                                where, printable(item.name), daemon_->get_name(),
                                printable(origins_[item.name]), daemon_->get_name())});
      }
      return {};
    }
    const std::string wrong = set(*option, item.inputs);
    return wrong.empty() ? Result<void>() : fail(Error(ErrorCode::kInvalid, wrong));
  }

  void list() {
    for_each_option([&](CLI::Option& option, const std::string& section, const std::string& name) {
      if (!is_setting(name)) return;
      const auto origin = origins_.find(name);
      if (origin == origins_.end()) {
        settings_.all.push_back({section, name, default_in(option.get_description()), "default"});
        return;
      }
      const std::string value = switched_off_.contains(&option)
                                    ? "false"
                                    : fmt::format("{}", fmt::join(option.results(), ","));
      settings_.all.push_back({section, name, value, origin->second});
    });
  }

  // A help ends with "[default]".
  static std::string default_in(const std::string& help) {
    const auto begin = help.rfind('[');
    if (!help.ends_with(']') || begin == std::string::npos) return "";
    std::string text = help.substr(begin + 1, help.size() - begin - 2);
    std::ranges::replace(text, '\n', ' ');
    return text;
  }

  const Winner winner_;
  CLI::App app_;
  CoordinatorArgs coordinator_;
  AgentArgs agent_;
  DaemonSettings settings_;
  CLI::App* daemon_ = nullptr;
  std::set<const CLI::Option*> switched_off_;
  // By the long name of an option: as in Setting, and as in Problem.
  std::map<std::string, std::string> origins_;
  std::map<std::string, std::string> places_;
};

}  // namespace

DaemonSettings read_daemon_settings(const std::vector<std::string>& words, Environment environment,
                                    Problems& problems) {
  DaemonSettings settings = Reading(Winner::kSection).read(words, environment, problems);
  if (settings.shadowed.empty()) return settings;
  // A key without an effect has to be right, too.
  Problems others;
  (void)Reading(Winner::kTopLevel).read(words, environment, others);
  for (const Problem& problem : others.all()) {
    const bool is_shadowed =
        std::ranges::find(settings.shadowed, problem.where, &DaemonSettings::Shadowed::where) !=
        settings.shadowed.end();
    if (is_shadowed) problems.add(problem.where, problem.error);
  }
  return settings;
}

Result<DaemonSettings> Reloader::read() {
  Problems problems;
  DaemonSettings settings = read_daemon_settings(words_, Environment::kApplies, problems);
  TRY_VOID(problems.none());
  TRY(const auto level, log::parse_level(daemon_log_level(settings.shared)));
  for (std::size_t i = 0; i < running_.size(); ++i) {
    const Setting& now = settings.all[i];
    if (now.value == running_[i].value) continue;
    if (!applies_at_reload(now.section, now.name)) {
      log::warn("config.needs_restart", "setting", now.name, "value", now.value, "running",
                running_[i].value);
      continue;
    }
    log::info("config.changed", "setting", now.name, "value", now.value, "before",
              running_[i].value);
    running_[i] = now;
  }
  log::set_level(level);
  return settings;
}

}  // namespace rekindle::cli
