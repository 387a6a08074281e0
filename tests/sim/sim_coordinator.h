#pragma once

#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/sim/faulty_core.h"
#include "tests/sim/sim_world.h"

namespace rekindle::sim {

using namespace rekindle::coordinator;

// Nothing: the coordinator died in the call.
template <typename T>
using Served = std::optional<Result<T>>;
template <typename T>
using Reply = World::Reply<T>;

// The real core on a host that crashes and pauses, whose clock jumps, and whose disk is slow and
// fails. Beside it an oracle checks each answer against the earlier calls and answers. Calls that
// change durable state are answered when the change is durable; others come while a batch is on its
// way to the disk.
class SimCoordinator {
 public:
  SimCoordinator(World& world, const Limits& limits);

  ProcessId process() const { return process_; }
  void start();
  void crash();
  // The next start finds an empty directory.
  void lose_state();
  // Ahead, as after a suspended machine.
  void jump_clock(Duration by);
  void set_disk_faults(int error_percent, int crash_percent);
  bool state_was_lost() const { return state_was_lost_; }

  void enroll(const NodeInfo& info, const std::string& domain, std::uint64_t highest_epoch,
              const std::string& connection, const Reply<Registered>& reply);
  void disconnected(const NodeInfo& info, const std::string& connection);
  Served<HeartbeatAnswer> heartbeat(const NodeInfo& info, const Heartbeat& heartbeat);
  void announce(const NodeInfo& info, std::uint64_t epoch, const std::vector<Holding>& holdings,
                const Reply<std::vector<AnnounceConflict>>& reply);
  void publish(const NodeInfo& info, const ModelVersion& id, const Digest& root,
               std::uint64_t bytes, std::optional<std::uint32_t> replicas,
               const Reply<std::uint64_t>& reply);
  Served<OpenedPull> open_pull(const OpenPullRequest& request);
  Served<PullProgressAnswer> pull_progress(const PullProgress& progress);
  Served<bool> close_pull(const PullId& id, const Incarnation& puller);
  void retire(const ModelVersion& id, const Reply<std::uint32_t>& reply);
  void drain(const std::string& node_id, bool drained, const Reply<Draining>& reply);
  Served<InstanceAnswer> report_rank(const RankReport& report);

  // False: the message came late or twice on its connection.
  bool in_order(const std::string& connection, std::uint64_t sequence) {
    std::uint64_t& last = sequences_[connection];
    return sequence > std::exchange(last, std::max(last, sequence));
  }

  // Checks the rules that hold at any moment.
  void check() const;
  const Core* core() const { return core_ ? &*core_ : nullptr; }
  TimePoint clock() const { return world_.now() + skew_; }
  std::uint64_t answers() const { return answers_; }
  // The worker of this rank has really loaded all of its version.
  void note_loaded(const RankReport& report) {
    loaded_.insert({report.instance, report.generation, report.rank, report.has->version});
  }

 private:
  struct Heard {
    Duration awake{};
    // Open, as far as the coordinator can know.
    std::string connection;
  };
  struct Fetching {
    Incarnation node;
    std::string node_id;
    Digest root;
    TimePoint since;
  };
  using Loaded = std::tuple<std::string, std::uint64_t, std::uint32_t, std::uint64_t>;

  void tick();
  // Calls `run` when the commit has ended (0: at once), in the order of the calls.
  void when_ended(CommitNumber commit, std::function<void(const Result<void>&)> run);
  void write_next();
  void written(const CommitBatch& batch);
  // Writes a random part of a batch: its write fails, or the power goes.
  void write_some_of(const StateChange& change);
  // Returns the time on the clock. Time for which the coordinator slept is not counted as awake.
  TimePoint enter();
  template <typename T>
  Served<T> leave(Result<T> answer);
  void heard(const NodeInfo& info, const std::string& connection = "");
  // A node that is refused was heard, too, unless it is not registered.
  template <typename T>
  void heard_by(const NodeInfo& info, const Result<T>& answer) {
    if (answer || answer.error().code() != ErrorCode::kStale) heard(info);
  }
  bool is_drained(const std::string& node_id) const {
    return drained_.contains(node_id) && !unsure_.contains(node_id);
  }
  bool silent(const NodeInfo& info, Duration at_least) const;
  void told_epoch(std::uint64_t epoch);
  void told_root(const ModelVersion& id, const Digest& root);
  void note_announced(const std::vector<Holding>& holdings,
                      const std::vector<AnnounceConflict>& conflicts);
  void check_offers(const NodeInfo& puller, const ModelVersion& id, const Digest& root,
                    const std::vector<SourceOffer>& offers, bool is_new);
  bool has_good_copy(const NodeInfo& puller, const ModelVersion& id, const Digest& root) const;
  void check_latest(const std::string& model, std::uint64_t version) const;
  void check_fetch(const NodeInfo& info, const Heartbeat& heartbeat, const HeartbeatAnswer& answer);
  void forget_ended_fetches();
  // `before`: the pull as it was.
  void note_strikes(const PullProgress& progress, const Pull& before);

  World& world_;
  const Limits limits_;
  const Timing timing_;
  const ProcessId process_;
  std::optional<FaultyCore> core_;
  DurableState disk_;
  std::optional<CommitBatch> writing_;
  struct Waiter {
    CommitNumber commit = 0;
    std::function<void(const Result<void>&)> run;
  };
  std::deque<Waiter> waiters_;
  int error_percent_ = 0;
  int crash_percent_ = 0;
  Duration skew_{};
  bool state_was_lost_ = false;
  std::uint64_t answers_ = 0;

  // By connection.
  std::map<std::string, std::uint64_t> sequences_;

  // The knowledge of the oracle. Of this life:
  Duration awake_{};
  TimePoint last_enter_{};
  std::map<Incarnation, Heard> heard_;
  std::set<std::uint64_t> serials_;
  struct Quarantine {
    TimePoint until;
    std::set<Incarnation> struck_by;
  };
  std::map<Incarnation, Quarantine> quarantined_;
  std::map<ModelVersion, Fetching> fetching_;
  // By instance and generation.
  std::map<std::pair<std::string, std::uint64_t>, ModelVersion> resolved_;
  // Of all lives:
  std::uint64_t highest_told_ = 0;
  std::map<ModelVersion, Digest> roots_;
  std::set<ModelVersion> retired_;
  std::set<std::string> drained_;
  // Nodes whose drain is under way, or failed with the disk.
  std::set<std::string> unsure_;
  std::map<std::string, std::uint64_t> drain_requests_;
  // Versions with a whole copy that counts, as some agent was told, and without a later request to
  // retire them: `latest` is never older.
  std::set<ModelVersion> known_ready_;
  std::map<ModelVersion, std::uint64_t> retire_requests_;
  std::set<ModelVersion> maybe_retired_;
  // Claims under way.
  std::multiset<ModelVersion> publishing_;
  std::set<Loaded> loaded_;
};

}  // namespace rekindle::sim
