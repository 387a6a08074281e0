#include <algorithm>
#include <cerrno>
#include <chrono>
#include <concepts>
#include <csignal>
#include <cstdlib>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "proto/agent.pb.h"
#include "proto/coordinator.pb.h"
#include "proto/drill.pb.h"
#include "recovery/agent/agent_core.h"
#include "recovery/worker/core/instance.h"
#include "src/base/clock.h"
#include "tools/cli/arguments.h"
#include "tools/cli/cli_session.h"
#include "tools/cli/command_line.h"
#include "tools/cli/first_token.h"
#include "tools/cli/output.h"
#include "tools/cli/recovery_timeline.h"
#include "tools/cli/remote.h"
#include "tools/cli/scratch_directory.h"
#include "tools/cli/status_view.h"

// `rekindle drill`: lets one process of a live fleet fail, and reports how the fleet recovers.
namespace rekindle::cli {
namespace {

constexpr std::chrono::milliseconds kLook{100};
constexpr std::uint32_t kEventWaitMs = 500;
// For the first bytes of a pull.
constexpr std::chrono::seconds kSourceDeadline{30};
// Of a freeze and of a cut.
constexpr std::chrono::seconds kLongest{60};
// For the coordinator to hear of the copy of a pull that has ended.
constexpr std::chrono::seconds kAnnounceTime{3};

struct DrillArgs {
  std::string target;
  bool dry_run = false;
  bool yes = false;
  std::string timeout = "60s";
  // Of `freeze` and `cut-link`.
  std::string how_long = "5s";
  // Of `cut-link`.
  std::string peer;
  // Of `kill-source`.
  std::string to = "/dev/shm";
  std::string transport;
  // Of `kill`.
  std::uint32_t rank = 0;
  FirstTokenArgs first_token;
};

// The process that the drill strikes, or the owner of the links that it cuts.
struct Victim {
  std::string address;
  std::string name;
  proto::DrillRequest request;
};

struct Step {
  double after_s = 0;
  std::string what;
};

const proto::NodeStatus* find_node(const proto::ClusterStatusResponse& status,
                                   const std::string& node_id) {
  for (const auto& node : status.nodes()) {
    if (node.node().node_id() == node_id) return &node;
  }
  return nullptr;
}

// The versions that were ready before, and of which no whole copy is left.
std::vector<std::string> lost_between(const proto::ClusterStatusResponse& before,
                                      const proto::ClusterStatusResponse& now) {
  std::map<std::string, std::uint32_t> copies;
  for (const auto& version : now.versions()) {
    if (version.state() == "ready") copies[name_of(version.id())] = version.whole_copies();
  }
  std::vector<std::string> lost;
  for (const auto& version : before.versions()) {
    if (version.state() != "ready") continue;
    const auto left = copies.find(name_of(version.id()));
    const bool none = left == copies.end() || (left->second == 0 && version.whole_copies() > 0);
    if (none) lost.push_back(name_of(version.id()));
  }
  return lost;
}

// One drill: strikes once, then follows the fleet until it has recovered or the time is over.
class Drill {
 public:
  static Result<Drill> begin(const Settings& settings, const DrillArgs& args, std::string kind) {
    if (settings.coordinator.empty()) {
      return fail(ErrorCode::kInvalid, "give the fleet's --coordinator HOST:PORT");
    }
    Drill drill(settings, args, std::move(kind));
    TRY(drill.timeout_, parse_duration("--timeout", args.timeout));
    TRY(drill.coordinator_, drill.remote(settings.coordinator));
    TRY(drill.before_, drill.status());
    return drill;
  }

  const proto::ClusterStatusResponse& before() const { return before_; }
  std::uint32_t victim_pid() const { return victim_pid_; }
  void wait_longer(std::chrono::milliseconds more) { timeout_ += more; }
  Result<proto::ClusterStatusResponse> status() {
    return coordinator_->call<proto::COORDINATOR_STATUS>({});
  }
  // A signal ends its calls.
  Result<std::unique_ptr<Remote>> remote(const std::string& address) const {
    TRY(auto remote, Remote::create(settings_, address));
    remote->while_waiting([signals = interrupts_] { return !was_interrupted(*signals); });
    return remote;
  }

  // The first victim names them all, and either all can be struck or none is. Returns false if it
  // only said what it would do.
  Result<bool> strike(std::vector<Victim> victims) {
    for (Victim& victim : victims) {
      victim.request.set_dry_run(true);
      TRY(const auto found, call(victim));
      if (&victim == &victims.front()) victim_pid_ = found.pid();
    }
    victim_ = victims.front().name;
    if (victim_pid_ != 0) victim_ += fmt::format(" (pid {})", victim_pid_);
    if (args_.dry_run) {
      print_result(settings_.json, {{"drill", kind_}, {"would", verb() + " " + victim_}},
                   fmt::format("would {} {}\n", verb(), printable(victim_)));
      return false;
    }
    TRY_VOID(confirm());
    struck_ = steady_now();
    for (Victim& victim : victims) {
      victim.request.set_dry_run(false);
      TRY_VOID(call(victim));
    }
    note(fmt::format("{} {}", verb(), victim_));
    return true;
  }

