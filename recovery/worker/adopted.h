#pragma once

#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "recovery/pull/slice_source.h"
#include "recovery/rpc/notifier.h"
#include "recovery/rpc/rpc.h"
#include "recovery/rpc/task_group.h"
#include "recovery/worker/host.h"
#include "src/store/segment_store.h"

namespace rekindle::worker {

// A copy that this agent found in its store when it started. Nobody uses a tile of it before that
// tile has verified in this life.
struct AdoptedCopy {
  AdoptedCopy(std::shared_ptr<const store::StoredVersion> of,
              const boost::asio::any_io_executor& executor);
  const std::shared_ptr<const store::StoredVersion> stored;
  const std::shared_ptr<pull::VerifiedTiles> verified;
  bool running = false;
  bool done = false;
  std::optional<Error> bad;  // the first tile that does not verify
  rpc::Notifier changed;
};

// Verifies the copies of the last life, one after the other in the background, those that a worker
// waits for at once. Control thread; the digests run on the pools.
class AdoptedCopies {
 public:
  AdoptedCopies(Host& host, boost::asio::any_io_executor executor);
  void start();
  rpc::Task<bool> close(std::chrono::milliseconds deadline);
  // nullptr: made in this life, or verified. Starts its verification.
  std::shared_ptr<AdoptedCopy> find(const store::StoredVersion& stored);

 private:
  rpc::Task<void> verify_all();
  rpc::Task<void> verify(std::shared_ptr<AdoptedCopy> copy);

  Host& host_;
  const boost::asio::any_io_executor executor_;
  std::map<const store::StoredVersion*, std::shared_ptr<AdoptedCopy>> copies_;
  rpc::TaskGroup tasks_;
};

// Verifies tile by tile on the pool (blocking); the first bad tile ends it.
Result<void> verify_tiles(const store::StoredVersion& stored, WorkerPool& pool,
                          pull::VerifiedTiles& verified);

}  // namespace rekindle::worker
