// The commands `run` and `wait-ready`: the first supervises a worker, the second waits for an
// instance of workers.
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include <unistd.h>

#include <pwd.h>

#include "proto/agent.pb.h"
#include "recovery/agent/local_agent.h"
#include "recovery/worker/core/instance.h"
#include "src/ipc/standby.h"
#include "tools/cli/arguments.h"
#include "tools/cli/artifact_set.h"
#include "tools/cli/cli_session.h"
#include "tools/cli/command_line.h"
#include "tools/cli/output.h"
#include "tools/cli/rank_watch.h"
#include "tools/cli/remote.h"
#include "tools/cli/supervisor.h"

namespace rekindle::cli {
namespace {

struct RunArgs {
  std::string model, shard, instance, rank;
  std::uint64_t generation = 0;
  std::string backoff = "100ms";
  std::string max_backoff = "30s";
  std::string healthy_after = "60s";
  std::string kill_after = "60s";
  std::string rank_grace = "500ms";
  int crash_loop = 5;
  std::vector<std::string> artifacts;
  std::string artifacts_fingerprint;
  std::string artifacts_timeout = "2min";
  std::string artifacts_quiet = "60s";
  int standbys = 0;
  bool always = false;
  std::vector<std::string> command;
};

// Each of them costs the memory of a started process.
constexpr int kMostStandbys = 16;

struct RankOf {
  std::uint32_t rank = 0;
  std::uint32_t world = 1;
};

Result<RankOf> parse_rank(const std::string& text) {
  RankOf parsed;
  if (text.empty()) return parsed;
  const char* const end = text.data() + text.size();
  const auto first = std::from_chars(text.data(), end, parsed.rank);
  const bool slash = first.ec == std::errc() && first.ptr != end && *first.ptr == '/';
  const auto second = slash ? std::from_chars(first.ptr + 1, end, parsed.world) : first;
  if (!slash || second.ec != std::errc() || second.ptr != end || parsed.rank >= parsed.world) {
    return fail(ErrorCode::kInvalid, "--rank '{}': write R/N with R below N, for example 0/8",
                text);
  }
  return parsed;
}

// The caches that `--artifacts default` means. An engine keeps each in `below` of the directory
// that the variable names.
struct EngineCache {
  const char* name;
  const char* variable;
  const char* below;
};
constexpr EngineCache kEngineCaches[] = {
    {"inductor", "TORCHINDUCTOR_CACHE_DIR", ""},
    {"triton", "TRITON_CACHE_DIR", ""},
    {"vllm", "VLLM_CACHE_ROOT", ""},
    {"flashinfer", "FLASHINFER_WORKSPACE_BASE", ".cache/flashinfer"},
    {"deep_gemm", "DG_JIT_CACHE_DIR", ""},
    {"sglang_deep_gemm", "SGLANG_DG_CACHE_DIR", ""},
};

// In the home of this user, which no other user can prepare.
Result<std::filesystem::path> default_cache_directory() {
  const auto given = [](const char* name) {
    const char* value = std::getenv(name);
    return std::filesystem::path(value != nullptr ? value : "");
  };
  if (const auto cache = given("XDG_CACHE_HOME"); cache.is_absolute()) return cache;
  if (const auto home = given("HOME"); home.is_absolute()) return home / ".cache";
  const passwd* const user = ::getpwuid(::geteuid());
  const std::filesystem::path home = user != nullptr ? user->pw_dir : "";
  if (home.is_absolute()) return home / ".cache";
  return fail(ErrorCode::kInvalid,
              "--artifacts default: this user has no home directory; set XDG_CACHE_HOME, or name "
              "the directories: --artifacts NAME=DIR");
}

// NAME=DIR for each cache. Those that the environment does not name get a directory for this
// fingerprint only, and the worker gets its variable.
Result<std::vector<std::string>> default_caches(const std::string& hash,
                                                SupervisorOptions& options) {
  TRY(const auto home, default_cache_directory());
  std::vector<std::string> caches;
  for (const EngineCache& cache : kEngineCaches) {
    const char* const given = std::getenv(cache.variable);
    std::filesystem::path base = given != nullptr ? given : "";
    if (base.empty()) {
      base = home / "rekindle/artifacts" / hash / cache.name;
      options.environment.emplace_back(cache.variable, base.string());
    }
    caches.push_back(fmt::format("{}={}", cache.name, (base / cache.below).string()));
  }
  return caches;
}

// The worker's first rank publishes; all ranks fetch.
Result<void> add_artifacts_to(SupervisorOptions& options, const Settings& settings,
                              const RunArgs& args, const std::string& model, bool first_rank) {
  if (args.artifacts.empty()) return {};
  TRY(const std::string hash, fingerprint_hash(model, args.artifacts_fingerprint));
  TRY_VOID(artifact_set_name(model, hash));
  TRY(options.prepare_timeout, parse_duration("--artifacts-timeout", args.artifacts_timeout));
  TRY_VOID(parse_duration("--artifacts-quiet", args.artifacts_quiet));
  std::vector<std::string> caches;
  for (const std::string& text : args.artifacts) {
    if (text != "default") {
      caches.push_back(text);
      continue;
    }
    TRY(const auto usual, default_caches(hash, options));
    caches.insert(caches.end(), usual.begin(), usual.end());
  }
  TRY_VOID(parse_cache_directories(caches));
  std::error_code error;
  const auto program = std::filesystem::read_symlink("/proc/self/exe", error);
  if (error) return fail_errno(error.value(), "/proc/self/exe");
  const auto helper = [&](const std::string& action) {
    std::vector<std::string> words = {program.string(), "artifacts", action, model};
    words.insert(words.end(), caches.begin(), caches.end());
    words.insert(words.end(), {"--fingerprint=" + args.artifacts_fingerprint, "--store",
                               settings.store, "--quiet"});
    if (!settings.coordinator.empty()) {
      words.insert(words.end(), {"--coordinator", settings.coordinator});
    }
    add_credential_words(settings, words);
    return words;
  };
  options.prepare = helper("fetch");
  if (args.instance.empty() || !first_rank) return {};
  options.companion = helper("publish");
  options.companion.insert(options.companion.end(), {"--when-ready", args.instance, "--quiet-for",
                                                     args.artifacts_quiet, "--timeout", "24h"});
  return {};
}

Result<SupervisorOptions> to_options(const Settings& settings, const RunArgs& args) {
  SupervisorOptions options;
  TRY(const auto model, ModelRef::parse(args.model));
  TRY(const auto rank, parse_rank(args.rank));
  if (!args.instance.empty()) TRY_VOID(worker::check_instance_name(args.instance));
  if (rank.world > 1 && args.instance.empty()) {
    return fail(ErrorCode::kInvalid, "--rank {} needs the name of its --instance", args.rank);
  }
  TRY(options.restart.first_delay, parse_duration("--backoff", args.backoff));
  TRY(options.restart.longest_delay, parse_duration("--max-backoff", args.max_backoff));
  TRY(options.restart.healthy_after, parse_duration("--healthy-after", args.healthy_after));
  TRY(options.kill_after, parse_duration("--kill-after", args.kill_after));
  TRY(options.rank_grace, parse_duration("--rank-grace", args.rank_grace));
  if (args.crash_loop < 0) {
    return fail(ErrorCode::kInvalid, "--crash-loop: 0 (never) or a number of failures");
  }
  options.restart.crash_loop = args.crash_loop;
  if (args.standbys < 0 || args.standbys > kMostStandbys) {
    return fail(ErrorCode::kInvalid, "--standby {}: write a number from 0 to {}", args.standbys,
                kMostStandbys);
  }
  options.standbys = static_cast<std::size_t>(args.standbys);
  options.always = args.always;
  options.trace = outer_trace();
  options.quiet = settings.quiet;
  options.command = args.command;
  std::error_code error;
  const auto store = std::filesystem::absolute(settings.store, error);
  const std::string store_path = error ? settings.store : store.string();
  options.agent_socket = (agent::agent_socket(store_path).parent_path() / "worker.sock").string();
  options.environment = {
      {"REKINDLE_STORE", store_path},
      {"REKINDLE_MODEL", model.to_string()},
      {"REKINDLE_SHARD", args.shard},
      {"REKINDLE_INSTANCE", args.instance},
      {"REKINDLE_RANK", fmt::format("{}", rank.rank)},
      {"REKINDLE_WORLD", fmt::format("{}", rank.world)},
      {"REKINDLE_GENERATION", fmt::format("{}", args.generation)},
  };
  TRY_VOID(add_artifacts_to(options, settings, args, model.model, rank.rank == 0));
  return options;
}

// A standby of another supervisor starts no worker before its turn.
Result<void> wait_as_standby() {
  const char* const name = std::getenv(ipc::kStandbyVariable);
  if (name == nullptr || *name == '\0') return {};
  TRY(const auto variables, ipc::wait_for_turn(name, TimePoint::max()));
  for (const auto& [variable, value] : variables) {
    (void)::setenv(variable.c_str(), value.c_str(), 1);
  }
  return {};
}

Result<int> run_command(const Settings& settings, const RunArgs& args) {
  TRY_VOID(wait_as_standby());
  TRY(auto options, to_options(settings, args));
  TRY(const auto place, parse_rank(args.rank));
  // The engine of a job ends with it, and not always in order. Only a server must keep its ranks.
  std::unique_ptr<RankWatch> watch;
  if (args.always) {
    auto ranks = RankWatch::create(settings, {args.instance, place.rank, place.world});
    if (ranks) {
      watch = std::move(*ranks);
    } else if (!settings.quiet) {
      std::fprintf(stderr, "rekindle run: the deaths of ranks are not noticed: %s\n",
                   printable(ranks.error().message()).c_str());
    }
  }
  Supervisor supervisor(std::move(options), std::move(watch));
  return supervisor.run();
}

struct WaitArgs {
  std::string instance;
  std::string version;
  std::string timeout = "5min";
};

constexpr std::chrono::milliseconds kReadyCheckInterval{50};

// nullopt: the agent has no such instance.
Result<std::optional<proto::WorkerInstance>> ask(Remote& agent, const std::string& name) {
  TRY(const auto status, (agent.call<proto::AGENT_STATUS>({})));
  for (const auto& instance : status.instances()) {
    if (instance.name() == name) return std::optional(instance);
  }
  return std::optional<proto::WorkerInstance>();
}

bool is_ready(const proto::WorkerInstance& instance, const std::optional<ModelVersion>& wanted) {
  if (instance.state() != to_string(worker::InstanceState::kCommitted)) return false;
  return !wanted ||
         (instance.id().model() == wanted->model && instance.id().version() == wanted->version);
}

std::string describe(const std::optional<proto::WorkerInstance>& instance) {
  if (!instance) return "no rank has attached";
  if (!instance->why().empty()) return instance->why();
  return fmt::format("it serves {}@{}", instance->id().model(), instance->id().version());
}

Result<int> wait_ready(const Settings& settings, const WaitArgs& args) {
  TRY_VOID(worker::check_instance_name(args.instance));
  TRY(const auto timeout, parse_duration("--timeout", args.timeout));
  std::optional<ModelVersion> wanted;
  if (!args.version.empty()) {
    TRY(wanted, parse_model_version(args.version));
  }
  TRY(const auto agent,
      Remote::create(settings, "unix:" + agent::agent_socket(settings.store).string()));
  const auto give_up = std::chrono::steady_clock::now() + timeout;
  while (true) {
    const auto instance = ask(*agent, args.instance);
    if (instance && *instance && is_ready(**instance, wanted)) {
      const auto& id = (*instance)->id();
      if (settings.json) {
        print_json({{"instance", args.instance},
                    {"ready", true},
                    {"model", id.model()},
                    {"version", id.version()},
                    {"generation", (*instance)->generation()},
                    {"world", (*instance)->world()}});
      } else if (!settings.quiet) {
        print_line(printable(fmt::format("{} is ready: {}@{}, {} rank{}", args.instance, id.model(),
                                         id.version(), (*instance)->world(),
                                         (*instance)->world() == 1 ? "" : "s")));
      }
      return kExitOk;
    }
    if (!instance && instance.error().code() == ErrorCode::kDenied) return fail(instance.error());
    if (std::chrono::steady_clock::now() + kReadyCheckInterval > give_up) {
      return fail(ErrorCode::kTimeout, "{} is not ready after {}: {}", args.instance, args.timeout,
                  instance ? describe(*instance) : instance.error().message());
    }
    std::this_thread::sleep_for(kReadyCheckInterval);
  }
}

}  // namespace

void add_run(Command& app, Session& session) {
  Command sub = app.command(
      "run",
      "Run a worker and start it again when it fails: `rekindle run --model qwen3 -- CMD ARGS`.\n"
      "The worker reads its place from REKINDLE_STORE, _MODEL, _SHARD, _INSTANCE, _RANK, _WORLD "
      "and\n"
      "_GENERATION; REKINDLE_FAILURES counts its failures in a row, and TRACEPARENT names a\n"
      "trace for each start. Signals are passed on; the worker does not outlive this command. "
      "Exit\n"
      "code 0 of the worker ends the command, unless --always is given; 8 means a crash loop. A "
      "worker\n"
      "that fails while the agent is down starts again when the agent is back. Standbys "
      "(--standby)\n"
      "start up ahead and wait where they would connect to the agent; one of them takes over when "
      "the\n"
      "worker fails.");
  auto args = std::make_shared<RunArgs>();
  sub.option("--model", args->model, "Model that the worker serves")
      .required()
      .type_name("MODEL[@VERSION]");
  sub.option("--shard", args->shard, "Shard of the model that the worker holds: tp=3/8")
      .type_name("SHARD");
  sub.option("--instance", args->instance, "Name of the instance that the worker belongs to")
      .type_name("NAME");
  sub.option("--rank", args->rank,
             "Rank of the worker in the instance, and the number of ranks [0/1]")
      .type_name("R/N");
  sub.option("--generation", args->generation,
             "Generation of the instance: the same for all ranks of one start [0]")
      .type_name("N");
  sub.option("--backoff", args->backoff,
             "Pause after the second failure in a row, doubling [100ms]")
      .type_name("TIME");
  sub.option("--max-backoff", args->max_backoff, "Longest pause [30s]").type_name("TIME");
  sub.option("--healthy-after", args->healthy_after,
             "A run this long forgets earlier failures [60s]")
      .type_name("TIME");
  sub.option("--crash-loop", args->crash_loop, "Failures in a row that end it; 0 = none [5]")
      .type_name("N");
  sub.option("--standby", args->standbys,
             "Processes that start up ahead, without weights, and wait to take over [0]")
      .type_name("N");
  sub.flag("--always", args->always,
           "The worker is a server: start it again also after exit code 0, and after the death of\n"
           "a rank that it has started, such as the engine of vLLM [off]");
  sub.option("--kill-after", args->kill_after, "Time for the worker to stop after a signal [60s]")
      .type_name("TIME");
  sub.option("--rank-grace", args->rank_grace,
             "With --always: time for the worker to end after the death of a rank, before it is "
             "killed\n"
             "with all processes below it, and for its ranks to end after it; 0 = never [500ms]")
      .type_name("TIME");
  CommandOption fingerprint =
      sub.option("--artifacts-fingerprint", args->artifacts_fingerprint,
                 "Text that names the engine, its versions and the GPU (`rekindle artifacts "
                 "--help`)")
          .type_name("TEXT");
  CommandOption artifacts =
      sub.option("--artifacts", args->artifacts,
                 "A compile cache to fetch before the first start, NAME=DIR, or `default`: those "
                 "of\nusual engines. With --instance, rank 0 publishes them once it is ready")
          .one_word()
          .needs(fingerprint)
          .type_name("NAME=DIR");
  fingerprint.needs(artifacts);
  sub.option("--artifacts-timeout", args->artifacts_timeout,
             "Starts without artifacts that take longer [2min]")
      .type_name("TIME")
      .needs(artifacts);
  sub.option("--artifacts-quiet", args->artifacts_quiet,
             "Publishes caches that have not changed for so long [60s]")
      .type_name("TIME")
      .needs(artifacts);
  sub.option("command", args->command, "The worker, after --").required().type_name("CMD");
  sub.runs(session, "run", [&session, args] { return run_command(session.settings, *args); });
}

void add_wait_ready(Command& app, Session& session) {
  Command sub = app.command(
      "wait-ready",
      "Wait until all ranks of an instance on this host have loaded the same version.\n"
      "Routers can also watch DIR/agent/ready/INSTANCE, or ask the agent's --health endpoint.");
  auto args = std::make_shared<WaitArgs>();
  sub.option("instance", args->instance, "Name of the instance").required().type_name("INSTANCE");
  sub.option("--version", args->version, "Wait for this version instead of any")
      .type_name("MODEL@VERSION");
  sub.option("--timeout", args->timeout, "How long to wait [5min]").type_name("TIME");
  sub.runs(session, "wait-ready", [&session, args] { return wait_ready(session.settings, *args); });
}

}  // namespace rekindle::cli