  // Each thing once.
  void note(const std::string& what) { note(what, since_strike(steady_now())); }
  void note(const std::string& what, double after_s) {
    if (was_interrupted(*interrupts_) || !noted_.insert(what).second) return;
    steps_.push_back({after_s, what});
    if (settings_.json || settings_.quiet) return;
    print_line(fmt::format("{:8.2f} s  {}", steps_.back().after_s, printable(what)));
    (void)flush_output();
  }

  double since_strike(TimePoint time) const { return seconds(time - struck_); }
  TimePoint gives_up_at() const { return struck_ + timeout_; }
  // Where the time went, for the report.
  void explain(std::vector<RecoveryTimeline::Phase> phases) { phases_ = std::move(phases); }

  // The fleet cannot recover any more.
  void give_up() { given_up_ = true; }
  // Why the losses are not known yet; "": they are known.
  void doubt(std::string why) { doubt_ = std::move(why); }

  // From the first call on, signals are asked for here, so that the drill can clean up. False: one
  // has come.
  bool rest(std::chrono::milliseconds pause) {
    if (!*interrupts_) interrupts_->emplace();
    return !(*interrupts_)->within(pause);
  }
  int interrupted() const { return (*interrupts_)->exit_code(); }

  // `look` notes what it sees, and returns true once the fleet has recovered. `pause`: between two
  // looks.
  template <typename Look>
  Result<int> follow(Look look, std::chrono::milliseconds pause, std::string advice) {
    return follow(look, pause, [&] { return advice; });
  }
  template <typename Look, std::invocable Advice>
  Result<int> follow(Look look, std::chrono::milliseconds pause, Advice advice) {
    bool recovered = false;
    while (!recovered && !given_up_ && steady_now() - struck_ < timeout_) {
      recovered = look();
      if (!recovered && !given_up_ && !rest(pause)) return interrupted();
    }
    const auto now = status();
    const bool knows = now && (recovered || doubt_.empty());
    std::string why = doubt_.empty() ? advice() : doubt_;
    if (recovered && !now) why = "what was lost is not known: " + now.error().message();
    return report(now && recovered, knows ? Json(lost_between(before_, *now)) : Json(nullptr), why);
  }

 private:
  Drill(const Settings& settings, const DrillArgs& args, std::string kind)
      : settings_(settings), args_(args), kind_(std::move(kind)) {}

  static bool was_interrupted(std::optional<Interrupts>& signals) {
    return signals && signals->within(std::chrono::milliseconds(0));
  }
  std::string verb() const {
    if (kind_ == "freeze") return "freeze";
    return kind_ == "cut-link" ? "cut" : "kill";
  }

  Result<proto::DrillResponse> call(const Victim& victim) const {
    TRY(const auto agent, remote(victim.address));
    auto answer = agent->call<proto::DRILL>(victim.request);
    if (!answer) return fail(std::move(answer).error().with_context(victim.name));
    return answer;
  }

  Result<void> confirm() const {
    if (args_.yes) return {};
    if (!terminal(STDIN_FILENO)) {
      return fail(ErrorCode::kInvalid, "to {} {}, confirm with --yes; or look with --dry-run",
                  verb(), victim_);
    }
    fmt::print(stderr, "{} {}? [y/N] ", verb(), printable(victim_));
    std::string line;
    std::getline(std::cin, line);
    if (line == "y" || line == "yes") return {};
    return fail(ErrorCode::kInvalid, "not confirmed; nothing was done");
  }

  // `lost`: null if nobody knows.
  Result<int> report(bool recovered, const Json& lost, const std::string& advice) const {
    if (settings_.json) {
      Json steps = Json::array();
      for (const Step& step : steps_) {
        steps.push_back({{"after_s", step.after_s}, {"what", step.what}});
      }
      Json report{{"drill", kind_}, {"victim", victim_},
                  {"steps", steps}, {"recovered", recovered},
                  {"lost", lost},   {"advice", recovered ? "" : advice}};
      Json timeline = Json::array();
      for (const auto& phase : phases_) {
        timeline.push_back({{"phase", phase.name},
                            {"begin_s", phase.begin_s},
                            {"took_s", phase.took_s},
                            {"what", phase.what}});
      }
      if (kind_ == "kill") report["timeline"] = std::move(timeline);
      print_json(report);
    } else {
      for (const auto& phase : phases_) {
        print_line(
            fmt::format("{:<12}{:8.2f} s  {}", phase.name, phase.took_s, printable(phase.what)));
      }
      std::string names = lost.is_null() ? "not known" : lost.empty() ? "nothing" : "";
      for (const Json& name : lost) names += (names.empty() ? "" : ", ") + name.get<std::string>();
      print_line("lost: " + printable(names));
      print_line(recovered ? fmt::format("recovered in {:.2f} s", steps_.back().after_s)
                           : fmt::format("not recovered: {}", advice));
    }
    if (!lost.empty()) return kExitFailed;
    return recovered ? kExitOk : kExitUnavailable;
  }

