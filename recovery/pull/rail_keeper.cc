#include "recovery/pull/rail_keeper.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace rekindle::pull {

using transport::SourceIndex;

namespace {

constexpr Duration kFirstJoinPause = std::chrono::seconds(1);
constexpr Duration kLongestJoinPause = std::chrono::seconds(16);

}  // namespace

std::vector<RailKeeper::LostRail> RailKeeper::update(const transport::BatchProgress& progress) {
  std::map<SourceIndex, std::set<std::string>> alive;
  for (const auto& path : progress.paths) {
    if (path.alive && !path.home.empty()) alive[path.source].insert(path.home);
  }
  std::vector<LostRail> lost;
  for (auto& [source, rails] : rails_) {
    const auto now = alive.find(source);
    if (now != alive.end()) {
      for (const std::string& rail : rails.alive) {
        if (!now->second.contains(rail)) lost.push_back({source, rail});
      }
    }
    rails.alive.clear();
  }
  for (auto& [source, homes] : alive) rails_[source].alive = std::move(homes);
  return lost;
}

std::vector<std::string> RailKeeper::alive(SourceIndex source) const {
  const auto found = rails_.find(source);
  if (found == rails_.end()) return {};
  return {found->second.alive.begin(), found->second.alive.end()};
}

bool RailKeeper::begin_join(SourceIndex source, TimePoint now) {
  Rails& rails = rails_[source];
  if (rails.joining) return false;
  if (rails.next_join == TimePoint{}) {
    rails.pause = kFirstJoinPause;
    rails.next_join = now + rails.pause;
  }
  if (now < rails.next_join) return false;
  return rails.joining = true;
}

void RailKeeper::end_join(SourceIndex source, Join outcome, TimePoint now) {
  Rails& rails = rails_[source];
  rails.joining = false;
  if (outcome == Join::kJoined) rails.pause = kFirstJoinPause;
  if (outcome == Join::kFailed) rails.pause = std::min(rails.pause * 2, kLongestJoinPause);
  rails.next_join = now + rails.pause;
}

bool RailKeeper::joining(SourceIndex source) const {
  const auto found = rails_.find(source);
  return found != rails_.end() && found->second.joining;
}

}  // namespace rekindle::pull
