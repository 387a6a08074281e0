// The commands `artifacts publish`, `fetch`, `list` and `remove`: the compile caches of engines.
#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "proto/agent.pb.h"
#include "proto/coordinator.pb.h"
#include "recovery/agent/local_agent.h"
#include "recovery/worker/core/instance.h"
#include "src/base/clock.h"
#include "src/base/units.h"
#include "tools/cli/arguments.h"
#include "tools/cli/artifact_set.h"
#include "tools/cli/cli_session.h"
#include "tools/cli/command_line.h"
#include "tools/cli/output.h"
#include "tools/cli/progress_view.h"
#include "tools/cli/remote.h"

namespace rekindle::cli {
namespace {

struct ArtifactArgs {
  std::string model;
  std::string fingerprint;
  std::vector<std::string> caches;
  // Of publish.
  std::string when_ready;
  std::string quiet_for = "60s";
  std::string timeout = "1h";
  bool replace = false;
  // Of remove.
  std::string hash;
  bool others = false;
};

Result<std::string> set_name(const ArtifactArgs& args) {
  TRY(const std::string hash, fingerprint_hash(args.model, args.fingerprint));
  return artifact_set_name(args.model, hash);
}

bool is_worth_another_try(ErrorCode code) {
  return code == ErrorCode::kUnavailable || code == ErrorCode::kTimeout ||
         code == ErrorCode::kPeerLost || code == ErrorCode::kStale;
}

Result<std::unique_ptr<Remote>> own_agent(const Settings& settings) {
  return Remote::create(settings, "unix:" + agent::agent_socket(settings.store).string());
}

// A command that has no agent would own the store for a while, and an agent could not start. One
// that starts at the same time as this command gets a while.
Result<void> check_agent_runs(const Settings& settings) {
  constexpr std::chrono::milliseconds kWait{5000}, kPause{100};
  const TimePoint give_up = steady_now() + kWait;
  TRY(const auto agent, own_agent(settings));
  auto status = agent->call<proto::AGENT_STATUS>({});
  while (!status && status.error().code() != ErrorCode::kDenied && steady_now() < give_up) {
    std::this_thread::sleep_for(kPause);
    status = agent->call<proto::AGENT_STATUS>({});
  }
  if (status) return {};
  return fail(ErrorCode::kUnavailable,
              "artifacts need this host's agent, and none answers at {}: {}", settings.store,
              status.error().message());
}

// The coordinator of the settings, else that of this host's agent.
Result<std::unique_ptr<Remote>> fleet_coordinator(const Settings& settings) {
  if (!settings.coordinator.empty()) return Remote::create(settings, settings.coordinator);
  TRY(const auto agent, own_agent(settings));
  const auto status = agent->call<proto::AGENT_STATUS>({});
  if (!status || status->coordinator().empty()) {
    return fail(ErrorCode::kInvalid,
                "give the fleet's --coordinator HOST:PORT, because no agent with a coordinator "
                "runs here");
  }
  return Remote::create(settings, status->coordinator());
}

// What the coordinator knows of the sets with one name.
struct KnownSets {
  // Also of retired ones, which never come back. 0: none.
  std::uint64_t last_version = 0;
  // Neither retired nor about to be, ascending.
  std::vector<ModelVersion> live;
  // Those of them that live hosts have, or begin to have.
  std::vector<ModelVersion> held;
};

bool is_live(const proto::VersionStatus& version) {
  return version.state() == "staging" || version.state() == "ready";
}

bool is_held(const proto::ClusterStatusResponse& status, const proto::VersionStatus& version) {
  if (version.state() == "ready") return true;
  return std::ranges::any_of(status.nodes(), [&](const proto::NodeStatus& node) {
    const auto& holdings = node.holdings();
    return node.state() != "dead" && std::ranges::any_of(holdings, [&](const auto& holding) {
             return holding.id().model() == version.id().model() &&
                    holding.id().version() == version.id().version();
           });
  });
}

Result<KnownSets> find_sets(Remote& coordinator, const std::string& name) {
  TRY(const auto status, (coordinator.call<proto::COORDINATOR_STATUS>({})));
  KnownSets known;
  for (const auto& version : status.versions()) {
    if (version.id().model() != name) continue;
    known.last_version = std::max<std::uint64_t>(known.last_version, version.id().version());
    const ModelVersion id{name, version.id().version()};
    if (is_live(version)) known.live.push_back(id);
    if (is_live(version) && is_held(status, version)) known.held.push_back(id);
  }
  std::ranges::sort(known.live);
  std::ranges::sort(known.held);
  return known;
}

// A host that publishes claims its version before it has it. A set that nobody has after a while is
// lost with its hosts.
Result<KnownSets> find_held_sets(Remote& coordinator, const std::string& name) {
  constexpr std::chrono::milliseconds kClaimed{5000}, kPause{100};
  const TimePoint give_up = steady_now() + kClaimed;
  for (;;) {
    TRY(KnownSets known, find_sets(coordinator, name));
    if (known.live.empty() || !known.held.empty() || steady_now() >= give_up) return known;
    std::this_thread::sleep_for(kPause);
  }
}

Result<void> retire_set(Remote& coordinator, const ModelVersion& id) {
  proto::RetireRequest request;
  request.mutable_id()->set_model(id.model);
  request.mutable_id()->set_version(id.version);
  TRY_VOID((coordinator.call<proto::COORDINATOR_RETIRE>(request)));
  return {};
}

int tell_present(const Settings& settings, const ModelVersion& id, const std::string& why) {
  print_result(settings.json,
               {{"published", false}, {"model", id.model}, {"version", id.version}, {"why", why}},
               fmt::format("nothing published as {}: {}\n", id.to_string(), why));
  return kExitOk;
}

// An agent that does not answer has no instance that is ready.
bool is_instance_ready(Remote& agent, const std::string& name) {
  const auto status = agent.call<proto::AGENT_STATUS>({});
  return status && std::ranges::any_of(status->instances(), [&](const auto& instance) {
           return instance.name() == name &&
                  instance.state() == to_string(worker::InstanceState::kCommitted);
         });
}

// Waits until the instance is ready and its caches have not changed for a while.
class QuietCaches {
 public:
  static Result<QuietCaches> create(const Settings& settings, const ArtifactArgs& args) {
    TRY_VOID(worker::check_instance_name(args.when_ready));
    QuietCaches caches;
    caches.instance_ = args.when_ready;
    TRY(caches.quiet_for_, parse_duration("--quiet-for", args.quiet_for));
    TRY(const auto timeout, parse_duration("--timeout", args.timeout));
    caches.give_up_ = steady_now() + timeout;
    caches.timeout_ = args.timeout;
    TRY(caches.agent_, own_agent(settings));
    return caches;
  }