  const Settings settings_;
  const DrillArgs args_;
  const std::string kind_;
  std::chrono::milliseconds timeout_{};
  std::unique_ptr<Remote> coordinator_;
  proto::ClusterStatusResponse before_;
  std::string victim_;
  std::uint32_t victim_pid_ = 0;
  TimePoint struck_{};
  bool given_up_ = false;
  std::string doubt_;
  // nullopt: a signal ends this process, as usual. Shared with the calls.
  const std::shared_ptr<std::optional<Interrupts>> interrupts_ =
      std::make_shared<std::optional<Interrupts>>();
  std::vector<Step> steps_;
  std::vector<RecoveryTimeline::Phase> phases_;
  std::set<std::string> noted_;
};

// What the coordinator knows of an agent that was killed. kReturned: a later process of the node
// has registered. kBack: it holds at least as much. kNothing: neither that nor the death.
enum class Known { kNothing, kDead, kReturned, kBack };

Known look_at_killed(Drill& drill, const proto::NodeStatus& before) {
  const auto status = drill.status();
  if (!status) {
    drill.note(fmt::format("the coordinator does not answer: {}", status.error().message()));
    return Known::kNothing;
  }
  const std::string& name = before.node().node_id();
  const auto* now = find_node(*status, name);
  const bool is_new = now != nullptr && now->node().incarnation() != before.node().incarnation();
  if (!is_new) {
    const std::string state = now == nullptr ? "dead" : now->state();
    if (state != "alive")
      drill.note(fmt::format("the coordinator sees that {} is {}", name, state));
    return state == "dead" ? Known::kDead : Known::kNothing;
  }
  drill.note(fmt::format("a new process of {} has registered", name));
  if (now->holdings_size() < before.holdings_size()) return Known::kReturned;
  if (!lost_between(drill.before(), *status).empty()) return Known::kReturned;
  drill.note(fmt::format("it holds its copies again: {}", now->holdings_size()));
  return Known::kBack;
}

Result<proto::NodeStatus> living_agent(const Drill& drill, const std::string& name) {
  const auto* found = find_node(drill.before(), name);
  if (found != nullptr && found->state() != "dead") return *found;
  return fail(ErrorCode::kNotFound, "no agent '{}' is alive; `rekindle status` lists them", name);
}

Result<int> kill_agent(const Settings& settings, const DrillArgs& args) {
  TRY(auto drill, Drill::begin(settings, args, "kill-agent"));
  TRY(const proto::NodeStatus node, living_agent(drill, args.target));
  Victim victim{node.node().control_endpoint(), "the agent " + args.target, {}};
  victim.request.mutable_kill_self();
  TRY(const bool struck, drill.strike({std::move(victim)}));
  if (!struck) return kExitOk;
  return drill.follow([&] { return look_at_killed(drill, node) == Known::kBack; }, kLook,
                      "nobody has started the agent again; run it under systemd or Kubernetes");
}

// A pull of this command's own, in another process. It ends with this object, and its copy is
// deleted.
class OwnPull {
 public:
  static Result<std::unique_ptr<OwnPull>> start(const Settings& settings, const DrillArgs& args) {
    auto made = ScratchDirectory::create(args.to, "rekindle-drill");
    if (!made) return fail(std::move(made).error().with_context("--to"));
    std::unique_ptr<OwnPull> pull(new OwnPull(std::move(*made)));
    std::vector<std::string> words = {
        "rekindle",         "pull",    args.target,     "--to",
        pull->path("copy"), "--quiet", "--coordinator", settings.coordinator};
    add_credential_words(settings, words);
    if (!args.transport.empty()) words.insert(words.end(), {"--transport", args.transport});
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    const std::string log_path = pull->path("log");
    pull->pid_ = ::fork();
    if (pull->pid_ < 0) return fail_errno(errno, "fork");
    if (pull->pid_ == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      sigset_t none;
      ::sigemptyset(&none);
      ::sigprocmask(SIG_SETMASK, &none, nullptr);
      const int log = ::open(log_path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
      ::dup2(log, STDOUT_FILENO);
      ::dup2(log, STDERR_FILENO);
      ::execv("/proc/self/exe", argv.data());
      ::_exit(kExitFailed);
    }
    return pull;
  }
  ~OwnPull() {
    if (pid_ > 0 && !ended()) {
      ::kill(pid_, SIGKILL);
      ::waitpid(pid_, nullptr, 0);
    }
  }
  OwnPull(const OwnPull&) = delete;
  OwnPull& operator=(const OwnPull&) = delete;

  bool ended() {
    if (!status_) {
      int status = 0;
      if (::waitpid(pid_, &status, WNOHANG) == pid_) status_ = status;
    }
    return status_.has_value();
  }
  // Of a pull that has ended.
  bool succeeded() const { return WIFEXITED(*status_) && WEXITSTATUS(*status_) == 0; }
  std::string log() const {
    auto text = read_text_file(path("log")).value_or("");
    while (text.ends_with('\n')) text.pop_back();
    return text;
  }
  // As the coordinator knows it; nullptr: not yet, or not any more.
  const proto::PullStatus* in(const proto::ClusterStatusResponse& status) const {
    for (const auto& pull : status.pulls()) {
      if (pull.puller() == fmt::format("{}-{}", agent::default_node_id(), pid_)) return &pull;
    }
    return nullptr;
  }

 private:
  explicit OwnPull(std::unique_ptr<ScratchDirectory> directory)
      : directory_(std::move(directory)) {}
  std::string path(const char* name) const { return (directory_->path() / name).string(); }

  const std::unique_ptr<ScratchDirectory> directory_;
  pid_t pid_ = -1;
  std::optional<int> status_;
};

// The source with the most bytes of a pull so far; nullptr before the first report.
const proto::SourceReport* busiest_source(const proto::PullStatus& pull) {
  const proto::SourceReport* busiest = nullptr;
  for (const auto& source : pull.sources()) {
    if (source.lost() || source.bytes() == 0) continue;
    if (busiest == nullptr || source.bytes() > busiest->bytes()) busiest = &source;
  }
  return busiest;
}

// nullopt: a signal has come.
Result<std::optional<proto::NodeStatus>> wait_for_source(Drill& drill, OwnPull& pull,
                                                         const std::string& name) {
  const TimePoint give_up = steady_now() + kSourceDeadline;
  while (steady_now() < give_up && !pull.ended()) {
    const auto status = drill.status();
    if (!drill.rest(std::chrono::milliseconds(0))) return std::nullopt;
    if (!status) return fail(status.error());
    const auto* running = pull.in(*status);
    const auto* source = running != nullptr ? busiest_source(*running) : nullptr;
    const auto* node = source != nullptr ? find_node(*status, source->node_id()) : nullptr;
    if (node != nullptr) return *node;
    if (!drill.rest(kLook)) return std::nullopt;
  }
  if (!pull.ended()) {
    return fail(ErrorCode::kTimeout, "the pull of {} has got no byte from an agent for 30 s", name);
  }
  if (!pull.succeeded()) return fail(ErrorCode::kUnavailable, "the pull failed: {}", pull.log());
  return fail(ErrorCode::kInvalid,
              "the pull of {} was complete before one of its sources could be killed; choose a "
              "larger version",
              name);
}

// Until the coordinator has noticed the death of the source, nobody knows what went with it.
bool look_at_pull(Drill& drill, OwnPull& pull, const proto::NodeStatus& killed) {
  if (const auto status = drill.status()) {
    if (const auto* running = pull.in(*status)) {
      for (const auto& source : running->sources()) {
        if (source.lost()) drill.note(fmt::format("the pull has lost {}", source.node_id()));
      }
    }
  }
  const bool ended = pull.ended();
  if (ended) {
    drill.note(pull.succeeded() ? "the pull is complete, and every byte verified"
                                : fmt::format("the pull failed: {}", pull.log()));
  }
  const bool noticed = look_at_killed(drill, killed) != Known::kNothing;
  drill.doubt(noticed ? ""
                      : fmt::format("the coordinator has not noticed that {} is dead; give a "
                                    "--timeout above its --dead-after",
                                    killed.node().node_id()));
  if (!ended || !noticed) return false;
  if (!pull.succeeded()) drill.give_up();
  return pull.succeeded();
}

Result<int> kill_source(const Settings& settings, const DrillArgs& args) {
  TRY(auto drill, Drill::begin(settings, args, "kill-source"));
  if (args.dry_run) {
    print_result(settings.json, {{"drill", "kill-source"}, {"would", "kill a source"}},
                 fmt::format("would pull {} below {}, and kill the agent that serves most of it\n",
                             printable(args.target), printable(args.to)));
    return kExitOk;
  }
  if (!args.yes) {
    return fail(ErrorCode::kInvalid, "the pull does not wait for an answer: confirm with --yes");
  }
  if (!drill.rest(std::chrono::milliseconds(0))) return drill.interrupted();
  TRY(const auto pull, OwnPull::start(settings, args));
  TRY(const auto node, wait_for_source(drill, *pull, args.target));
  if (!node) return drill.interrupted();
  Victim victim{node->node().control_endpoint(),
                fmt::format("the agent {}, a source of the pull", node->node().node_id()),
                {}};
  victim.request.mutable_kill_self();
  TRY_VOID(drill.strike({std::move(victim)}));
  return drill.follow(
      [&] { return look_at_pull(drill, *pull, *node); }, kLook,
      "the pull did not go on from other sources; does another host hold all of it?");
}

// Before `until` the agent may look alive, because nobody has missed it yet.
bool look_at_frozen(Drill& drill, const proto::NodeStatus& before, TimePoint until) {
  const auto status = drill.status();
  if (!status) {
    drill.note(fmt::format("the coordinator does not answer: {}", status.error().message()));
    return false;
  }
  const std::string& name = before.node().node_id();
  const auto* now = find_node(*status, name);
  const std::string state = now == nullptr ? "dead" : now->state();
  if (state != "alive") drill.note(fmt::format("the coordinator sees that {} is {}", name, state));
  if (steady_now() < until || state != "alive") return false;
  if (now->holdings_size() < before.holdings_size()) return false;
  if (!lost_between(drill.before(), *status).empty()) return false;
  drill.note(fmt::format("{} is alive, with its copies: {}", name, now->holdings_size()));
  return true;
}

Result<std::chrono::milliseconds> parse_how_long(const DrillArgs& args) {
  TRY(const auto how_long, parse_duration("--for", args.how_long));
  if (how_long.count() > 0 && how_long <= kLongest) return how_long;
  return fail(ErrorCode::kInvalid, "--for {}: give 1ms to {} s", args.how_long, kLongest.count());
}

Result<int> freeze(const Settings& settings, const DrillArgs& args) {
  TRY(const auto how_long, parse_how_long(args));
  TRY(auto drill, Drill::begin(settings, args, "freeze"));
  // The agent recovers when it is over.
  drill.wait_longer(how_long);
  TRY(const proto::NodeStatus node, living_agent(drill, args.target));
  Victim victim{node.node().control_endpoint(),
                fmt::format("the agent {} for {}", args.target, args.how_long),
                {}};
  victim.request.mutable_freeze()->set_milliseconds(static_cast<std::uint32_t>(how_long.count()));
  TRY(const bool struck, drill.strike({std::move(victim)}));
  if (!struck) return kExitOk;
  // The agent freezes after its answer.
  const TimePoint until = steady_now() + how_long;
  return drill.follow([&] { return look_at_frozen(drill, node, until); }, kLook,
                      "the agent has not come back; look at its log");
}

// One end of a link: an agent, and one of its rails. "" means all that it has.
struct LinkEnd {
  proto::NodeStatus node;
  std::string rail;
};

// A name of an agent and one of a rail may have colons.
Result<LinkEnd> parse_link_end(const Drill& drill, const std::string& text) {
  auto whole = living_agent(drill, text);
  if (whole) return LinkEnd{std::move(*whole), ""};
  for (auto colon = text.rfind(':'); colon != std::string::npos && colon > 0;
       colon = text.rfind(':', colon - 1)) {
    auto node = living_agent(drill, text.substr(0, colon));
    if (node) return LinkEnd{std::move(*node), text.substr(colon + 1)};
  }
  return fail(std::move(whole).error());
}

// The agents at a link that was cut: each reads from the other side.
class LinkWatch {
 public:
  // Of `nodes`.
  static Result<LinkWatch> create(const Drill& drill, const std::vector<proto::NodeStatus>& nodes) {
    LinkWatch watch;
    for (const auto& node : nodes) {
      TRY(auto remote, drill.remote(node.node().control_endpoint()));
      watch.readers_.push_back({node.node().node_id(), std::move(remote)});
    }
    return watch;
  }

