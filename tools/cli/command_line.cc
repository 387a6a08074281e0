#include "tools/cli/command_line.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include <CLI/CLI.hpp>

#include "tools/cli/cli_session.h"
#include "tools/cli/output.h"
#include "transport/verbs/host/hca_filter.h"

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
  // A section begins or ends.
  if (item.name == "++" || item.name == "--") return {};
  if (item.parents.size() > 1) {
    return fail(ErrorCode::kInvalid, "section [{}.…] is nested; use [agent] and [coordinator]",
                printable(item.parents.front()));
  }
  const std::string section = item.parents.empty() ? "" : item.parents.front();
  bool ours = section.empty() || section == chosen.get_name();
  if (!ours && !is_daemon(section)) {
    return fail(ErrorCode::kInvalid, "unknown section [{}]; use [agent] and [coordinator]",
                printable(section));
  }
  const std::string flag = "--" + item.name;
  CLI::App& owner = ours ? chosen : *app.get_subcommand(section);
  CLI::Option* option = owner.get_option_no_throw(flag);
  if (option == nullptr) option = app.get_option_no_throw(flag);
  if (option == nullptr && section.empty() && known_to_a_daemon(app, flag)) return {};
  if (option == nullptr || !is_setting(item.name)) {
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

CommandOption& CommandOption::type_name(const std::string& name) {
  option_->type_name(name);
  return *this;
}

CommandOption& CommandOption::group(const std::string& name) {
  option_->group(name);
  return *this;
}

CommandOption& CommandOption::required() {
  option_->required();
  return *this;
}

CommandOption& CommandOption::excludes(CommandOption other) {
  option_->excludes(other.option_);
  return *this;
}

CommandOption& CommandOption::needs(CommandOption other) {
  option_->needs(other.option_);
  return *this;
}

CommandOption& CommandOption::one_of(std::initializer_list<const char*> values) {
  option_->check(CLI::IsMember(std::vector<std::string>(values.begin(), values.end())));
  return *this;
}

template <typename Number>
CommandOption& CommandOption::between(Number least, Number most) {
  option_->check(CLI::Range(least, most));
  return *this;
}
template CommandOption& CommandOption::between(int, int);
template CommandOption& CommandOption::between(std::uint32_t, std::uint32_t);
template CommandOption& CommandOption::between(double, double);

CommandOption& CommandOption::check(std::function<std::string(const std::string&)> problem) {
  option_->check(std::move(problem));
  return *this;
}

CommandOption& CommandOption::delimiter(char separator) {
  option_->delimiter(separator);
  return *this;
}

Command Command::command(const std::string& name, const std::string& about) {
  return Command(*app_->add_subcommand(name, about));
}

template <typename Value>
CommandOption Command::option(const std::string& name, Value& value, const std::string& help) {
  return CommandOption(app_->add_option(name, value, help));
}
template CommandOption Command::option(const std::string&, std::string&, const std::string&);
template CommandOption Command::option(const std::string&, std::vector<std::string>&,
                                       const std::string&);
template CommandOption Command::option(const std::string&, int&, const std::string&);
template CommandOption Command::option(const std::string&, double&, const std::string&);
template CommandOption Command::option(const std::string&, std::int64_t&, const std::string&);
template CommandOption Command::option(const std::string&, std::uint32_t&, const std::string&);
template CommandOption Command::option(const std::string&, std::uint64_t&, const std::string&);
template CommandOption Command::option(const std::string&, std::filesystem::path&,
                                       const std::string&);
template CommandOption Command::option(const std::string&, std::optional<std::uint32_t>&,
                                       const std::string&);

CommandOption Command::flag(const std::string& name, bool& value, const std::string& help) {
  return CommandOption(app_->add_flag(name, value, help));
}

void Command::footer(const std::string& text) { app_->footer(text); }

void Command::require_command() { app_->require_subcommand(1); }

void Command::hide() { app_->group(""); }

void Command::runs(Session& session, const std::string& name, std::function<Result<int>()> body) {
  app_->callback([&session, name, body = std::move(body)] { session.choose(name, body); });
}

void Command::runs_daemon(Session& session, const std::string& name,
                          std::function<Result<int>()> body) {
  app_->callback([&session, name, body = std::move(body)] {
    session.daemon = true;
    session.choose(name, body);
  });
}

void add_otlp_option(Command& command, std::string& url) {
  command
      .option("--otlp", url,
              "Collector that takes the spans of operations, by OTLP/HTTP in JSON, such as\n"
              "http://localhost:4318; without a path: /v1/traces [none]")
      .type_name("URL");
}

void add_fabric_options(Command& command, transport::verbs::FabricOptions& options) {
  constexpr const char* kGroup = "RDMA";
  command
      .option("--hca", options.hca,
              "RDMA ports to use, in the syntax of NCCL_IB_HCA: [^][=]NAME[:PORT],… [all]")
      .type_name("LIST")
      .group(kGroup)
      .check([](const std::string& text) {
        const auto filter = transport::verbs::HcaFilter::parse(text);
        if (filter) return std::string();
        // CLI11 adds the name of the option.
        const std::string& message = filter.error().message();
        return message.starts_with("--hca ") ? message.substr(6) : message;
      });
  const auto number = [&](const char* name, int& value, int most, const char* help) {
    command.option(name, value, help).type_name("N").group(kGroup).between(0, most);
  };
  number("--gid-index", options.gid_index, 255,
         "GID of RoCE ports [RoCE v2, IPv4 before IPv6 before link-local]");
  number("--traffic-class", options.traffic_class, 255,
         "Traffic class of RDMA packets; on RoCE the DSCP times 4 [0]");
  number("--service-level", options.service_level, 15,
         "Service level of RDMA packets; on RoCE the priority [0]");
  command
      .option("--topology", options.topology_file,
              "JSON file that overrides NUMA nodes and preferred ports (docs/reference/config.md)")
      .type_name("FILE")
      .group(kGroup);
}

bool is_daemon(std::string_view command) {
  return std::ranges::find(kDaemons, command) != kDaemons.end();
}

bool is_setting(std::string_view option) {
  return option != "config" && option != "help" && option != "version";
}

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

int exit_code(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalid:
      return kExitUsage;
    case ErrorCode::kNotFound:
      return kExitNotFound;
    case ErrorCode::kCorrupt:
      return kExitCorrupt;
    case ErrorCode::kTimeout:
    case ErrorCode::kPeerLost:
    case ErrorCode::kStale:
    case ErrorCode::kUnavailable:
      return kExitUnavailable;
    case ErrorCode::kExhausted:
      return kExitExhausted;
    case ErrorCode::kDenied:
      return kExitDenied;
    case ErrorCode::kInternal:
      return kExitFailed;
  }
  return kExitFailed;
}

const char* exit_code_help() {
  return "Exit codes:\n"
         "  0  done\n"
         "  1  failed: a check of `doctor`, a file or device of this host, or a bug\n"
         "  2  wrong arguments or input: fix them, do not retry\n"
         "  3  not found: no such file, model or version, or no source holds it\n"
         "  4  corrupt: bytes do not match their digests\n"
         "  5  unreachable or timed out, or `update` left out workers or some failed: retry later\n"
         "  6  out of memory, space or quota\n"
         "  7  not allowed: rights or secrets\n"
         "  8  crash loop: the worker of `run` failed too often in a row\n"
         "  130, 143  interrupted (SIGINT, SIGTERM): a pull keeps its verified bytes\n";
}

}  // namespace rekindle::cli
