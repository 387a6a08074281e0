#include "recovery/coordinator/core/pull_table.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace rekindle::coordinator {

namespace {

constexpr Duration kForgetClosed = std::chrono::seconds(60);

// A puller that asks again may be late by this much.
constexpr Duration kLateness = std::chrono::seconds(2);

template <typename Key>
void give_back(std::map<Key, PlacesTaken>& places, const Key& key, const std::string& party) {
  const auto taken = places.find(key);
  if (taken == places.end()) return;
  const auto of_party = taken->second.find(party);
  if (of_party == taken->second.end()) return;
  if (--of_party->second == 0) taken->second.erase(of_party);
  if (taken->second.empty()) places.erase(taken);
}

}  // namespace

bool Pull::has_share_of(const Incarnation& source) const {
  return std::ranges::binary_search(sources, source);
}

Pull* PullTable::find(const PullId& id) {
  const auto found = pulls_.find(id);
  return found == pulls_.end() ? nullptr : &found->second;
}

Pull& PullTable::add(const PullId& id, Pull pull) {
  const auto [place, is_new] = pulls_.emplace(id, std::move(pull));
  if (is_new) ++by_version_[place->second.id][place->second.puller.party];
  return place->second;
}

Result<void> PullTable::close(const PullId& id, const Incarnation& puller, TimePoint now) {
  const auto found = pulls_.find(id);
  if (found != pulls_.end() && found->second.puller.incarnation != puller) {
    return fail(ErrorCode::kDenied, "the pull belongs to another puller");
  }
  if (closed_.size() < max_pulls_) closed_[id] = {now, puller};
  if (found != pulls_.end()) end(found);
  return {};
}

bool PullTable::was_closed_by(const PullId& id, const Incarnation& puller) const {
  const auto closed = closed_.find(id);
  return closed != closed_.end() && closed->second.by == puller;
}

PullTable::Place PullTable::end(Place pull) {
  keep_shares_of(pull->second, {});
  give_back(by_version_, pull->second.id, pull->second.puller.party);
  return pulls_.erase(pull);
}

template <typename Predicate>
void PullTable::end_where(const Predicate& over) {
  for (auto it = pulls_.begin(); it != pulls_.end();) {
    it = over(it->second) ? end(it) : std::next(it);
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
  ++shares_[source][pull.puller.party];
}

void PullTable::drop_share(Pull& pull, const Incarnation& source) {
  if (std::erase(pull.sources, source) > 0) give_back(shares_, source, pull.puller.party);
}

void PullTable::keep_shares_of(Pull& pull, std::span<const Incarnation> sources) {
  const std::vector<Incarnation> had = pull.sources;
  for (const Incarnation& source : had) {
    if (std::ranges::find(sources, source) == sources.end()) drop_share(pull, source);
  }
}

std::size_t PullTable::pullers_of(const Incarnation& source) const {
  const auto shares = shares_.find(source);
  std::size_t pullers = 0;
  if (shares == shares_.end()) return pullers;
  for (const auto& [party, count] : shares->second) pullers += count;
  return pullers;
}

std::size_t PullTable::shares_left(const Incarnation& source, std::size_t limit,
                                   const std::string& party) const {
  const auto shares = shares_.find(source);
  return shares == shares_.end() ? limit : places_left(limit, shares->second, party);
}

const PlacesTaken& PullTable::pulls_of(const ModelVersion& id) const {
  static const PlacesTaken kNone;
  const auto found = by_version_.find(id);
  return found == by_version_.end() ? kNone : found->second;
}

std::size_t PullTable::readers_of(const Incarnation& source, const ModelVersion& id) const {
  if (pullers_of(source) == 0) return 0;
  return static_cast<std::size_t>(std::ranges::count_if(pulls_, [&](const auto& entry) {
    return entry.second.id == id && entry.second.has_share_of(source);
  }));
}

PullQueue::Place PullQueue::place_of(const Pull& pull, const PlacesTaken& open) const {
  const auto pulls_of = [&](const std::string& party) {
    const auto found = open.find(party);
    return found == open.end() ? 0 : found->second;
  };
  const std::size_t own = pulls_of(pull.puller.party);
  Place place;
  bool seen = false;
  for (const Waiting& waiting : waiting_) {
    if (waiting.id != pull.id) continue;
    if (waiting.is(pull)) {
      seen = true;
      continue;
    }
    const std::size_t theirs = pulls_of(waiting.party);
    const bool is_ahead = theirs == own ? !seen : theirs < own;
    ++(is_ahead ? place.ahead : place.behind);
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
    waiting_.push_back({pull.puller.incarnation, pull.puller.party, pull.id, pull.shard, expires});
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
