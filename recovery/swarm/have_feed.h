#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "src/base/clock.h"
#include "src/tensor/tile.h"

// Decides when to tell neighbours and the coordinator of the tiles of a copy that is still being
// filled. Pure: no I/O, no clock.
namespace rekindle::swarm {

// The verified tiles of a copy, from this life of the process or an earlier one. Nobody writes to
// their bytes again, so they may be served. The set only grows. Thread-safe.
class HeldTiles {
 public:
  explicit HeldTiles(TileSet held) : tiles_(std::move(held)), count_(tiles_.count()) {}

  // Call it after the bytes are in place and verified.
  void set(TileIndex tile) {
    const std::lock_guard lock(mutex_);
    if (tiles_.test(tile)) return;
    tiles_.set(tile);
    count_.fetch_add(1, std::memory_order_release);
  }
  bool test(TileIndex tile) const {
    const std::lock_guard lock(mutex_);
    return tile < tiles_.size() && tiles_.test(tile);
  }
  bool test_range(TileIndex begin, TileIndex end) const {
    const std::lock_guard lock(mutex_);
    for (TileIndex tile = begin; tile < end; ++tile) {
      if (tile >= tiles_.size() || !tiles_.test(tile)) return false;
    }
    return true;
  }
  // Takes no lock. It shows whether anything is new.
  TileIndex count() const { return count_.load(std::memory_order_acquire); }
  TileSet snapshot() const {
    const std::lock_guard lock(mutex_);
    return tiles_;
  }

 private:
  mutable std::mutex mutex_;
  // Guarded by mutex_.
  TileSet tiles_;
  std::atomic<TileIndex> count_;
};

// Ascending, disjoint, half-open.
using TileRuns = std::vector<std::pair<TileIndex, TileIndex>>;

// The number of neighbours whose bitmaps one pull follows.
inline constexpr std::size_t kMaxNeighbours = 16;

// The updates for one neighbour: all tiles once, then the new ones, at most every 100 ms. A
// connection that is slower than its events drops some of them, so all tiles are repeated: every
// two seconds while there is news, else every ten.
class HaveFeed {
 public:
  struct Update {
    TileRuns held;
    // `held` is everything, not only the new tiles.
    bool all = false;
  };
  static constexpr Duration kInterval = std::chrono::milliseconds(100);
  static constexpr Duration kRepeatNews = std::chrono::seconds(2);
  static constexpr Duration kRepeatAll = std::chrono::seconds(10);

  // Nothing: no update is due. `held` never loses a tile from one call to the next.
  std::optional<Update> next(const TileSet& held, TimePoint now);

 private:
  std::optional<TileSet> sent_;
  TimePoint last_{};
  TimePoint last_all_{};
  bool news_since_all_ = false;
};

// Decides when to announce a growing copy to the coordinator: at most once a second, and only when
// enough has changed.
class AnnouncePolicy {
 public:
  static constexpr Duration kInterval = std::chrono::seconds(1);
  // A small change waits this long.
  static constexpr Duration kPatience = std::chrono::seconds(5);
  // A change of one tile in this many is announced at once.
  static constexpr TileIndex kShare = 32;

  // True when `held` of `total` tiles are to be announced now; then they count as announced.
  bool due(TileIndex held, TileIndex total, TimePoint now);

 private:
  TileIndex announced_ = 0;
  std::optional<TimePoint> last_;
};

// The longest of the runs, at most `limit`. A subset of the held tiles is true as well, and
// smaller.
TileRuns summarize(TileRuns runs, std::size_t limit);

}  // namespace rekindle::swarm