  // Notes the news. True: the link has healed everywhere, and every pull over it is complete.
  bool look(Drill& drill) {
    for (Reader& reader : readers_) look_at(drill, reader);
    look_at_pulls(drill);
    bool over = std::ranges::all_of(readers_, &Reader::healed);
    for (const auto& [key, pull] : pulls_) {
      over = over && pull.end == Pull::End::kComplete;
      if (pull.end == Pull::End::kFailed) drill.give_up();
    }
    if (over && pulls_.empty()) drill.note("no pull of these agents ran over the link");
    return over;
  }

 private:
  struct Reader {
    std::string node;
    std::unique_ptr<Remote> agent;
    bool healed = false;
  };
  struct Pull {
    enum class End { kRuns, kComplete, kFailed };
    End end = End::kRuns;
    // Since the coordinator has known of no such pull.
    std::optional<TimePoint> gone_since;
  };
  // The reader, and the version.
  using Key = std::pair<std::string, std::string>;

  static std::string name_pull(const Key& key) {
    return key.second.empty() ? fmt::format("a read of {}", key.first)
                              : fmt::format("the pull of {} by {}", key.second, key.first);
  }

  void look_at(Drill& drill, Reader& reader) {
    proto::DrillRequest request;
    request.mutable_list_routes();
    const auto answer = reader.agent->call<proto::DRILL>(request);
    if (!answer) {
      drill.note(fmt::format("{} does not answer: {}", reader.node, answer.error().message()));
      return;
    }
    for (const auto& route : answer->routes().routes()) {
      const Key key{reader.node, route.version()};
      if (!route.silenced()) continue;
      if (!key.second.empty()) pulls_.try_emplace(key);
      drill.note(fmt::format("{} reads from {} over the link: {}", name_pull(key), route.peer(),
                             route.description()));
      if (!route.has_noticed_after_ms()) continue;
      drill.note(fmt::format("{} gave the route up {:.2f} s after the cut: {}", name_pull(key),
                             route.noticed_after_ms() / 1e3, route.description()));
    }
    for (const auto& route : answer->routes().routes()) {
      const Key key{reader.node, route.version()};
      if (route.silenced() || route.bytes() == 0 || !pulls_.contains(key)) continue;
      drill.note(
          fmt::format("{} goes on from {}: {}", name_pull(key), route.peer(), route.description()));
    }
    if (answer->routes().left_ms() != 0) return;
    if (!std::exchange(reader.healed, true)) {
      drill.note(fmt::format("the link has healed at {}", reader.node));
    }
  }

