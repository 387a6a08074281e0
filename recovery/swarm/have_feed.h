#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "src/base/clock.h"
#include "src/tensor/tile.h"

// Decides when to tell neighbours and the coordinator of the tiles of a copy that is still being
// filled. Pure: no I/O, no clock.
namespace rekindle::swarm {

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

// The longest of the runs, at most `limit`. A part of the truth is true, and small.
TileRuns summarize(TileRuns runs, std::size_t limit);

}  // namespace rekindle::swarm
