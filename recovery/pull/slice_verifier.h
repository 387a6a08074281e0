#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "recovery/planner/slice_plan.h"
#include "recovery/pull/tile_verifier.h"
#include "recovery/swarm/availability.h"
#include "src/base/units.h"

namespace rekindle::pull {

// Memory for staged slices: a bounded set of equal buffers. The slices of a group share one buffer,
// which holds the bytes of some slices while others are still to come. Thread-safe.
class SliceStaging {
 public:
  explicit SliceStaging(const planner::Plan& plan) : plan_(plan) {}

  // For one more slice that is read. kExhausted: all buffers are in use, try again after a leave().
  Result<std::byte*> take(transport::SliceIndex slice, std::uint64_t bytes);
  // The slice was copied out, or is abandoned. A slice without staging is ignored.
  void leave(transport::SliceIndex slice);
  // Null: the slice has none.
  std::byte* buffer_of(transport::SliceIndex slice) const;

 private:
  // The tiles of a slice, and the rounding between them.
  static constexpr std::size_t kBufferBytes = 8 * kMiB;
  static constexpr std::size_t kMaxBuffers = 8;

  struct Staged {
    std::byte* buffer = nullptr;
    // Slices that are read into the buffer, or lie in it.
    std::uint32_t slices = 0;
  };
  // The caller holds mutex_.
  std::byte* acquire();

  const planner::Plan& plan_;
  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<std::byte[]>> buffers_;  // guarded by mutex_
  std::vector<std::byte*> free_;                       // guarded by mutex_
  // By the first slice of the group; guarded by mutex_.
  std::unordered_map<transport::SliceIndex, Staged> staged_;
};

// Bytes of one pull, for progress and the summary. Thread-safe.
struct PullCounters {
  std::atomic<std::uint64_t> verified_bytes = 0;  // of the plan, accepted
  std::atomic<std::uint64_t> landed_bytes = 0;    // over the wire, accepted or not
  std::atomic<std::uint64_t> rejected_bytes = 0;  // landed, and did not verify
  std::atomic<std::uint64_t> corrupt_tiles = 0;
};

// Slices that landed and did not verify.
struct WrongBytes {
  std::uint32_t slices = 0;
  // A wrong tile of the last one: TENSOR[BOX].
  std::string where;
};

// Asks a source for proofs of parts of tiles. Calls `done` from any thread, with one proof per item
// or an error; kCorrupt says that the source's own copy is bad.
using RangeProofs = Result<std::vector<std::string>>;
using RangeProver =
    std::function<void(transport::SourceIndex source, std::vector<planner::TileWork> items,
                       std::function<void(RangeProofs)> done)>;

// The batch that runs, for work that may outlive it. Thread-safe.
class BatchLink {
 public:
  // Null, before the batch is destroyed: from then on nobody reaches it.
  void bind(transport::Batch* batch) {
    const std::lock_guard lock(mutex_);
    batch_ = batch;
  }
  template <typename Function>
  void tell(Function function) {
    const std::lock_guard lock(mutex_);
    if (batch_ != nullptr) function(*batch_);
  }

 private:
  std::mutex mutex_;
  transport::Batch* batch_ = nullptr;  // guarded by mutex_
};

// Decides about slices that have landed, on the digest pool: it verifies and marks their tiles and
// tells the batch its verdict. Slices of a group, whose tiles are complete only together, are
// accepted as they land and verified with the last of them.
//
// Always in a shared_ptr: verifications that outlive a cancelled batch keep it alive, and with it
// the copy whose pages they read.
class SliceVerifier : public std::enable_shared_from_this<SliceVerifier> {
 public:
  struct Options {
    WorkerPool& digest_pool;
    RangeProver prover;
    std::shared_ptr<PullCounters> counters;
  };
  SliceVerifier(std::shared_ptr<const swarm::SliceCandidates> candidates,
                std::shared_ptr<SliceStaging> staging, std::shared_ptr<BatchLink> batch,
                TileVerifier tiles, Options options);

  // `numa_node`: where the bytes lie; -1: unknown.
  void landed(transport::SliceIndex slice, transport::SourceIndex source, int numa_node);
  // A slice that landed has no verdict yet. Once the batch has ended and this is false, nothing
  // here touches the copy, the plan or the sources any more.
  bool busy() const { return under_way_.load(std::memory_order_acquire) > 0; }
  // Calls once as soon as it is not busy: at once, or later from any thread.
  void when_idle(std::function<void()> call);
  // The wrong bytes of this source. nullopt: wrong bytes of tiles that several sources sent
  // together, so that nobody can tell which of them is to blame.
  WrongBytes wrong_bytes(std::optional<transport::SourceIndex> source) const;

 private:
  struct Group {
    std::uint32_t landed = 0;
    // It was complete and did not verify: the next plan reads it again.
    bool spoiled = false;
  };
  struct ProofQuest;

  // Runs on the digest pool, or here where its queue is full: that only slows the caller down.
  void submit(std::function<void()> job, int numa_node = -1);
  void verify(transport::SliceIndex slice, transport::SourceIndex source);
  transport::Verdict verify_tiles(transport::SliceIndex slice, transport::SourceIndex source,
                                  std::optional<transport::SourceIndex> sender);
  void verify_group(transport::SliceIndex slice);
  transport::Verdict complete_group(transport::SliceIndex first, transport::SliceIndex last,
                                    std::optional<transport::SourceIndex> sender);
  void verify_range(transport::SliceIndex slice, transport::SourceIndex source);
  void ask_for_proofs(std::shared_ptr<ProofQuest> quest, transport::SourceIndex from);
  void judge(const std::shared_ptr<ProofQuest>& quest, transport::SourceIndex from,
             const RangeProofs& proofs);
  void mark_parts(const std::vector<planner::TileWork>& works);
  void note_wrong(const planner::TileWork& work, std::optional<transport::SourceIndex> sender);
  void finish(transport::SliceIndex slice, transport::Verdict verdict);

  const std::shared_ptr<const swarm::SliceCandidates> candidates_;
  const planner::Plan& plan_;
  const std::shared_ptr<SliceStaging> staging_;
  const std::shared_ptr<BatchLink> batch_;
  const TileVerifier tiles_;
  const Options options_;

  std::atomic<std::uint64_t> under_way_ = 0;
  mutable std::mutex mutex_;
  std::unordered_map<transport::SliceIndex, Group> groups_;  // by first slice, guarded by mutex_
  std::unordered_map<TileIndex, std::uint32_t> parts_open_;  // guarded by mutex_
  std::map<std::optional<transport::SourceIndex>, WrongBytes> wrong_;  // guarded by mutex_
  std::function<void()> on_idle_;                                      // guarded by mutex_
};

}  // namespace rekindle::pull
