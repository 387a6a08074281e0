#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <string>

#include <CLI/CLI.hpp>
#include <google/protobuf/stubs/logging.h>

#include "src/base/failpoint.h"
#include "src/base/log.h"
#include "src/base/version.h"
#include "src/crypto/secret_memory.h"
#include "tools/cli/arguments.h"
#include "tools/cli/cli_session.h"
#include "tools/cli/command_line.h"
#include "tools/cli/command_texts.h"
#include "tools/cli/daemon_settings.h"
#include "tools/cli/output.h"

// The `rekindle` command: parses, reads the environment and the configuration file, runs one
// subcommand and turns its result into an exit code.
namespace rekindle::cli {
namespace {

constexpr const char* kAbout =
    "Gives every GPU of an LLM inference fleet its model weights within seconds of a crash or a\n"
    "scale-out. Hosts hold copies of checkpoints in memory; a host that needs weights pulls "
    "exactly\n"
    "its shard from its peers, verified byte for byte.\n";

std::string reference() {
  return std::string(exit_code_help()) +
         "\nEnvironment (the command line wins; then these; then --config):\n"
         "  REKINDLE_COORDINATOR  --coordinator\n"
         "  REKINDLE_STORE        --store\n"
         "  REKINDLE_SECRET_FILE  --secret-file\n"
         "  REKINDLE_TLS_CERT     --tls-cert\n"
         "  REKINDLE_TLS_KEY      --tls-key\n"
         "  REKINDLE_TLS_CA       --tls-ca\n"
         "  REKINDLE_TLS_CRL      --tls-crl\n"
         "  REKINDLE_LOG          --log-level\n"
         "  REKINDLE_LOG_FORMAT   --log-format\n"
         "  REKINDLE_CONFIG       --config\n"
         "  REKINDLE_ADMIT_PROTOCOL_2  --admit-protocol-2: true\n"
         "  REKINDLE_JSON         --json: true\n"
         "  REKINDLE_QUIET        --quiet: true\n"
         "  REKINDLE_AGENT_…, REKINDLE_COORDINATOR_…  the options of the daemons, such as\n"
         "                        REKINDLE_AGENT_MAX_RATE for --max-rate of the agent\n";
}

constexpr const char* kFirstSteps =
    "First steps:\n"
    "  rekindle coordinator --listen 127.0.0.1:7300 &\n"
    "  rekindle agent --listen 127.0.0.1:7400 --coordinator 127.0.0.1:7300 &\n"
    "  rekindle publish qwen3@41 /models/qwen3 --coordinator 127.0.0.1:7300\n"
    "  rekindle pull qwen3 --to /tmp/qwen3 --coordinator 127.0.0.1:7300\n";

// The list of commands shows the first sentence of each; `COMMAND --help` shows the rest.
class Formatter : public CLI::Formatter {
 public:
  std::string make_subcommand(const CLI::App* sub) const override {
    return fmt::format("  {:<12} {}\n", sub->get_name(), summary(sub->get_description()));
  }