  void look_at_pulls(Drill& drill) {
    if (pulls_.empty()) return;
    const auto status = drill.status();
    if (!status) {
      drill.note(fmt::format("the coordinator does not answer: {}", status.error().message()));
      return;
    }
    for (auto& [key, pull] : pulls_) {
      if (pull.end == Pull::End::kRuns) look_at_pull(drill, *status, key, pull);
    }
  }

  static void look_at_pull(Drill& drill, const proto::ClusterStatusResponse& status, const Key& key,
                           Pull& pull) {
    const bool runs = std::ranges::any_of(status.pulls(), [&](const auto& running) {
      return running.puller() == key.first && name_of(running.id()) == key.second;
    });
    if (runs) {
      pull.gone_since.reset();
      return;
    }
    const auto* node = find_node(status, key.first);
    const bool holds =
        node != nullptr && std::ranges::any_of(node->holdings(), [&](const auto& one) {
          return one.complete() && name_of(one.id()) == key.second;
        });
    if (!pull.gone_since) pull.gone_since = steady_now();
    if (holds) {
      pull.end = Pull::End::kComplete;
      drill.note(fmt::format("{} is complete, and every byte verified", name_pull(key)));
    } else if (steady_now() - *pull.gone_since > kAnnounceTime) {
      pull.end = Pull::End::kFailed;
      drill.note(fmt::format("{} has ended without a copy", name_pull(key)));
    }
  }

