#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "src/base/clock.h"
#include "src/base/result.h"
#include "transport/path.h"
#include "transport/read_op.h"

// The transfer engine: reads a batch of slices from whichever sources hold them, over all their
// paths.
//
// A batch is described by a SliceSource (what to read, from where) and driven by one engine thread
// (the policy, transport/scheduler.h, which is pure) and a few poller threads (each owns some
// paths). A slice is 1–4 MiB and the unit of scheduling: it is posted on one path of one source,
// has one outstanding writer, and is posted again only after its old path has drained. Sources take
// the next slice that they hold when they have window left, so a fast source takes work from a slow
// one by itself; at the end, or when a path makes no progress by its deadline, the path is aborted,
// drained, and its slices go to another path, then to another source. Memory is O(in flight).
namespace rekindle::transport {

struct SliceInfo {
  std::uint64_t bytes = 0;
  SourceMask candidates;  // sources that hold all of it
  // Sources that are still being filled and may hold it later: Batch::candidates_added() says when.
  SourceMask prospects{};
  // Slices that share staging memory, from the first that is posted until all have landed.
  SliceIndex group_first = 0;
  SliceIndex group_size = 1;
  // The same for all pullers of these bytes, whatever their plans: they agree by it on who asks the
  // sources that hold everything (BatchOptions::salt).
  std::uint64_t key = 0;
};

enum class Verdict {
  kAccept,  // verified: done
  kRetry,   // bytes are wrong: fetch again, from another source when there is one
  // Nobody could say (the check itself failed): fetch again as after kRetry, but nobody is to
  // blame.
  kUndecided,
  // This side's own destination cannot be read or written: the batch ends with local_fault().
  kLocalFault,
};

// What a batch reads. Called on the engine thread only, except where it says otherwise.
class SliceSource {
 public:
  virtual ~SliceSource() = default;
  virtual SliceIndex slice_count() const = 0;
  virtual SliceInfo info(SliceIndex slice) const = 0;
  // Appends the reads of `slice` from `source` (wr_id is the engine's to set). kExhausted: no
  // staging memory now, asked again after another slice is resolved. Any other error fails the
  // batch.
  virtual Result<void> expand(SliceIndex slice, SourceIndex source, std::vector<ReadOp>& out) = 0;
  // Every byte has landed and nothing writes to it any more. Verify (elsewhere: do not block), then
  // call Batch::resolve(slice, …) from any thread.
  virtual void landed(SliceIndex slice, SourceIndex source) = 0;
  // Posted, failed and drained: the staging memory of this attempt is free.
  virtual void dropped(SliceIndex slice, SourceIndex source) = 0;
  // What is wrong with the destination, which could not be written: the batch ends with this error,
  // and no source is to blame.
  virtual Error local_fault(SliceIndex slice);
};

struct SourceStats {
  std::uint64_t bytes = 0;  // verified
  std::uint64_t slices = 0;
  std::uint64_t failures = 0;           // slices that failed or were rejected
  double goodput_bytes_per_second = 0;  // smoothed, while it had work
  std::size_t paths = 0;                // alive
  bool lost = false;
};

struct PathStats {
  std::string description;
  std::string home;    // of PollerHome: the NIC, ""
  bool alive = false;  // takes slices
  SourceIndex source = 0;
  std::uint64_t bytes = 0;
  std::uint64_t slices = 0;
  std::uint64_t failures = 0;
};

struct BatchProgress {
  std::uint64_t slices_done = 0;
  std::uint64_t bytes_done = 0;
  std::uint64_t bytes_in_flight = 0;
  std::uint64_t retried_slices = 0;
  std::uint64_t stolen_slices = 0;  // taken from a straggler after its path had drained
  TimePoint last_byte{};            // when one landed, from anybody; the epoch: none has
  std::vector<SourceStats> sources;
  std::vector<PathStats> paths;
};

struct Starvation {
  std::uint64_t open_slices = 0;  // that no living source holds
  // add_paths() calls that the batch knew of. Out of date when there have been more: it is told
  // again where they do not help.
  std::uint64_t additions = 0;
};

// Events, on the engine thread: hand them on, do not block.
class BatchObserver {
 public:
  virtual ~BatchObserver() = default;
  // Its last path is gone (or it was quarantined). The batch goes on with the others; add_paths()
  // with the same index brings it back. The cause names path, slice and reason. kUnavailable: it is
  // alive, only slow, and its last slices were taken from it; worth having back when on_starved
  // comes.
  virtual void on_source_lost(SourceIndex source, const Error& cause) = 0;
  // No living source holds some open slice: add one within starvation_timeout or the batch fails.
  virtual void on_starved(const Starvation& starvation) = 0;
  // Exactly once, after everything has drained. OK only when each slice was accepted.
  virtual void on_finished(const Result<void>& outcome) = 0;
};

struct BatchOptions {
  // No byte on a path with ops in flight; all paths of a source that sends nothing at all go at
  // once.
  std::chrono::milliseconds progress_timeout{1000};
  std::chrono::milliseconds starvation_timeout{5000};  // no source for an open slice
  // Nothing asked of a source: its paths are closed, and it is lost with kUnavailable.
  std::chrono::milliseconds idle_timeout{60000};
  std::uint64_t window_bytes = 32 << 20;          // in flight per source at most
  std::uint64_t window_bytes_per_nic = 16 << 20;  // or this for each NIC that leads to it
  int max_attempts = 8;                           // per slice; then the batch fails
  int strikes_to_quarantine = 2;                  // rejected slices of one source
  // A slice in flight at a slow source is stolen when another source is idle and would have fetched
  // it `steal_factor` times over in the time the slow one still needs.
  double steal_factor = 2.0;
  // Position in the slice order to begin at, modulo the count: pullers of the same thing begin at
  // different places, so that they can feed each other.
  SliceIndex first_slice = 0;
  // Instead of first_slice: every slice once, in the order in which they are wanted. Empty: as
  // numbered.
  std::vector<SliceIndex> order{};
  // This puller's name among its neighbours, see Batch::add_neighbour(): what several of them could
  // ask for is split by it.
  std::uint64_t salt = 0;
  // Nothing is in flight, and what is open is held by nobody yet: how long to wait for a source
  // that is being filled before that counts as having no source.
  std::chrono::milliseconds prospect_timeout{2000};
};

// A running batch; thread-safe. Destroying it cancels and waits for the drain.
class Batch {
 public:
  virtual ~Batch() = default;
  // New or returning source; paths are owned by the batch from here on.
  virtual void add_paths(SourceIndex source, std::vector<std::unique_ptr<Path>> paths) = 0;
  // Drains and forgets a source (dead, drained or revoked by the control plane).
  virtual void remove_source(SourceIndex source, Error cause) = 0;
  virtual void resolve(SliceIndex slice, Verdict verdict) = 0;
  // Before its paths are added: this source is being filled, by the puller with this salt. What it
  // has is taken from it first, rarest first; others are asked for what such sources lack.
  virtual void add_neighbour(SourceIndex source, std::uint64_t salt) = 0;
  // SliceSource::info() has gained this neighbour as a candidate for these slices.
  virtual void candidates_added(SourceIndex source, std::vector<SliceIndex> slices) = 0;
  // Asks for the end; on_finished(kUnavailable "cancelled") comes after the drain.
  virtual void cancel() = 0;
  virtual BatchProgress progress() const = 0;
};

struct EngineOptions {
  std::size_t poller_threads = 0;  // 0: as many as cores, at most 8
};

// Owns the pollers and the engine thread; several batches may run at once. Thread-safe.
class Engine {
 public:
  virtual ~Engine() = default;
  static std::unique_ptr<Engine> create(const EngineOptions& options);
  // `source` and `observer` outlive the Batch.
  virtual std::unique_ptr<Batch> start(SliceSource& source, BatchObserver& observer,
                                       const BatchOptions& options) = 0;
};

}  // namespace rekindle::transport