  // The help of each command is complete: it adds the options of all commands, the exit codes and
  // the environment.
  std::string make_footer(const CLI::App* app) const override {
    const CLI::App* root = app;
    while (root->get_parent() != nullptr) root = root->get_parent();
    std::string text = app->get_footer();
    if (!text.empty()) text += "\n";
    if (root != app) {
      const auto shared = [](const CLI::Option* o) { return o->get_group() == kEveryCommand; };
      text += make_group(kEveryCommand, false, root->get_options(shared)).substr(1) + "\n";
    }
    return text + reference();
  }
};

Result<void> start_logging(const Session& session) {
  const Settings& settings = session.settings;
  const std::string usual = settings.log_level.empty() ? "error" : settings.log_level;
  TRY(const log::Level level,
      log::parse_level(session.daemon ? daemon_log_level(settings) : usual));
  // Protobuf's messages about hostile input belong into the log, not beside it.
  google::protobuf::SetLogHandler(
      [](google::protobuf::LogLevel, const char*, int, const std::string& text) {
        log::debug("protobuf", "message", text);
      });
  log::init(level, settings.log_format == "json" ? log::Format::kJson : log::Format::kText);
  return {};
}

Result<int> run(CLI::App& app, Session& session) {
  // No subcommand.
  if (!session.run) {
    std::fputs(app.help().c_str(), stderr);
    return kExitUsage;
  }
  if (session.daemon) {
    Problems problems;
    const auto read = std::make_shared<DaemonSettings>(
        read_daemon_settings(session.words, Environment::kApplies, problems));
    TRY_VOID(problems.none());
    session.settings = read->shared;
    session.daemon_settings = read;
  }
  TRY_VOID(start_logging(session));
  if (!session.settings.coordinator.empty()) {
    TRY_VOID(check_addresses("--coordinator", session.settings.coordinator));
  }
  TRY(const int code, session.run());
  TRY_VOID(flush_output());
  return code;
}

int report(const Session& session, const Error& error) {
  if (session.settings.json) {
    print_json(to_json(error));
    (void)flush_output();
  }
  std::string line = "rekindle ";
  // "rekindle pull m@1: …" also where the message already starts with the command.
  if (!error.message().starts_with(session.command + " ")) line += session.command + ": ";
  line += printable(error.message()) + "\n";
  std::fputs(line.c_str(), stderr);
  if (session.interrupted_by != 0) return kExitSignal + session.interrupted_by;
  return exit_code(error.code());
}

int parse_error(CLI::App& app, const CLI::ParseError& error) {
  // --help or --version.
  if (error.get_exit_code() == 0) return app.exit(error);
  std::string name = "rekindle";
  const CLI::App* last = &app;
  for (; !last->get_subcommands().empty(); last = last->get_subcommands().front()) {
    name += " " + last->get_subcommands().front()->get_name();
  }
  std::string text = error.what();
  // Names the word that stands where a command should be.
  if (!last->get_subcommands({}).empty() && !app.remaining(true).empty()) {
    text = fmt::format("no command or option '{}'", app.remaining(true).front());
  }
  text = printable(text);
  if (app.get_option("--json")->count() > 0) {
    print_json(to_json(Error(ErrorCode::kInvalid, text)));
    (void)flush_output();
  }
  std::fprintf(stderr, "%s: %s (see %s --help)\n", name.c_str(), text.c_str(), name.c_str());
  return kExitUsage;
}

int run_main(int argc, char** argv) {
  crypto::keep_openssl_secret();
  // A peer or pipe that goes away fails its call and does not end the process.
  std::signal(SIGPIPE, SIG_IGN);
  // For tests of this binary.
  if (const char* failpoints = std::getenv("REKINDLE_FAILPOINTS")) {
    if (const auto armed = arm_failpoints(failpoints); !armed) {
      std::fprintf(stderr, "rekindle: REKINDLE_FAILPOINTS: %s\n", armed.error().message().c_str());
      return kExitUsage;
    }
  }
  CLI::App app(kAbout, "rekindle");
  Session session;
  // Global options may come after the subcommand.
  app.fallthrough();
  app.require_subcommand(0, 1);
  app.set_version_flag("--version", std::string(software_version()));
  const auto formatter = std::make_shared<Formatter>();
  formatter->column_width(34);
  app.formatter(formatter);
  add_shared_options(app, session.settings);
  session.words.assign(argv + 1, argv + argc);
  Command root(app);
  for (const auto add :
       {add_demo,   add_coordinator, add_agent,      add_publish,   add_pull,
        add_update, add_run,         add_wait_ready, add_artifacts, add_status,
        add_top,    add_events,      add_trace,      add_explain,   add_inspect,
        add_verify, add_retire,      add_release,    add_switch,    add_drain,
        add_drill,  add_bench,       add_topo,       add_doctor,    add_support_bundle,
        add_config, add_completion,  add_man,        add_certs,     add_whoami,
        add_auth,   add_keys,        add_audit,      add_version,   add_device_process,
        add_keeper}) {
    add(root, session);
  }
  // After the subcommands, which would inherit it.
  app.footer(kFirstSteps);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return parse_error(app, error);
  }
  const Result<int> code = run(app, session);
  return code ? *code : report(session, code.error());
}

}  // namespace
}  // namespace rekindle::cli

int main(int argc, char** argv) {
  try {
    return rekindle::cli::run_main(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rekindle: internal error: %s\n", error.what());
    return rekindle::cli::kExitFailed;
  }
}
