#include "recovery/worker/adopted.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <utility>

#include <boost/asio/this_coro.hpp>

#include "recovery/pull/offload.h"
#include "src/base/log.h"
#include "src/store/fault_guard.h"
#include "src/tensor/held_tile.h"

namespace rekindle::worker {

namespace {

constexpr std::size_t kTilesPerJob = 64;

Result<void> verify_guarded(const store::StoredVersion& stored, TileIndex tile,
                            const ArrayOf& array_of) {
  Result<void> verdict;
  auto guarded = store::guard_mapping_access(
      "a segment", [&] { verdict = verify_tile(stored.manifest, tile, array_of); });
  if (!guarded) return guarded;
  return verdict;
}

}  // namespace

AdoptedCopy::AdoptedCopy(std::shared_ptr<const store::StoredVersion> of,
                         const boost::asio::any_io_executor& executor)
    : stored(std::move(of)),
      verified(std::make_shared<pull::VerifiedTiles>(
          TileSet(stored->manifest.checkpoint->tiles.tile_count()))),
      changed(executor) {}

Result<void> verify_tiles(const store::StoredVersion& stored, WorkerPool& pool,
                          pull::VerifiedTiles& verified) {
  const auto held = tiles_of_layout(*stored.manifest.checkpoint, stored.manifest.layout).held;
  std::vector<TileIndex> tiles;
  for (const auto& [begin, end] : held.ranges()) {
    for (TileIndex tile = begin; tile < end; ++tile) tiles.push_back(tile);
  }
  const ArrayOf array_of = [&stored](const LayoutEntry& entry) { return stored.array(entry); };
  std::mutex mutex;
  Result<void> verdict;  // guarded by mutex
  std::atomic<bool> stop = false;
  pool.parallel_for((tiles.size() + kTilesPerJob - 1) / kTilesPerJob, [&](std::size_t job) {
    const std::size_t end = std::min(tiles.size(), (job + 1) * kTilesPerJob);
    for (std::size_t i = job * kTilesPerJob; i < end && !stop; ++i) {
      auto good = verify_guarded(stored, tiles[i], array_of);
      if (good) {
        verified.set(tiles[i]);
        continue;
      }
      const std::lock_guard lock(mutex);
      if (verdict) verdict = std::move(good);
      stop = true;
    }
  });
  return verdict;
}

AdoptedCopies::AdoptedCopies(Host& host, boost::asio::any_io_executor executor)
    : host_(host), executor_(std::move(executor)), tasks_(executor_) {
  for (const auto& stored : host_.store().versions()) {
    copies_[stored.get()] = std::make_shared<AdoptedCopy>(stored, executor_);
  }
}

void AdoptedCopies::start() {
  if (!copies_.empty()) tasks_.spawn("worker.adopt", verify_all());
}

rpc::Task<bool> AdoptedCopies::close(std::chrono::milliseconds deadline) {
  return tasks_.close(deadline);
}

rpc::Task<void> AdoptedCopies::verify_all() {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  std::vector<std::shared_ptr<AdoptedCopy>> all;
  for (const auto& [stored, copy] : copies_) all.push_back(copy);
  for (const auto& copy : all) {
    const auto state = co_await boost::asio::this_coro::cancellation_state;
    if (state.cancelled() != boost::asio::cancellation_type::none) co_return;
    if (!copy->running && !copy->done) co_await verify(copy);
  }
}

std::shared_ptr<AdoptedCopy> AdoptedCopies::find(const store::StoredVersion& stored) {
  const auto found = copies_.find(&stored);
  if (found == copies_.end()) return nullptr;
  if (!found->second->running && !found->second->done) {
    tasks_.spawn("worker.verify", verify(found->second));
  }
  return found->second;
}

rpc::Task<void> AdoptedCopies::verify(std::shared_ptr<AdoptedCopy> copy) {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  copy->running = true;
  const auto work = [this, copy] {  // holds the copy for as long as it runs
    return verify_tiles(*copy->stored, host_.digest_pool(), *copy->verified);
  };
  auto verdict = co_await pull::offload(host_.blocking_pool(), work);
  copy->running = false;
  copy->done = true;
  const ModelVersion id = copy->stored->manifest.checkpoint->id;
  if (!verdict) {
    copy->bad = std::move(verdict).error();
    log::error("worker.adopted_copy_is_wrong", "version", id.to_string(), "error",
               copy->bad->message(), "action", "it is let go; workers get the version anew");
  } else {
    log::info("worker.adopted", "version", id.to_string(), "bytes",
              copy->stored->manifest.layout.payload_bytes());
  }
  copy->changed.notify();
  if (copy->bad) co_await host_.drop(copy->stored);
  // A bad one is known as such for as long as the store lists it.
  const auto listed = host_.store().find(id);
  if (!copy->bad || std::ranges::find(listed, copy->stored) == listed.end()) {
    copies_.erase(copy->stored.get());
  }
}

}  // namespace rekindle::worker
