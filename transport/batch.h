#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "transport/engine.h"
#include "transport/poller.h"
#include "transport/schedule/scheduler.h"

namespace rekindle::transport {

// The engine, as a batch sees it. Only the engine thread uses the pollers and the work pool.
class BatchHost {
 public:
  virtual ~BatchHost() = default;
  // From any thread.
  virtual void wake() = 0;
  // Without a home: a poller near this NUMA node (-1: anywhere) with few paths.
  virtual Poller& poller_for(const PollerHome* home, int numa_node) = 0;
  virtual SliceWork* acquire_work() = 0;
  virtual void release_work(SliceWork* work) = 0;
  // From any thread. Returns when the engine has let go of the batch.
  virtual void detach(std::uint64_t batch_id) = 0;
};

// One running batch: a Scheduler, and the rings to the pollers that carry out its decisions.
class BatchImpl final {
 public:
  BatchImpl(std::uint64_t id, BatchHost& host, SliceSource& source, BatchObserver& observer,
            const BatchOptions& options);

  // --- any thread
  void add_paths(SourceIndex source, std::vector<std::unique_ptr<Path>> paths);
  void remove_source(SourceIndex source, Error cause);
  void resolve(SliceIndex slice, Verdict verdict);
  void add_neighbour(SourceIndex source, std::uint64_t order_seed);
  void candidates_added(SourceIndex source, std::vector<SliceIndex> slices);
  void cancel();
  BatchProgress progress() const;
  bool finished() const;
  bool wait_finished(std::chrono::milliseconds deadline);

  // --- the engine thread
  std::uint64_t id() const { return id_; }
  void on_event(const PollerEvent& event, TimePoint now);
  void step(TimePoint now, bool tick);

 private:
  struct NewPaths {
    SourceIndex source = 0;
    std::vector<std::unique_ptr<Path>> paths;
  };
  struct Route {
    std::shared_ptr<PathHandle> handle;
    Poller* poller = nullptr;
  };

  void take_commands(TimePoint now);
  void add_path(SourceIndex source, std::unique_ptr<Path> path, TimePoint now);
  void send_aborts(TimePoint now);
  void post_slices(TimePoint now);
  bool post_one(const Scheduler::Post& post, TimePoint now);
  void finish_slice(SliceWork* work, OpStatus status, TimePoint now);
  void report(TimePoint now);

  const std::uint64_t id_;
  BatchHost& host_;
  SliceSource& source_;
  BatchObserver& observer_;
  const int numa_node_;  // BatchOptions::numa_node

  mutable std::mutex command_mutex_;
  std::vector<NewPaths> new_paths_;                                // guarded by command_mutex_
  std::vector<std::pair<SourceIndex, Error>> removals_;            // guarded by command_mutex_
  std::vector<std::pair<SliceIndex, Verdict>> verdicts_;           // guarded by command_mutex_
  std::vector<std::pair<SourceIndex, std::uint64_t>> neighbours_;  // guarded by command_mutex_
  // Guarded by command_mutex_.
  std::vector<std::pair<SourceIndex, std::vector<SliceIndex>>> gains_;
  bool cancelled_ = false;  // guarded by command_mutex_
  BatchProgress snapshot_;  // guarded by command_mutex_
  bool finished_ = false;   // reported, and all paths closed; guarded by command_mutex_
  std::condition_variable finished_changed_;

  // Engine thread only.
  Scheduler scheduler_;
  std::vector<Route> routes_;      // by PathId
  std::vector<PathId> open_;       // routes that are not closed
  std::deque<SliceWork*> unsent_;  // the poller's ring was full
  std::uint64_t additions_ = 0;    // add_paths() calls taken
  std::vector<std::pair<SliceIndex, Verdict>> verdicts_taken_;
  TimePoint last_snapshot_{};
  bool reported_ = false;
};

}  // namespace rekindle::transport
