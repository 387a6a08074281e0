#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "recovery/pull/path_opener.h"
#include "recovery/pull/proof_calls.h"
#include "recovery/pull/pull_environment.h"
#include "recovery/pull/pull_metrics.h"
#include "recovery/pull/pull_policy.h"
#include "recovery/pull/slice_source.h"
#include "recovery/pull/source_table.h"
#include "recovery/pull/swarm_follower.h"
#include "src/async/task.h"
#include "src/async/task_group.h"
#include "transport/engine.h"

namespace rekindle::pull {

// The cause of the loss of a source that sent wrong bytes twice.
std::string wrong_bytes_cause(const std::string& where);

// One run of one plan over the engine: connects the sources, feeds the batch, reconnects a lost
// source once, and ends when every slice is accepted, when some slice has no source left
// (kUnavailable: plan again with fresh sources), or on an error. When run() returns, none of its
// work is still running, including verifications. Control thread only, except the observer's calls.
class Transfer final : private transport::BatchObserver {
 public:
  struct Options {
    SliceWork work;
    std::shared_ptr<SourceTable> sources;
    // The order in which slices are wanted, and the order_seed behind it. Empty: as they are
    // numbered.
    std::vector<transport::SliceIndex> order = {};
    std::uint64_t order_seed = 0;
    // As in transport::BatchOptions.
    bool keeps_order = false;
    PathOpener::Options paths;
    // The span that it belongs to.
    trace::Context trace = {};
    // Called about every 200 ms.
    std::function<void(const transport::BatchProgress&)> tick;
  };

  Transfer(const PullEnvironment& environment, Silence& silence, Options options);
  ~Transfer() override;

  // A cancelled coroutine ends the batch, waits for its drain and returns kUnavailable
  // ("cancelled"); it must have been told not to throw (this_coro::throw_if_cancelled(false)).
  async::Task<Result<void>> run();

  // The slices, and the sources that may bring them.
  const std::shared_ptr<swarm::SliceCandidates>& candidates() const {
    return options_.work.candidates;
  }
  // While it runs: the last element of the table is new.
  void admit(transport::SourceIndex index);
  // Where the coordinator's news of sources that are being filled go.
  SwarmFollower& follower() { return follower_; }
  // After it has run: wrong bytes that several sources brought together.
  WrongBytes wrong_together() const { return slices_.verifier().wrong_bytes(std::nullopt); }

 private:
  // Reports of the engine that the control thread has not taken yet.
  struct SourceLost {
    transport::SourceIndex source = 0;
    Error cause;
  };
  using Event = std::variant<SourceLost, transport::Starvation>;

  void on_source_lost(transport::SourceIndex source, const Error& cause) override;
  void on_starved(const transport::Starvation& starvation) override;
  void on_finished(const Result<void>& outcome) override;
  void report(Event event);
  void wake();

  async::Task<Result<void>> run_batch();
  async::Task<Result<void>> drain_verifications();
  std::optional<Result<void>> take_events();
  void take(const transport::Starvation& starvation);
  void take(const SourceLost& loss);
  void take_progress();
  void keep_peers_alive();

  void start_connecting(transport::SourceIndex index);
  async::Task<void> connect(transport::SourceIndex index);
  void join_missing_rails();
  async::Task<void> join_rails(transport::SourceIndex index, PeerSession::Offer offer);
  void stop_connecting();
  void add_paths(transport::SourceIndex index, transport::Paths paths);
  void lose(transport::SourceIndex index, SourceState::Loss loss, const std::string& cause);

  const PullEnvironment& environment_;
  const Options options_;
  const std::shared_ptr<SourceTable> source_table_;
  SourceTable& sources_;  // *source_table_
  Silence& silence_;
  const std::shared_ptr<ProofCalls> proofs_;
  PlanSliceSource slices_;
  PathOpener opener_;
  SwarmFollower follower_;
  RailKeeper rails_;
  TransferPolicy policy_;
  MovedBytes moved_;
  std::unique_ptr<transport::Batch> batch_;
  const std::shared_ptr<async::Notifier> changed_;
  // Connects and joins. They refer to this object: run() ends after them.
  async::TaskGroup connects_;
  TimePoint last_keep_alive_{};
  TimePoint last_look_{};

  std::mutex mutex_;
  std::deque<Event> events_;              // guarded by mutex_
  std::optional<Result<void>> finished_;  // guarded by mutex_
};

}  // namespace rekindle::pull
