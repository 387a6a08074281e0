#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "src/base/clock.h"
#include "src/base/result.h"
#include "transport/engine.h"
#include "transport/schedule/batch_sources.h"
#include "transport/schedule/progress_watch.h"
#include "transport/schedule/reroute.h"
#include "transport/schedule/slice_picker.h"
#include "transport/schedule/slice_table.h"
#include "transport/schedule/verdict_gate.h"

// The engine's policy, without threads, sockets or a clock: events in, actions out. One per batch.
//
// Open slices are not assigned in advance. A source with room in its window takes the next open
// slice that it holds, so a fast source takes work from a slow one by itself. A slice never has two
// writers: it is open again only after its old path has drained.
//
// The Scheduler only routes between its parts:
//   SliceTable       the state of each slice
//   BatchSources     sources, paths, windows, losses
//   SlicePicker      the slice that a source is asked for
//   Reroutes         the next try of a failed slice
//   StagingGate      the slices that may be posted while staging memory is short
//   VerdictGate      the landed bytes that may wait for verification
//   ProgressWatch    deadlines
//   Stragglers       stealing from slow sources
//   StarvationWatch  slices without a source
namespace rekindle::transport {

class Scheduler {
 public:
  Scheduler(SliceIndex slice_count, SliceTable::InfoOf info_of, const BatchOptions& options,
            TimePoint now);
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  // --- events
  PathId add_path(SourceIndex source, std::string description, TimePoint now, std::string home = {},
                  std::string transport = {});
  void remove_source(SourceIndex source, const Error& cause);
  // All ops of a slice on this path have been reported: kOk, or the worst status. A local fault,
  // here or as a verdict, comes after fail_batch(). `why`: the cause that a broken path gave.
  void slice_done(PathId path, SliceIndex slice, OpStatus status, TimePoint now,
                  const std::string& why = {});
  // No op of this path is in flight and none will be: after an abort, or because it broke.
  void path_closed(PathId path, const std::string& why) { sources_.path_closed(path, why); }
  void path_progress(PathId path, std::uint64_t bytes_landed, TimePoint now);
  // A posted slice could not be expanded for want of staging memory: it is open again.
  void unpost(PathId path, SliceIndex slice, TimePoint now);
  void resolve(SliceIndex slice, Verdict verdict, TimePoint now);
  // A source that is being filled, and the slices that have it as a new candidate (see Batch).
  void add_neighbour(SourceIndex source, std::uint64_t order_seed);
  void candidates_added(SourceIndex source, std::span<const SliceIndex> slices, TimePoint now);
  void cancel() { fail_batch({ErrorCode::kUnavailable, "cancelled"}); }
  void fail_batch(Error error);
  void tick(TimePoint now);

  // --- actions; ask until there are none
  struct Post {
    SliceIndex slice = 0;
    SourceIndex source = 0;
    PathId path = 0;
  };
  std::optional<Post> next_post(TimePoint now);
  std::vector<PathId> take_aborts() { return sources_.take_aborts(); }
  std::vector<LostSource> take_lost() { return sources_.take_lost(); }
  // How many open slices lack a source: once when that begins, and again after each new path that
  // did not help.
  std::optional<std::uint64_t> take_starved();
  // Set once everything has drained.
  std::optional<Result<void>> outcome() const;

  BatchProgress progress() const;
  SourceIndex source_of(PathId path) const { return sources_.path(path).source(); }

 private:
  std::optional<Post> post_from(SourceIndex source, TimePoint now);
  void detach(PathId path, SliceIndex slice, TimePoint now);
  void reroute(SliceIndex slice, SourceIndex source, const Ruling& ruling,
               const std::string& cause);
  std::uint64_t all_landed_bytes() const { return slices_.landed_bytes() + slices_.done_bytes(); }
  bool verification_lags() const { return slices_.landed_bytes() > gate_.limit_bytes(); }
  void steal(TimePoint now);
  void check_starvation(TimePoint now);
  void forgive_pause(Duration pause);
  void finish(Result<void> outcome);

  const BatchOptions options_;
  SliceTable slices_;
  BatchSources sources_;
  Reroutes reroutes_;
  StagingGate staging_;
  SlicePicker picker_;
  VerdictGate gate_;
  ProgressWatch watch_;
  Stragglers stragglers_;
  StarvationWatch starvation_;
  SourceIndex next_source_ = 0;  // sources are asked in turn
  std::uint64_t stolen_ = 0;
  TimePoint last_tick_;
  std::optional<Result<void>> verdict_;  // outcome() once everything has drained
};

}  // namespace rekindle::transport
