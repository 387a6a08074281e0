#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>

#include <boost/asio/any_io_executor.hpp>

#include "recovery/rpc/rpc.h"
#include "recovery/worker/copy_verifier.h"
#include "src/async/task_group.h"
#include "src/base/worker_pool.h"
#include "src/store/segment_store.h"

namespace rekindle::worker {

struct ScrubOptions {
  std::chrono::milliseconds every{std::chrono::hours(24)};  // each copy; 0: never
  double core_share = 0.01;                                 // of one core; above 0, at most 1
};

// Since the agent started.
struct ScrubTotals {
  std::uint64_t right = 0;  // tiles
  std::uint64_t wrong = 0;
};

// Computes how long a task that may use a share of one core rests after it was busy. Timers take
// whole milliseconds, but reading a small tile takes microseconds. The remainder is owed to the
// next call.
class CoreShare {
 public:
  explicit CoreShare(double share) : rest_per_busy_(1 / share - 1) {}
  // Returns the whole milliseconds that are due now. The caller rests for that long.
  std::chrono::milliseconds rest_after(Duration busy);

 private:
  const double rest_per_busy_;
  std::chrono::duration<double, std::milli> owed_{};
};

// Reads verified copies again in the background, to find bytes that changed although nobody wrote
// them. It reads one copy at a time, beginning with the one that was read longest ago. Control
// thread; the digests run on the pool, one at a time. One core digests several GB/s, so a small
// share of it takes an even smaller share of the host's memory bandwidth.
class Scrubber {
 public:
  Scrubber(boost::asio::any_io_executor executor, store::SegmentStore& store,
           CopyVerifier& verifier, WorkerPool& pool, ScrubOptions options);

  void start();
  // As ScrubOptions::every, from the next look at the copies on.
  void set_interval(std::chrono::milliseconds every);
  async::Task<bool> close(std::chrono::milliseconds deadline);
  const ScrubTotals& totals() const { return totals_; }

 private:
  using Copy = std::shared_ptr<const store::StoredVersion>;
  async::Task<void> run();
  Copy most_due() const;
  async::Task<void> scrub(std::weak_ptr<const store::StoredVersion> copy);
  // Returns how long the host was busy, or nothing if the copy is gone or has changed, or the tile
  // is wrong.
  async::Task<std::optional<Duration>> read(std::weak_ptr<const store::StoredVersion> copy,
                                            TileIndex tile);

  const boost::asio::any_io_executor executor_;
  store::SegmentStore& store_;
  CopyVerifier& verifier_;
  WorkerPool& pool_;
  // ScrubOptions::every.
  std::chrono::milliseconds every_;
  CoreShare share_;
  ScrubTotals totals_;
  async::Notifier changed_;
  async::TaskGroup tasks_;
};

}  // namespace rekindle::worker