  std::vector<Reader> readers_;
  std::map<Key, Pull> pulls_;
};

Result<int> cut_link(const Settings& settings, const DrillArgs& args) {
  TRY(const auto how_long, parse_how_long(args));
  TRY(auto drill, Drill::begin(settings, args, "cut-link"));
  TRY(const LinkEnd end, parse_link_end(drill, args.target));
  const std::string& name = end.node.node().node_id();
  if (name == args.peer) {
    return fail(ErrorCode::kInvalid, "--to {}: a link has two ends; name another agent", name);
  }
  if (!args.peer.empty()) TRY_VOID(living_agent(drill, args.peer));
  std::vector<proto::NodeStatus> nodes{end.node};
  for (const auto& node : drill.before().nodes()) {
    const std::string& other = node.node().node_id();
    const bool chosen = args.peer.empty() ? node.state() == "alive" : other == args.peer;
    if (chosen && other != name) nodes.push_back(node);
  }
  if (nodes.size() < 2) {
    return fail(ErrorCode::kNotFound, "{} has no links: no other agent is alive", name);
  }
  std::vector<Victim> victims;
  for (const auto& node : nodes) {
    const bool is_end = victims.empty();
    Victim victim{node.node().control_endpoint(), "the agent " + node.node().node_id(), {}};
    auto& cut = *victim.request.mutable_cut_links();
    cut.set_milliseconds(static_cast<std::uint32_t>(how_long.count()));
    cut.set_peer(is_end ? args.peer : name);
    (is_end ? *cut.mutable_rail() : *cut.mutable_peer_rail()) = end.rail;
    victims.push_back(std::move(victim));
  }
  victims.front().name = fmt::format(
      "the {} of {} to {} for {}", end.rail.empty() ? "data links" : "rail " + end.rail, name,
      args.peer.empty() ? fmt::format("{} other agents", nodes.size() - 1) : args.peer,
      args.how_long);
  drill.wait_longer(how_long);
  TRY(auto watch, LinkWatch::create(drill, nodes));
  TRY(const bool struck, drill.strike(std::move(victims)));
  if (!struck) return kExitOk;
  return drill.follow([&] { return watch.look(drill); }, kLook,
                      "a pull over the link is not complete; does another host hold its version?");
}

// The agents that were alive have to be registered with the new term.
bool look_at_leader(Drill& drill) {
  const auto status = drill.status();
  if (!status) {
    drill.note("no coordinator answers");
    return false;
  }
  const auto& before = drill.before();
  if (status->epoch() <= before.epoch()) return false;
  drill.note(fmt::format("a coordinator leads in epoch {}", status->epoch()));
  int agents = 0;
  for (const auto& node : before.nodes()) {
    if (node.state() != "alive") continue;
    const auto* now = find_node(*status, node.node().node_id());
    if (now == nullptr || now->state() != "alive" || now->holdings_size() < node.holdings_size()) {
      return false;
    }
    ++agents;
  }
  drill.note(fmt::format("agents that have registered again, with their copies: {}", agents));
  return lost_between(before, *status).empty();
}

Result<int> kill_leader(const Settings& settings, const DrillArgs& args) {
  TRY(auto drill, Drill::begin(settings, args, "leader"));
  Victim victim{settings.coordinator, "the coordinator that leads", {}};
  victim.request.mutable_kill_self();
  TRY(const bool struck, drill.strike({std::move(victim)}));
  if (!struck) return kExitOk;
  return drill.follow([&] { return look_at_leader(drill); }, kLook,
                      "no coordinator leads; start it again, or run several with --etcd");
}

struct WorkerName {
  std::string instance;
  std::uint32_t number = 0;
};

bool has_rank(const proto::AgentStatusResponse& status, const WorkerName& rank) {
  for (const auto& instance : status.instances()) {
    if (instance.name() != rank.instance) continue;
    for (const auto& session : instance.sessions()) {
      if (session.rank() == rank.number) return true;
    }
  }
  return false;
}

// Asks the agents that are alive, one after the other.
Result<const proto::NodeStatus*> node_of(const Drill& drill, const WorkerName& rank) {
  for (const auto& node : drill.before().nodes()) {
    if (node.state() != "alive") continue;
    TRY(const auto remote, drill.remote(node.node().control_endpoint()));
    const auto status = remote->call<proto::AGENT_STATUS>({});
    if (status && has_rank(*status, rank)) return &node;
  }
  return fail(ErrorCode::kNotFound, "no agent that answers has a worker of {}/{}", rank.instance,
              rank.number);
}

// The events of one agent that concern an instance, from now on.
class InstanceEvents {
 public:
  InstanceEvents(Remote& agent, std::string instance)
      : agent_(agent), instance_(std::move(instance)) {}

