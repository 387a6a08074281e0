#include "recovery/worker/scrubber.h"

#include <algorithm>
#include <utility>
#include <vector>

#include <boost/asio/this_coro.hpp>

#include "src/async/offload.h"
#include "src/async/task.h"
#include "src/base/log.h"
#include "src/tensor/held_tile.h"

namespace rekindle::worker {

namespace {

constexpr std::chrono::milliseconds kShortestLook{100};
constexpr std::chrono::seconds kLongestLook{60};

std::vector<TileIndex> tiles_of(const store::StoredVersion& stored) {
  return tiles_of_layout(*stored.manifest.checkpoint, stored.manifest.layout).held.tiles();
}

struct OneTile {
  Result<void> verified;
  Duration busy{};
};

}  // namespace

std::chrono::milliseconds CoreShare::rest_after(Duration busy) {
  owed_ += busy * rest_per_busy_;
  const auto rest = std::chrono::duration_cast<std::chrono::milliseconds>(owed_);
  owed_ -= rest;
  return rest;
}

Scrubber::Scrubber(boost::asio::any_io_executor executor, store::SegmentStore& store,
                   CopyVerifier& verifier, WorkerPool& pool, ScrubOptions options)
    : executor_(std::move(executor)),
      store_(store),
      verifier_(verifier),
      pool_(pool),
      every_(options.every),
      share_(options.core_share),
      changed_(executor_),
      tasks_(executor_) {}

void Scrubber::start() { tasks_.spawn("copies.scrub", run()); }

void Scrubber::set_interval(std::chrono::milliseconds every) {
  every_ = every;
  changed_.notify();
}

async::Task<bool> Scrubber::close(std::chrono::milliseconds deadline) {
  return tasks_.close(deadline);
}

async::Task<void> Scrubber::run() {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  while (true) {
    const bool cancelled = co_await async::is_cancelled();
    if (cancelled) co_return;
    if (Copy copy = most_due()) {
      const std::weak_ptr<const store::StoredVersion> due = copy;
      copy.reset();
      co_await scrub(due);
    } else {
      const auto look =
          std::clamp<std::chrono::milliseconds>(every_ / 10, kShortestLook, kLongestLook);
      co_await changed_.wait_until(steady_now() + (every_.count() > 0 ? look : kLongestLook));
    }
  }
}

Scrubber::Copy Scrubber::most_due() const {
  if (every_.count() == 0) return nullptr;
  const TimePoint now = steady_now();
  Copy due;
  TimePoint oldest = now - every_;
  for (const Copy& copy : store_.versions()) {
    const auto record = copy->verification->record();
    if (!record || record->read > oldest) continue;
    oldest = record->read;
    due = copy;
  }
  return due;
}

async::Task<std::optional<Duration>> Scrubber::read(std::weak_ptr<const store::StoredVersion> copy,
                                                    TileIndex tile) {
  const TimePoint begin = steady_now();
  const Copy stored = copy.lock();
  // A copy that has changed meanwhile is verified as a whole, by the verifier.
  if (stored == nullptr || stored->verification->state() != store::CopyState::kVerified) {
    co_return std::nullopt;
  }
  // The stat calls on its files count, because for a small tile they take longer than its digest.
  // Waiting for the pool does not count.
  const Duration looked = steady_now() - begin;
  const auto work = [stored, tile, looked] {
    const TimePoint digesting = steady_now();
    auto verified = store::verify_stored_tile(*stored, tile);
    return OneTile{std::move(verified), looked + (steady_now() - digesting)};
  };
  const OneTile one = co_await async::offload(pool_, work);
  if (one.verified) {
    ++totals_.right;
    co_return one.busy;
  }
  ++totals_.wrong;
  log::error("copy.rotten", "version", stored->manifest.checkpoint->id.to_string(), "directory",
             stored->directory.string(), "error", one.verified.error().message());
  stored->verification->doubt();
  (void)verifier_.check(stored);  // finds the other wrong tiles, and has the copy repaired
  co_return std::nullopt;
}

// Keeps the copy alive only while it reads a tile, so that the memory of a retired copy is free
// soon.
async::Task<void> Scrubber::scrub(std::weak_ptr<const store::StoredVersion> copy) {
  std::vector<TileIndex> tiles;
  if (const Copy stored = copy.lock()) tiles = tiles_of(*stored);
  for (const TileIndex tile : tiles) {
    const bool cancelled = co_await async::is_cancelled();
    if (cancelled || every_.count() == 0) co_return;
    const auto busy = co_await read(copy, tile);
    if (!busy) co_return;
    const auto rest = share_.rest_after(*busy);
    if (rest.count() > 0) co_await async::sleep_for(rest);
  }
  if (const Copy stored = copy.lock()) {
    stored->verification->confirm();
    log::debug("copy.scrubbed", "version", stored->manifest.checkpoint->id.to_string(), "bytes",
               stored->manifest.layout.payload_bytes());
  }
}

}  // namespace rekindle::worker
