#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "tests/sim/sim_coordinator.h"
#include "tests/sim/sim_world.h"
#include "tests/support/numbered_digest.h"

namespace rekindle::sim {

inline constexpr std::size_t kTiles = 6;
inline constexpr std::uint64_t kVersionBytes = 600;

inline std::uint64_t tile_of(const Digest& root, std::size_t tile) {
  return test::first_number(root) * 1000003 + tile;
}

// The copy of a version in a store. It outlives the process.
struct Copy {
  Digest root;
  std::vector<std::uint64_t> tiles = std::vector<std::uint64_t>(kTiles);
  std::vector<bool> verified = std::vector<bool>(kTiles);
  bool committed = false;
};

class SimPull;

// One host. Its agent behaves like recovery/agent towards the coordinator, its peers and workers.
class SimAgent {
 public:
  using Peers = std::vector<std::unique_ptr<SimAgent>>;

  SimAgent(World& world, SimCoordinator& coordinator, Peers& peers, std::string name,
           std::string domain, std::uint64_t capacity);
  ~SimAgent();

  void start();
  // The process dies; its store stays.
  void crash();
  // The store, which is memory, is lost, too.
  void lose_power();
  void set_corrupts(int percent) { corrupts_percent_ = percent; }

  void publish(const ModelVersion& id, std::optional<std::uint32_t> replicas);
  void pull(const std::string& model, std::optional<std::uint64_t> version);
  void retire(const ModelVersion& id);
  void drain(const std::string& node_id, bool drained);
  // A worker of an instance attaches, in this generation; it is killed by kill_worker().
  void attach(std::uint32_t rank, std::uint32_t world, std::uint64_t generation);
  void kill_worker();

  // As a source.
  Result<std::uint64_t> open_session(const GrantTerms& grant, const ModelVersion& id);
  Result<std::uint64_t> read(std::uint64_t session, std::size_t tile);
  void close_session(std::uint64_t session) { sessions_.erase(session); }

  ProcessId process() const { return process_; }
  bool running() const { return world_.running(process_); }
  bool registered() const { return running() && registered_; }
  const NodeInfo& info() const { return info_; }
  const std::map<ModelVersion, Copy>& store() const { return store_; }
  std::uint64_t readers_of(const ModelVersion& id) const;
  bool pulling() const { return pull_ != nullptr; }
  std::optional<InstanceState> instance_state() const {
    return worker_ ? std::optional(worker_->state) : std::nullopt;
  }
  bool worker_loaded() const { return worker_ && worker_->loaded; }
  std::uint64_t generation() const { return worker_ ? worker_->generation : 0; }
  std::uint64_t free_bytes() const;
  const std::string& name() const { return name_; }

 private:
  friend class SimPull;
  struct Session {
    Incarnation puller;
    ModelVersion id;
    TimePoint last_read;
  };
  struct Worker {
    std::uint32_t rank = 0;
    std::uint32_t world = 0;
    std::uint64_t generation = 0;
    std::optional<ModelVersion> id;
    bool loaded = false;
    bool failed = false;
    std::uint64_t sequence = 0;
    InstanceState state = InstanceState::kLoading;
  };

  // The link, as recovery/agent/coordinator_link keeps it.
  void connect();
  void lost();
  // Announces if that is due, sends a heartbeat, and waits.
  void go_on(std::uint64_t link);
  // Calls of one connection are served in order and once, as over TCP.
  template <typename T>
  void link_call(Duration deadline, std::function<Served<T>()> serve,
                 std::function<void(Result<T>)> done);
  void announce();
  void beat();
  void take(const HeartbeatAnswer& answer);
  void let_go(const ModelVersion& id);
  std::vector<Holding> holdings() const;
  void fetch(const HeartbeatAnswer::Fetch& task);
  void begin_pull(const std::string& model, std::optional<std::uint64_t> version, bool is_task);
  void pull_ended(const ModelVersion& id, bool ok, bool is_task);
  void expire_sessions();
  void report_worker();
  RankReport worker_report() const;
  void take_rank(const Result<InstanceAnswer>& answer);

  World& world_;
  SimCoordinator& coordinator_;
  Peers& peers_;
  const std::string name_;
  const std::string domain_;
  const std::uint64_t capacity_;
  const ProcessId process_;
  int corrupts_percent_ = 0;
  // It belongs to the host.
  std::map<ModelVersion, Copy> store_;
  // Never used again, so that late messages find nothing.
  std::uint64_t next_session_ = 1;
  std::uint64_t next_pull_ = 1;

  // Of this life of the process:
  NodeInfo info_;
  std::uint64_t epoch_ = 0;
  std::string connection_;
  // The number of this connection among those of this agent.
  std::uint64_t link_ = 0;
  std::uint64_t link_sequence_ = 0;
  bool registered_ = false;
  bool announce_due_ = false;
  int failures_ = 0;
  // The time on the coordinator's clock in its last answer, and when that came.
  std::uint64_t coordinator_ms_ = 0;
  TimePoint coordinator_heard_{};
  // Versions that admit no new readers.
  std::set<ModelVersion> draining_;
  std::vector<ModelVersion> failed_fetches_;
  std::map<std::uint64_t, Session> sessions_;
  std::unique_ptr<SimPull> pull_;
  std::optional<Worker> worker_;
};

}  // namespace rekindle::sim
