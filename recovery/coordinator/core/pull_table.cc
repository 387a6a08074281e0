#include "recovery/coordinator/core/pull_table.h"

#include <algorithm>
#include <utility>

namespace rekindle::coordinator {

namespace {

constexpr Duration kForgetClosed = std::chrono::seconds(60);

// A puller that asks again may be late by this much.
constexpr Duration kLateness = std::chrono::seconds(2);

}  // namespace

bool Pull::has_share_of(const Incarnation& source) const {
  return std::ranges::binary_search(sources, source);
}

Pull* PullTable::find(const PullId& id) {
  const auto found = pulls_.find(id);
  return found == pulls_.end() ? nullptr : &found->second;
}

Pull& PullTable::add(const PullId& id, Pull pull) {
  return pulls_.emplace(id, std::move(pull)).first->second;
}

Result<void> PullTable::close(const PullId& id, const Incarnation& puller, TimePoint now) {
  const auto found = pulls_.find(id);
  if (found != pulls_.end() && found->second.puller.incarnation != puller) {
    return fail(ErrorCode::kDenied, "the pull belongs to another puller");
  }
  if (closed_.size() < max_pulls_) closed_[id] = {now, puller};
  if (found == pulls_.end()) return {};
  keep_shares_of(found->second, {});
  pulls_.erase(found);
  return {};
}

bool PullTable::was_closed_by(const PullId& id, const Incarnation& puller) const {
  const auto closed = closed_.find(id);
  return closed != closed_.end() && closed->second.by == puller;
}

template <typename Predicate>
void PullTable::end_where(const Predicate& over) {
  for (auto it = pulls_.begin(); it != pulls_.end();) {
    if (!over(it->second)) {
      ++it;
      continue;
    }
    keep_shares_of(it->second, {});
    it = pulls_.erase(it);
  }
}

void PullTable::drop_like(const Incarnation& puller, const ModelVersion& id,
                          const std::string& shard) {
  end_where([&](const Pull& pull) {
    return pull.puller.incarnation == puller && pull.id == id && pull.shard == shard;
  });
}

void PullTable::expire(TimePoint now) {
  std::erase_if(closed_, [&](const auto& entry) { return now - entry.second.at >= kForgetClosed; });
  end_where([&](const Pull& pull) { return now - pull.last_progress >= lease_; });
}

void PullTable::shift(Duration by) {
  for (auto& [id, pull] : pulls_) pull.last_progress += by;
}

void PullTable::take_share(Pull& pull, const Incarnation& source) {
  const auto place = std::ranges::lower_bound(pull.sources, source);
  if (place != pull.sources.end() && *place == source) return;
  pull.sources.insert(place, source);
  ++shares_[source];
}

void PullTable::drop_share(Pull& pull, const Incarnation& source) {
  if (std::erase(pull.sources, source) == 0) return;
  const auto share = shares_.find(source);
  if (share != shares_.end() && --share->second == 0) shares_.erase(share);
}

void PullTable::keep_shares_of(Pull& pull, std::span<const Incarnation> sources) {
  const std::vector<Incarnation> had = pull.sources;
  for (const Incarnation& source : had) {
    if (std::ranges::find(sources, source) == sources.end()) drop_share(pull, source);
  }
}

std::size_t PullTable::pullers_of(const Incarnation& source) const {
  const auto share = shares_.find(source);
  return share == shares_.end() ? 0 : share->second;
}

std::size_t PullTable::readers_of(const Incarnation& source, const ModelVersion& id) const {
  if (pullers_of(source) == 0) return 0;
  return static_cast<std::size_t>(std::ranges::count_if(pulls_, [&](const auto& entry) {
    return entry.second.id == id && entry.second.has_share_of(source);
  }));
}

PullQueue::Place PullQueue::place_of(const Pull& pull) const {
  Place place;
  bool seen = false;
  for (const Waiting& waiting : waiting_) {
    if (waiting.id != pull.id) continue;
    if (waiting.is(pull)) {
      seen = true;
    } else {
      ++(seen ? place.behind : place.ahead);
    }
  }
  return place;
}

void PullQueue::enter(const Pull& pull, Duration retry_after, TimePoint now) {
  const TimePoint expires = now + retry_after + kLateness;
  const auto found =
      std::ranges::find_if(waiting_, [&](const Waiting& waiting) { return waiting.is(pull); });
  if (found != waiting_.end()) {
    found->expires = expires;
  } else if (waiting_.size() < max_waiting_) {
    waiting_.push_back({pull.puller.incarnation, pull.id, pull.shard, expires});
  }
}

void PullQueue::leave(const Pull& pull) {
  std::erase_if(waiting_, [&](const Waiting& waiting) { return waiting.is(pull); });
}

void PullQueue::expire(TimePoint now) {
  std::erase_if(waiting_, [&](const Waiting& waiting) { return waiting.expires <= now; });
}

void PullQueue::shift(Duration by) {
  for (Waiting& waiting : waiting_) waiting.expires += by;
}

}  // namespace rekindle::coordinator