  Result<void> wait(const std::vector<CacheDirectory>& directories) {
    constexpr std::chrono::milliseconds kShortest{20}, kLongest{2000};
    const auto interval = std::clamp(quiet_for_ / 5, kShortest, kLongest);
    std::optional<std::vector<CacheFile>> last;
    TimePoint since;
    while (true) {
      const bool ready = is_instance_ready(*agent_, instance_);
      std::vector<CacheFile> files;
      // Beside an engine that starts, nothing walks its caches.
      if (ready) {
        TRY(files, list_caches(directories));
      }
      if (files.empty() || files != last) {
        since = steady_now();
        last = std::move(files);
      } else if (steady_now() - since >= quiet_for_) {
        return {};
      }
      if (steady_now() + interval > give_up_) {
        return fail(ErrorCode::kTimeout, "{} after {}: nothing was published",
                    ready ? "the caches have not been quiet" : instance_ + " is not ready",
                    timeout_);
      }
      std::this_thread::sleep_for(interval);
    }
  }

 private:
  QuietCaches() = default;
  std::unique_ptr<Remote> agent_;
  std::string instance_;
  std::chrono::milliseconds quiet_for_{};
  TimePoint give_up_;
  // As the user wrote it.
  std::string timeout_;
};

Result<pull::TransferSummary> publish_packed(const Settings& settings, const ModelVersion& id,
                                             const std::filesystem::path& file) {
  agent::PublishRequest request;
  request.id = id;
  request.paths = {std::filesystem::canonical(file)};
  TRY(const auto host, agent::open_local_agent(local_agent_options(settings)));
  ProgressView view("publish", ProgressView::style_for_stderr(settings.quiet));
  return host->publish(request, [&](const pull::Progress& p) { view.update(p); });
}

// The set with these files, packed in the first of the caches.
struct PackedSet {
  std::unique_ptr<CacheWorkplace> workplace;
  std::vector<CacheFile> files;
  std::filesystem::path file() const { return workplace->path() / "artifacts.safetensors"; }
};

Result<PackedSet> pack(const std::vector<CacheDirectory>& caches, const ArtifactArgs& args) {
  TRY(std::vector<CacheFile> files, list_caches(caches));
  if (files.empty()) {
    return fail(ErrorCode::kNotFound, "the caches have no files; has the engine run with them?");
  }
  const auto begin = std::ranges::find_if(caches, [](const CacheDirectory& cache) {
    std::error_code ignored;
    return std::filesystem::exists(cache.path, ignored);
  });
  TRY(auto workplace, CacheWorkplace::open(begin->path));
  PackedSet packed{std::move(workplace), std::move(files)};
  TRY_VOID(pack_caches(packed.files, args.fingerprint, packed.file()));
  TRY(const std::vector<CacheFile> again, list_caches(caches));
  if (again != packed.files) {
    return fail(ErrorCode::kUnavailable, "the caches have changed while they were packed");
  }
  return packed;
}

Result<int> publish_now(const Settings& settings, const ArtifactArgs& args, const std::string& name,
                        const std::vector<CacheDirectory>& caches) {
  TRY_VOID(check_agent_runs(settings));
  TRY(const auto coordinator, fleet_coordinator(settings));
  const auto present = [&](const KnownSets& known) { return !args.replace && !known.held.empty(); };
  TRY(KnownSets known, find_held_sets(*coordinator, name));
  if (present(known)) return tell_present(settings, known.held.back(), "the fleet has it already");
  TRY(const PackedSet packed, pack(caches, args));
  TRY(known, find_held_sets(*coordinator, name));
  if (present(known)) return tell_present(settings, known.held.back(), "the fleet has it already");
  const ModelVersion id{name, known.last_version + 1};
  auto published = publish_packed(settings, id, packed.file());
  if (!published) {
    const auto now = find_sets(*coordinator, name);
    if (now && std::ranges::find(now->live, id) != now->live.end()) {
      return tell_present(settings, id, "another host was first");
    }
    return fail(std::move(published).error());
  }
  for (const ModelVersion& old : known.live) TRY_VOID(retire_set(*coordinator, old));
  print_result(settings.json,
               {{"published", true},
                {"model", id.model},
                {"version", id.version},
                {"root", published->root.hex()},
                {"files", packed.files.size()},
                {"bytes", published->bytes}},
               fmt::format("published {}: {} files, {}\n", id.to_string(), packed.files.size(),
                           format_bytes(published->bytes)));
  return kExitOk;
}

Result<int> publish_when_ready(const Settings& settings, const ArtifactArgs& args,
                               const std::string& name, const std::vector<CacheDirectory>& caches) {
  TRY(QuietCaches quiet, QuietCaches::create(settings, args));
  while (true) {
    TRY_VOID(quiet.wait(caches));
    auto published = publish_now(settings, args, name, caches);
    if (published || !is_worth_another_try(published.error().code())) return published;
  }
}

Result<int> publish_artifacts(const Settings& settings, const ArtifactArgs& args) {
  TRY(const std::string name, set_name(args));
  TRY(const auto caches, parse_cache_directories(args.caches));
  if (args.when_ready.empty()) return publish_now(settings, args, name, caches);
  return publish_when_ready(settings, args, name, caches);
}

// The store takes one pull of a copy at a time, and all ranks of a host may fetch at once.
Result<pull::TransferSummary> pull_set(Session& session, const std::string& name) {
  const Settings& settings = session.settings;
  TRY(const UniqueFd turn, lock_directory(settings.store));
  agent::PullRequest request;
  request.ref.model = name;
  TRY(const auto host, agent::open_local_agent(local_agent_options(settings)));
  ProgressView view("fetch", ProgressView::style_for_stderr(settings.quiet));
  auto pulled = host->pull(request, [&](const pull::Progress& p) { view.update(p); });
  session.interrupted_by = host->interrupted_by();
  return pulled;
}

Result<int> fetch_artifacts(Session& session, const ArtifactArgs& args) {
  const Settings& settings = session.settings;
  TRY(const std::string name, set_name(args));
  TRY(const auto caches, parse_cache_directories(args.caches));
  TRY_VOID(check_agent_runs(settings));
  const auto pulled = pull_set(session, name);
  if (!pulled && pulled.error().code() == ErrorCode::kNotFound) {
    return fail(ErrorCode::kNotFound, "no live host has artifacts of {} with this fingerprint ({})",
                args.model, name);
  }
  TRY(const pull::TransferSummary summary, pulled);
  TRY(const UnpackReport report,
      unpack_artifacts(summary.path, summary.root, args.fingerprint, caches));
  print_result(settings.json,
               {{"model", summary.id.model},
                {"version", summary.id.version},
                {"root", summary.root.hex()},
                {"files", report.files},
                {"bytes", report.bytes},
                {"written", report.written},
                {"kept", report.kept},
                {"unwanted", report.unwanted}},
               fmt::format("fetched {}: {} files, {}; {} written, {} kept that differ{}\n",
                           summary.id.to_string(), report.files, format_bytes(report.bytes),
                           report.written, report.kept,
                           report.unwanted == 0
                               ? ""
                               : fmt::format(", {} of other caches left out", report.unwanted)));
  return kExitOk;
}

// artifacts/MODEL/HASH.
struct SetName {
  std::string model;
  std::string hash;
};
std::optional<SetName> parse_set_name(std::string_view name) {
  if (!name.starts_with(kArtifactsPrefix)) return std::nullopt;
  name.remove_prefix(kArtifactsPrefix.size());
  const auto slash = name.rfind('/');
  if (slash == std::string_view::npos) return std::nullopt;
  return SetName{std::string(name.substr(0, slash)), std::string(name.substr(slash + 1))};
}

Result<int> list_artifacts(const Settings& settings, const ArtifactArgs& args) {
  TRY(const auto coordinator, fleet_coordinator(settings));
  TRY(const auto status, (coordinator->call<proto::COORDINATOR_STATUS>({})));
  Json sets = Json::array();
  std::vector<std::vector<std::string>> rows;
  for (const auto& version : status.versions()) {
    const auto set = parse_set_name(version.id().model());
    if (!set || !is_live(version) || (!args.model.empty() && set->model != args.model)) continue;
    sets.push_back({{"model", set->model},
                    {"hash", set->hash},
                    {"version", version.id().version()},
                    {"state", version.state()},
                    {"bytes", version.checkpoint_bytes()},
                    {"copies", version.whole_copies()}});
    rows.push_back({printable(set->model), printable(set->hash),
                    std::to_string(version.id().version()), version.state(),
                    format_bytes(version.checkpoint_bytes()),
                    std::to_string(version.whole_copies())});
  }
  if (settings.json) {
    print_json({{"artifacts", sets}});
  } else {
    print(table(
        {{"MODEL"}, {"HASH"}, {"VERSION", true}, {"STATE"}, {"BYTES", true}, {"COPIES", true}},
        rows));
  }
  return kExitOk;
}

Result<int> remove_artifacts(const Settings& settings, const ArtifactArgs& args) {
  if (args.fingerprint.empty() == args.hash.empty()) {
    return fail(ErrorCode::kInvalid, "give one of --fingerprint and --hash");
  }
  std::string hash = args.hash;
  if (hash.empty()) {
    TRY(hash, fingerprint_hash(args.model, args.fingerprint));
  }
  TRY(const std::string name, artifact_set_name(args.model, hash));
  TRY(const auto coordinator, fleet_coordinator(settings));
  TRY(const auto status, (coordinator->call<proto::COORDINATOR_STATUS>({})));
  const bool is_there = std::ranges::any_of(status.versions(), [&](const auto& version) {
    return version.id().model() == name && is_live(version);
  });
  if (args.others && !is_there) {
    return fail(ErrorCode::kNotFound,
                "the fleet has no {}, and --others would remove all sets of {}; see `rekindle "
                "artifacts list`",
                name, args.model);
  }
  Json removed = Json::array();
  std::string text;
  for (const auto& version : status.versions()) {
    const auto set = parse_set_name(version.id().model());
    if (!set || set->model != args.model || !is_live(version)) continue;
    if ((version.id().model() == name) == args.others) continue;
    const ModelVersion id{version.id().model(), version.id().version()};
    TRY_VOID(retire_set(*coordinator, id));
    removed.push_back({{"model", id.model}, {"version", id.version}});
    text += fmt::format("removed {}\n", id.to_string());
  }
  if (removed.empty() && !args.others) {
    return fail(ErrorCode::kNotFound, "the fleet has no {}; see `rekindle artifacts list`", name);
  }
  print_result(settings.json, {{"removed", removed}}, text.empty() ? "nothing to remove\n" : text);
  return kExitOk;
}

void add_set_options(Command& sub, ArtifactArgs& args) {
  sub.option("MODEL", args.model, "The model that the engine serves, without a version").required();
  sub.option("--fingerprint", args.fingerprint,
             "Text that names the engine, its versions and the GPU; only equal texts match.\n"
             "`python -m rekindle.artifacts` prints one")
      .required()
      .type_name("TEXT");
  sub.option("NAME=DIR", args.caches, "A cache: its name in the set, and its directory here")
      .required();
}

void add_publish_artifacts(Command& artifacts, Session& session) {
  Command sub = artifacts.command(
      "publish",
      "Publish the files of compile caches, unless the fleet has a set with this fingerprint.\n"
      "Of two hosts that publish at once one wins, and the other says so; both end with 0.");
  auto args = std::make_shared<ArtifactArgs>();
  add_set_options(sub, *args);
  sub.option("--when-ready", args->when_ready,
             "First wait until this instance is ready and its caches have not changed for a while")
      .type_name("INSTANCE");
  sub.option("--quiet-for", args->quiet_for, "With --when-ready: how long without a change [60s]")
      .type_name("TIME");
  sub.option("--timeout", args->timeout, "With --when-ready: how long to wait for all of it [1h]")
      .type_name("TIME");
  sub.flag("--replace", args->replace,
           "Publish also if the fleet has such a set, and retire that one");
  sub.runs(session, "artifacts publish",
           [&session, args] { return publish_artifacts(session.settings, *args); });
}

void add_fetch_artifacts(Command& artifacts, Session& session) {
  Command sub = artifacts.command(
      "fetch",
      "Add the files of the set with this fingerprint to the caches. Every byte is verified. "
      "Files\n"
      "that are there stay as they are. Exit code 3: the fleet has no such set.");
  auto args = std::make_shared<ArtifactArgs>();
  add_set_options(sub, *args);
  sub.runs(session, "artifacts fetch",
           [&session, args] { return fetch_artifacts(session, *args); });
}

void add_list_artifacts(Command& artifacts, Session& session) {
  Command sub = artifacts.command("list", "List the artifact sets of the fleet.");
  auto args = std::make_shared<ArtifactArgs>();
  sub.option("MODEL", args->model, "Only those of this model");
  sub.runs(session, "artifacts list",
           [&session, args] { return list_artifacts(session.settings, *args); });
}

void add_remove_artifacts(Command& artifacts, Session& session) {
  Command sub = artifacts.command(
      "remove", "Retire an artifact set on all hosts. Files in the caches of engines stay.");
  auto args = std::make_shared<ArtifactArgs>();
  sub.option("MODEL", args->model, "The model of the set").required();
  sub.option("--fingerprint", args->fingerprint, "The fingerprint of the set").type_name("TEXT");
  sub.option("--hash", args->hash, "Its hash, as `artifacts list` prints it").type_name("HEX");
  sub.flag("--others", args->others, "Retire all sets of the model but this one");
  sub.runs(session, "artifacts remove",
           [&session, args] { return remove_artifacts(session.settings, *args); });
}

}  // namespace

void add_artifacts(Command& app, Session& session) {
  Command artifacts = app.command("artifacts",
                                  "Share the compile caches of engines among hosts: of "
                                  "torch.compile, Triton, vLLM and others.\n"
                                  "A set belongs to a model and a fingerprint of the engine. "
                                  "Engines run what a cache contains,\n"
                                  "so trust whoever may publish in the fleet.");
  artifacts.require_command();
  add_publish_artifacts(artifacts, session);
  add_fetch_artifacts(artifacts, session);
  add_list_artifacts(artifacts, session);
  add_remove_artifacts(artifacts, session);
  artifacts.footer(
      "Examples:\n"
      "  rekindle artifacts publish qwen3 --fingerprint \"$F\" triton=/var/cache/triton\n"
      "  rekindle artifacts fetch qwen3 --fingerprint \"$F\" triton=/var/cache/triton\n"
      "  rekindle artifacts remove qwen3 --fingerprint \"$F\" --others\n");
}

}  // namespace rekindle::cli
