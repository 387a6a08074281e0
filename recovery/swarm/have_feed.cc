#include "recovery/swarm/have_feed.h"

#include <algorithm>

namespace rekindle::swarm {

namespace {

// The tiles of `held` that are not in `told`.
TileSet news_of(const TileSet& held, const TileSet& told) {
  TileSet news = held;
  const auto words = news.words();
  const auto known = told.words();
  for (std::size_t i = 0; i < words.size(); ++i) words[i] &= ~known[i];
  return news;
}

}  // namespace

std::optional<HaveFeed::Update> HaveFeed::next(const TileSet& held, TimePoint now) {
  if (sent_ && now - last_ < kInterval) return std::nullopt;
  const bool first = !sent_;
  const TileSet news = first ? held : news_of(held, *sent_);
  const bool has_news = first || news.count() > 0;
  const Duration since_all = now - last_all_;
  const bool repeat = !first && (since_all >= kRepeatAll ||
                                 ((news_since_all_ || has_news) && since_all >= kRepeatNews));
  if (!has_news && !repeat) return std::nullopt;
  sent_ = held;
  last_ = now;
  if (first || repeat) {
    last_all_ = now;
    news_since_all_ = false;
    return Update{held.ranges(), true};
  }
  news_since_all_ = true;
  return Update{news.ranges(), false};
}

bool AnnouncePolicy::due(TileIndex held, TileIndex total, TimePoint now) {
  if (held <= announced_) return false;
  const bool first = !last_;
  if (!first) {
    if (now - *last_ < kInterval) return false;
    const TileIndex enough = std::max<TileIndex>(1, total / kShare);
    if (held - announced_ < enough && now - *last_ < kPatience) return false;
  }
  announced_ = held;
  last_ = now;
  return true;
}

TileRuns summarize(TileRuns runs, std::size_t limit) {
  if (runs.size() <= limit) return runs;
  const auto longer = [](const auto& a, const auto& b) {
    const auto length_a = a.second - a.first;
    const auto length_b = b.second - b.first;
    return length_a != length_b ? length_a > length_b : a.first < b.first;
  };
  std::nth_element(runs.begin(), runs.begin() + static_cast<std::ptrdiff_t>(limit), runs.end(),
                   longer);
  runs.resize(limit);
  std::sort(runs.begin(), runs.end());
  return runs;
}

}  // namespace rekindle::swarm
