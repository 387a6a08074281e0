#pragma once

#include <chrono>
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

// How long a task that may use only a share of one core must rest after it was busy. Timers take
// whole milliseconds, and reading a small tile takes microseconds: what is less is not forgotten
// but owed.
class CoreShare {
 public:
  explicit CoreShare(double share) : rest_per_busy_(1 / share - 1) {}
  // The whole milliseconds of rest that are due now. The caller rests for that long.
  std::chrono::milliseconds rest_after(Duration busy);

 private:
  const double rest_per_busy_;
  std::chrono::duration<double, std::milli> owed_{};
};

// Reads verified copies again in the background, to find bytes that have changed although nobody
// has written them. One copy at a time, the one that was read longest ago. Control thread; the
// digests run on the pool, never more than one at once. One core digests several GB/s: a share of
// it reads a smaller share of what the memory of a host can.
class Scrubber {
 public:
  Scrubber(boost::asio::any_io_executor executor, store::SegmentStore& store,
           CopyVerifier& verifier, WorkerPool& pool, ScrubOptions options);

  void start();
  async::Task<bool> close(std::chrono::milliseconds deadline);

 private:
  using Copy = std::shared_ptr<const store::StoredVersion>;
  async::Task<void> run();
  Copy most_due() const;
  async::Task<void> scrub(std::weak_ptr<const store::StoredVersion> copy);
  // How long the host was busy with it. Nothing: the copy is gone, has changed, or the tile is
  // wrong.
  async::Task<std::optional<Duration>> read(std::weak_ptr<const store::StoredVersion> copy,
                                            TileIndex tile);

  const boost::asio::any_io_executor executor_;
  store::SegmentStore& store_;
  CopyVerifier& verifier_;
  WorkerPool& pool_;
  const ScrubOptions options_;
  CoreShare share_;
  async::TaskGroup tasks_;
};

}  // namespace rekindle::worker
