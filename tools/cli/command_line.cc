#include "tools/cli/command_line.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include <CLI/CLI.hpp>

#include "tools/cli/cli_session.h"
#include "transport/verbs/host/hca_filter.h"

namespace rekindle::cli {
namespace {

constexpr std::array<std::string_view, 2> kDaemons = {"agent", "coordinator"};

// The settings that a daemon takes at SIGHUP.
constexpr std::string_view kReloaded[] = {"log-level",
                                          "secret-file",
                                          "agent.max-rate",
                                          "agent.max-pullers",
                                          "agent.scrub",
                                          "agent.resident-scrub",
                                          "agent.load-timeout",
                                          "coordinator.max-open-claims",
                                          "coordinator.max-pullers",
                                          "coordinator.replicas",
                                          "coordinator.recopy-rate"};

// CLI11 adds the name of the option.
std::string empty_file_problem(const std::string& file) {
  return file.empty() ? "it is empty; name the file, or leave the option out" : "";
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

CommandOption& CommandOption::not_empty() { return check(empty_file_problem); }

CommandOption& CommandOption::one_word() {
  option_->allow_extra_args(false);
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

namespace {

constexpr const char* kRdmaGroup = "RDMA";

std::string check_hca(const std::string& text) {
  const auto filter = transport::verbs::HcaFilter::parse(text);
  if (filter) return {};
  // CLI11 adds the name of the option.
  const std::string& message = filter.error().message();
  return message.starts_with("--hca ") ? message.substr(6) : message;
}

}  // namespace

void add_trusted_rails_option(Command& command, transport::verbs::FabricOptions& options) {
  command
      .option("--rail-trusted", options.trusted,
              "RDMA ports whose network is safe without encryption, such as an isolated fabric or\n"
              "one with MACsec, as --hca; where encryption is demanded, no others are used [none]")
      .type_name("LIST")
      .group(kRdmaGroup)
      .check(check_hca);
}

void add_fabric_options(Command& command, transport::verbs::FabricOptions& options) {
  constexpr const char* kGroup = kRdmaGroup;
  command
      .option("--hca", options.hca,
              "RDMA ports to use, in the syntax of NCCL_IB_HCA: [^][=]NAME[:PORT],… [all]")
      .type_name("LIST")
      .group(kGroup)
      .check(check_hca);
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

std::string variable_of(std::string_view section, std::string_view option) {
  if (section.empty() && option == "log-level") return "REKINDLE_LOG";
  std::string name = "REKINDLE_";
  if (!section.empty()) name += std::string(section) + "_";
  name += option;
  std::ranges::transform(name, name.begin(), [](char c) {
    if (c == '-') return '_';
    return 'a' <= c && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c;
  });
  return name;
}

bool applies_at_reload(std::string_view section, std::string_view option) {
  const std::string name =
      section.empty() ? std::string(option) : fmt::format("{}.{}", section, option);
  return std::ranges::find(kReloaded, name) != std::end(kReloaded);
}

void add_shared_options(CLI::App& app, Settings& settings) {
  const auto add = [&](const char* name, std::string& value, const char* text) {
    return app.add_option(name, value, text)->group(kEveryCommand);
  };
  add("--coordinator", settings.coordinator,
      "Address of the coordinator; with standbys, all their addresses, separated by commas")
      ->type_name("HOST:PORT");
  add("--store", settings.store, "Directory of the segment store [/dev/shm/rekindle]")
      ->type_name("DIR");
  rpc::CredentialOptions& credentials = settings.credentials;
  add("--secret-file", credentials.secret_file,
      "Cluster secret: a file of mode 0600 with 16 to 4096 bytes, the same on all hosts. Two\n"
      "lines are two secrets: callers use the first, and either is accepted")
      ->type_name("FILE")
      ->check(empty_file_problem);
  add("--tls-cert", credentials.certificate_file,
      "Certificate of this process in PEM, with its chain; --tls-key and --tls-ca go with it")
      ->type_name("FILE")
      ->check(empty_file_problem);
  add("--tls-key", credentials.key_file, "Unencrypted key of --tls-cert in PEM, of mode 0600")
      ->type_name("FILE")
      ->check(empty_file_problem);
  add("--tls-ca", credentials.authority_file, "Authorities in PEM whose certificates are believed")
      ->type_name("FILE")
      ->check(empty_file_problem);
  add("--tls-crl", credentials.revocation_file,
      "Lists of revoked certificates in PEM, one of each authority that issues to hosts [none]")
      ->type_name("FILE")
      ->check(empty_file_problem);
  app.add_flag("--admit-protocol-2", credentials.admit_protocol_2,
               "For the time of an upgrade: talk to releases that prove the secret without TLS")
      ->group(kEveryCommand);
  add("--log-level", settings.log_level,
      "trace, debug, info, warn, error or off [info for daemons, else error]")
      ->check(CLI::IsMember({"trace", "debug", "info", "warn", "error", "off"}))
      ->type_name("LEVEL");
  add("--log-format", settings.log_format, "text or json, on stderr [text]")
      ->check(CLI::IsMember({"text", "json"}))
      ->type_name("FORMAT");
  add("--config", settings.config,
      "TOML file with option names as keys; [agent] and [coordinator] sections (daemons only)")
      ->type_name("FILE");
  app.add_flag("--json", settings.json, "Report as JSON on stdout")->group(kEveryCommand);
  app.add_flag("-q,--quiet", settings.quiet, "No progress")->group(kEveryCommand);
  for (CLI::Option* option : app.get_options()) {
    if (option->get_group() != kEveryCommand) continue;
    option->envname(variable_of("", option->get_lnames().front()));
  }
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
