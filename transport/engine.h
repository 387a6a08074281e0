#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "src/base/clock.h"
#include "src/base/numa_nodes.h"
#include "src/base/result.h"
#include "transport/path.h"
#include "transport/read_op.h"

// The transfer engine: reads a batch of slices from whichever sources hold them, over all their
// paths.
//
// A batch is described by a SliceSource (what to read, from where) and driven by one engine thread
// (the policy, transport/schedule/scheduler.h, which is pure) and a few poller threads (each owns
// some paths). A slice is 1–4 MiB and the unit of scheduling: it is posted on one path of one
// source, has one outstanding writer, and is posted again only after its old path has drained.
// Sources take the next slice that they hold when they have window left, so a fast source takes
// work from a slow one by itself; at the end, or when a path makes no progress by its deadline, the
// path is aborted, drained, and its slices go to another path, then to another source. Memory is
// O(in flight).
namespace rekindle::transport {

struct SliceInfo {
  std::uint64_t bytes = 0;
  // The sources that hold the whole slice.
  SourceMask candidates;
  // Sources that are still being filled and may hold the slice later. Batch::candidates_added()
  // tells when they do.
  SourceMask prospects{};
  // The slices that share staging memory, from the first posting until all have landed.
  SliceIndex group_first = 0;
  SliceIndex group_size = 1;
  // The same number for all pullers of these bytes, whatever their plans. It and
  // BatchOptions::order_seed decide which puller asks the sources that hold everything.
  std::uint64_t key = 0;
};

enum class Verdict {
  // The bytes are verified: the slice is done.
  kAccept,
  // The bytes are wrong: they are fetched again, from another source if there is one.
  kRetry,
  // The check itself failed. The slice is fetched again as after kRetry, but no source is to blame.
  kUndecided,
  // This side cannot read or write its own destination: the batch ends with local_fault().
  kLocalFault,
};

// The slices of a batch. The engine thread calls all methods.
class SliceSource {
 public:
  virtual ~SliceSource() = default;
  virtual SliceIndex slice_count() const = 0;
  virtual SliceInfo info(SliceIndex slice) const = 0;
  // Appends the reads of `slice` from `source`; the engine sets their wr_id. kExhausted: there is
  // no staging memory now, and the engine asks again after another slice was resolved. Any other
  // error fails the batch.
  virtual Result<void> expand(SliceIndex slice, SourceIndex source, std::vector<ReadOp>& out) = 0;
  // Every byte has landed, and nothing writes to the slice any more. Verify it on another thread,
  // as this call must not block, then call Batch::resolve() from any thread.
  virtual void landed(SliceIndex slice, SourceIndex source) = 0;
  // The slice was posted, has failed and has drained: the staging memory of this attempt is free.
  virtual void dropped(SliceIndex slice, SourceIndex source) = 0;
  // The error with which the batch ends when the destination cannot be written. No source is to
  // blame.
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
  std::string transport;
  std::string home;    // of PollerHome: the NIC, ""
  bool alive = false;  // takes slices
  SourceIndex source = 0;
  std::uint64_t bytes = 0;
  std::uint64_t slices = 0;
  std::uint64_t failures = 0;
};

// What all paths of one transport over one NIC of this host have done, from whichever sources.
struct RailStats {
  std::string transport;
  std::string home;  // of PollerHome: the NIC, ""
  std::uint64_t bytes = 0;
  // While at least one slice was in flight here.
  Duration busy{0};
};

struct BatchProgress {
  std::uint64_t slices_done = 0;
  std::uint64_t bytes_done = 0;
  std::uint64_t bytes_in_flight = 0;
  std::uint64_t retried_slices = 0;
  std::uint64_t stolen_slices = 0;  // taken from a straggler after its path had drained
  // When the last byte landed, from any source. The epoch: none has.
  TimePoint last_byte{};
  std::vector<SourceStats> sources;
  std::vector<PathStats> paths;
  // In the order in which their first paths came.
  std::vector<RailStats> rails;
};

struct Starvation {
  // Open slices that no living source holds.
  std::uint64_t open_slices = 0;
  // How many add_paths() calls the batch knew of. After further calls this event is out of date: it
  // comes again if they do not help.
  std::uint64_t additions = 0;
};

// The events of a batch. They come on the engine thread: hand them on, and do not block.
class BatchObserver {
 public:
  virtual ~BatchObserver() = default;
  // The source has lost its last path, or was quarantined. The batch continues with the others, and
  // add_paths() with the same index brings the source back. The cause names path, slice and reason.
  // kUnavailable: the source is alive but slow, and its last slices were taken from it. It is worth
  // reconnecting when on_starved() comes.
  virtual void on_source_lost(SourceIndex source, const Error& cause) = 0;
  // No living source holds some open slice. The batch fails unless one is added within
  // starvation_timeout.
  virtual void on_starved(const Starvation& starvation) = 0;
  // Comes exactly once, after everything has drained. OK: each slice was accepted.
  virtual void on_finished(const Result<void>& outcome) = 0;
};

struct BatchOptions {
  // A path with ops in flight is cut after this time without a byte. A source that sends nothing at
  // all loses all its paths at once.
  std::chrono::milliseconds progress_timeout{1000};
  // How long an open slice may be without a source.
  std::chrono::milliseconds starvation_timeout{5000};
  // A source that was asked for nothing for this time loses its paths, with kUnavailable.
  std::chrono::milliseconds idle_timeout{60000};
  // The most bytes in flight per source; where NICs lead to it, this much for each if that is more.
  std::uint64_t window_bytes = 32 << 20;
  std::uint64_t window_bytes_per_nic = 16 << 20;
  // The batch fails when a slice has failed this often.
  int max_attempts = 8;
  // A source is quarantined after this many rejected slices.
  int strikes_to_quarantine = 2;
  // A slice in flight at a slow source is stolen when another source is idle and would have fetched
  // it `steal_factor` times over in the time the slow one still needs.
  double steal_factor = 2.0;
  // The position in the slice order to begin at, modulo the count. Pullers of the same data begin
  // at different positions, so that they can feed each other.
  SliceIndex first_slice = 0;
  // Every slice once, in the order in which they are wanted. Empty: as numbered, from first_slice.
  std::vector<SliceIndex> order{};
  // Spreads the slices over this puller and its neighbours (see Batch::add_neighbour()): pullers
  // with different seeds ask for different slices first.
  std::uint64_t order_seed = 0;
  // The order holds although sources are being filled: nothing is left for later because they want
  // it, too.
  bool keeps_order = false;
  // The NUMA node that all of the destination lies on. -1: several, or unknown.
  int numa_node = -1;
  // While nothing is in flight and nobody holds the open slices, the batch waits this long for the
  // sources that are being filled. Then it fails.
  std::chrono::milliseconds prospect_timeout{2000};
};

// A running batch. Thread-safe. Destroying it cancels it and waits until it has drained.
class Batch {
 public:
  virtual ~Batch() = default;
  // Adds paths of a new or returning source. The batch owns them from here on.
  virtual void add_paths(SourceIndex source, std::vector<std::unique_ptr<Path>> paths) = 0;
  // Drains and forgets a source. The control plane has found it dead, drained or revoked it.
  virtual void remove_source(SourceIndex source, Error cause) = 0;
  virtual void resolve(SliceIndex slice, Verdict verdict) = 0;
  // A puller with this order seed is filling this source. Call it before adding its paths. The
  // batch takes the slices that the source holds from it first, the rarest first. It asks other
  // sources for the slices that such sources lack.
  virtual void add_neighbour(SourceIndex source, std::uint64_t order_seed) = 0;
  // SliceSource::info() has gained this neighbour as a candidate for these slices.
  virtual void candidates_added(SourceIndex source, std::vector<SliceIndex> slices) = 0;
  // Asks for the end. on_finished(kUnavailable "cancelled") comes after the drain.
  virtual void cancel() = 0;
  virtual BatchProgress progress() const = 0;
};

struct EngineOptions {
  std::size_t poller_threads = 0;  // 0: as many as cores, at most 8
  // Of this host. If several have CPUs that this process may use, a batch with a node gets pollers
  // on them.
  std::vector<NumaNode> nodes{};
};

// Owns the pollers and the engine thread. Several batches may run at once. Thread-safe.
class Engine {
 public:
  virtual ~Engine() = default;
  static std::unique_ptr<Engine> create(const EngineOptions& options);
  // `source` and `observer` outlive the Batch.
  virtual std::unique_ptr<Batch> start(SliceSource& source, BatchObserver& observer,
                                       const BatchOptions& options) = 0;
};

}  // namespace rekindle::transport