  Result<void> skip_to_now() {
    TRY(const auto response, next(0));
    after_ = response.last();
    return {};
  }
  // Waits for the next ones for a moment.
  Result<std::vector<proto::AgentEvent>> wait() {
    TRY(const auto response, next(kEventWaitMs));
    std::vector<proto::AgentEvent> events;
    for (const auto& event : response.events()) {
      after_ = event.number();
      if (event.instance() == instance_) events.push_back(event);
    }
    return events;
  }

 private:
  Result<proto::AgentEventsResponse> next(std::uint32_t wait_ms) {
    proto::AgentStatusRequest request;
    request.mutable_events()->set_after(after_);
    request.mutable_events()->set_wait_ms(wait_ms);
    TRY(auto status, agent_.call<proto::AGENT_STATUS>(request));
    return std::move(*status.mutable_events());
  }

  Remote& agent_;
  const std::string instance_;
  std::uint64_t after_ = 0;
};

std::string describe(const proto::AgentEvent& event) {
  std::string text = event.instance();
  if (event.has_rank()) text += fmt::format("/{}", event.rank());
  if (event.pid() != 0) text += fmt::format(" pid {}", event.pid());
  text += " " + event.kind();
  if (!event.why().empty()) text += ": " + event.why();
  if (event.kind() != "committed") return text;
  for (const auto& phase : event.phases()) {
    if (phase.elapsed_us() < 50) continue;
    text +=
        fmt::format(", {} {:.1f} ms", phase.name(), static_cast<double>(phase.elapsed_us()) / 1e3);
  }
  return text;
}

// What is seen of a worker that was killed: its instance's events, and the engine's first answer.
class KilledWorker {
 public:
  KilledWorker(Drill& drill, InstanceEvents& events, FirstToken* first_token, std::uint32_t rank)
      : drill_(drill),
        events_(events),
        first_token_(first_token),
        timeline_(drill.victim_pid(), rank) {}

  // Returns true once the instance is ready and the engine has answered.
  bool look() {
    take_events();
    ask_engine();
    drill_.explain(timeline_.phases());
    return timeline_.ready() && (first_token_ == nullptr || first_token_->succeeded());
  }
  std::string advice() const {
    if (!timeline_.ready() || first_token_ == nullptr) {
      return "the instance is not ready; `rekindle run` starts a worker again when it dies";
    }
    return "the instance is ready, but no request has succeeded: " + first_token_->last_failure();
  }

 private:
  void take_events() {
    const auto seen = events_.wait();
    if (!seen) {
      drill_.note(fmt::format("the agent does not answer: {}", seen.error().message()));
      std::this_thread::sleep_for(kLook);
      return;
    }
    for (const auto& event : *seen) {
      timeline_.add(event, drill_.since_strike(steady_now()));
      drill_.note(describe(event));
    }
  }
  // Not before the instance is ready: a front end that outlives its worker may answer until then.
  void ask_engine() {
    if (first_token_ == nullptr || !timeline_.ready()) return;
    if (auto started = first_token_->start(drill_.gives_up_at()); !started) {
      return drill_.note(started.error().message());
    }
    const auto succeeded = first_token_->succeeded();
    if (!succeeded) return;
    timeline_.first_token(drill_.since_strike(*succeeded));
    drill_.note("a request succeeds", drill_.since_strike(*succeeded));
  }

