#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "src/base/clock.h"
#include "src/tensor/tile.h"

// What is said about tiles that a copy holds while it is still being filled: to a neighbour, and to
// the coordinator. Pure: no I/O, no clock.
namespace rekindle::swarm {

using TileRuns = std::vector<std::pair<TileIndex, TileIndex>>;  // ascending, disjoint, [begin, end)

inline constexpr std::size_t kMaxNeighbours = 16;  // whose bitmaps one pull follows

// What one neighbour is told: all of it once, then what is new, at most every 100 ms. A connection
// that is slower than its events drops some of them, so all of it comes again now and then: soon
// while there is news, rarely when there is none.
class HaveFeed {
 public:
  struct Update {
    TileRuns held;
    bool all = false;  // everything that is held, not only what is new
  };
  static constexpr Duration kInterval = std::chrono::milliseconds(100);
  static constexpr Duration kRepeatNews = std::chrono::seconds(2);
  static constexpr Duration kRepeatAll = std::chrono::seconds(10);

  // Nothing: there is nothing to say now. `held` never loses a tile from one call to the next.
  std::optional<Update> next(const TileSet& held, TimePoint now);

 private:
  std::optional<TileSet> told_;
  TimePoint last_{};
  TimePoint last_all_{};
  bool news_since_all_ = false;
};

// When the coordinator hears of it: at most once a second, and only when enough has changed.
class AnnouncePolicy {
 public:
  static constexpr Duration kInterval = std::chrono::seconds(1);
  static constexpr Duration kPatience = std::chrono::seconds(5);  // for a change that is small
  static constexpr TileIndex kShare = 32;                         // of all tiles: a change worth it

  // True when `held` of `total` tiles are to be announced now; then they count as announced.
  bool due(TileIndex held, TileIndex total, TimePoint now);

 private:
  TileIndex announced_ = 0;
  std::optional<TimePoint> last_;
};

// At most `limit` of the runs, the longest: a part of what is held is true, too, and small.
TileRuns summarize(TileRuns runs, std::size_t limit);

}  // namespace rekindle::swarm
