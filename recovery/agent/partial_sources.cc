#include "recovery/agent/partial_sources.h"

#include <algorithm>
#include <utility>

#include <boost/asio/this_coro.hpp>

#include "src/async/offload.h"
#include "src/base/clock.h"
#include "src/base/log.h"

namespace rekindle::agent {

using async::Task;

namespace {

// Tiles verify on other threads, which cannot notify anybody here.
constexpr std::chrono::milliseconds kGrowthInterval{100};

}  // namespace

PartialSources::PartialSources(boost::asio::any_io_executor executor, AgentParts parts,
                               std::function<bool(const ModelVersion&)> is_leaving)
    : parts_(parts), is_leaving_(std::move(is_leaving)), announcing_(std::move(executor)) {}

void PartialSources::begin(const store::PendingVersion& pending,
                           std::shared_ptr<const swarm::HeldTiles> held, bool for_round) {
  const bool announces = !growing_.empty();
  growing_[key_of(pending.manifest())] = {};
  parts_.served.add_pending(pending, std::move(held), for_round);
  if (!announces) announcing_.spawn("copies.announce", announce_growth());
}

Task<void> PartialSources::abandon(CopyKey key) {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  growing_.erase(key);
  const auto regions = parts_.served.withdraw_pending(key);
  parts_.link.announce_soon();
  co_await parts_.readers.end_peers(key.id, key.layout);
  for (const auto& region : regions) parts_.registry.remove(region);
}

Task<void> PartialSources::announce_growth() {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  while (!growing_.empty() && !co_await async::is_cancelled()) {
    bool due = false;
    for (auto& [key, policy] : growing_) {
      const Served* served = parts_.served.find(key);
      if (served == nullptr || served->complete()) continue;
      const TileIndex total = served->checkpoint().tiles.tile_count();
      due = policy.due(served->held->count(), total, steady_now()) || due;
    }
    if (due) parts_.link.announce_soon();
    co_await async::sleep_for(kGrowthInterval);
  }
}

Task<Result<void>> PartialSources::commit(std::shared_ptr<const store::StoredVersion> stored,
                                          std::string_view how) {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  auto list_tiles = [stored] { return covers_of(stored->manifest); };
  auto covers = co_await async::offload(parts_.blocking_pool, std::move(list_tiles));
  if (!serve(stored, std::move(covers))) {
    // The copy was not announced. It goes with the version that is being retired.
    (void)co_await async::offload(parts_.blocking_pool,
                                  [&] { return parts_.store.retire_copy(*stored); });
    co_return fail(ErrorCode::kStale, "{} was retired while it was {}",
                   stored->manifest.checkpoint->id.to_string(), how);
  }
  co_await parts_.link.announce_now();
  co_return Result<void>();
}

bool PartialSources::serve(const std::shared_ptr<const store::StoredVersion>& stored,
                           std::shared_ptr<const swarm::TileRuns> covers) {
  const Manifest& manifest = stored->manifest;
  growing_.erase(key_of(manifest));
  const ModelVersion& id = manifest.checkpoint->id;
  if (is_leaving_(id) || parts_.store.find(id, manifest.layout.digest()) != stored) return false;
  parts_.served.add(stored, std::move(covers));
  return true;
}

bool PartialSources::is_being_filled(const ModelVersion& id) const {
  return std::ranges::any_of(growing_, [&](const auto& entry) { return entry.first.id == id; });
}

Task<void> PartialSources::close(std::chrono::milliseconds deadline) {
  (void)co_await announcing_.close(deadline);
}

}  // namespace rekindle::agent