  Drill& drill_;
  InstanceEvents& events_;
  // Null: nobody asks the engine.
  FirstToken* const first_token_;
  RecoveryTimeline timeline_;
};

Result<int> kill_worker(const Settings& settings, const DrillArgs& args) {
  const WorkerName rank{args.target, args.rank};
  TRY_VOID(worker::check_instance_name(rank.instance));
  TRY(const auto first_token, FirstToken::create(args.first_token));
  TRY(auto drill, Drill::begin(settings, args, "kill"));
  TRY(const auto* node, node_of(drill, rank));
  const std::string address = node->node().control_endpoint();
  TRY(const auto agent, drill.remote(address));
  InstanceEvents events(*agent, rank.instance);
  TRY_VOID(events.skip_to_now());
  Victim victim{
      address,
      fmt::format("the worker {}/{} on {}", rank.instance, rank.number, node->node().node_id()),
      {}};
  victim.request.mutable_kill_worker()->set_instance(rank.instance);
  victim.request.mutable_kill_worker()->set_rank(rank.number);
  TRY(const bool struck, drill.strike({std::move(victim)}));
  if (!struck) return kExitOk;
  KilledWorker killed(drill, events, first_token.get(), rank.number);
  return drill.follow([&] { return killed.look(); }, std::chrono::milliseconds(0),
                      [&] { return killed.advice(); });
}

struct DrillText {
  const char* name;
  const char* about;
  // nullptr: the drill has no target.
  const char* target;
  const char* target_help;
};

void add_one(Command& drill, Session& session, const DrillText& text,
             Result<int> (*body)(const Settings&, const DrillArgs&)) {
  Command sub = drill.command(text.name, text.about);
  auto args = std::make_shared<DrillArgs>();
  if (text.target != nullptr) sub.option(text.target, args->target, text.target_help).required();
  if (body == cut_link) {
    sub.option("--to", args->peer, "Only the links to this agent, by its --node-id [all agents]")
        .type_name("NODE");
  }
  if (body == freeze || body == cut_link) {
    sub.option("--for", args->how_long, "How long, at most 60s [5s]").type_name("TIME");
  }
  if (body == kill_worker) {
    sub.option("--rank", args->rank, "The rank of the worker [0]").type_name("N");
    sub.option("--first-token", args->first_token.url,
               "Ask the engine until it answers with a status of 2xx: http://HOST:PORT/PATH")
        .type_name("URL");
    sub.option("--first-token-body", args->first_token.body,
               "JSON to post to that URL, instead of a GET")
        .type_name("JSON");
    sub.option("--first-token-command", args->first_token.command,
               "Ask the engine by this shell command, until it exits with 0")
        .type_name("CMD");
  }
  if (body == kill_source) {
    sub.option("--to", args->to,
               "A directory with room for the copy of the pull, which is deleted [/dev/shm]")
        .type_name("DIR");
    sub.option("--transport", args->transport, "As for `rekindle pull` [as there]")
        .one_of({"tcp", "shm", "verbs"})
        .type_name("NAME");
  }
  sub.flag("-n,--dry-run", args->dry_run, "Say what would be done, and do nothing");
  sub.flag("-y,--yes", args->yes, "Do not ask");
  sub.option("--timeout", args->timeout, "Time for the fleet to recover [60s]").type_name("TIME");
  sub.runs(session, "drill", [&session, args, body] { return body(session.settings, *args); });
}

}  // namespace

void add_drill(Command& app, Session& session) {
  Command sub = app.command(
      "drill",
      "Let a process of a live fleet fail, and report how the fleet recovers: what was seen when,\n"
      "and what was lost. Only daemons with --allow-drills take part.");
  sub.require_command();
  constexpr const char* kNodeHelp = "The agent's --node-id (see `rekindle status`)";
  add_one(sub, session,
          {"kill",
           "Kill a worker, and say where the time goes until it serves again. Recovered: its\n"
           "instance is ready, and the engine answers, if you say how to ask it",
           "INSTANCE", "The instance of the worker"},
          kill_worker);
  add_one(sub, session,
          {"kill-agent", "Kill an agent. Recovered: a new process of it holds the same copies",
           "NODE", kNodeHelp},
          kill_agent);
  add_one(sub, session,
          {"kill-source",
           "Pull a version, and kill the agent that serves most of it. Recovered: the pull is\n"
           "complete from other sources, and every byte verified",
           "MODEL[@VERSION]", "A version that takes the pull seconds, and that two hosts hold"},
          kill_source);
  add_one(sub, session,
          {"freeze",
           "Stop an agent for a while, so that its links look cut. Recovered: it is alive again\n"
           "and holds the same copies. It goes on by itself, even if this command dies.",
           "NODE", kNodeHelp},
          freeze);
  add_one(sub, session,
          {"cut-link",
           "Silence the data links of an agent for a while, while its calls go on. Recovered: the\n"
           "links have healed, and the pulls that ran over them are complete. They heal by\n"
           "themselves, even if this command dies.",
           "NODE[:RAIL]", "The agent's --node-id, and one of its rails, such as mlx5_0:1"},
          cut_link);
  add_one(
      sub, session,
      {"leader", "Kill the coordinator that leads. Recovered: one leads, and all agents are back",
       nullptr, nullptr},
      kill_leader);
}

}  // namespace rekindle::cli
