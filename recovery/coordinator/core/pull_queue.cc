#include "recovery/coordinator/core/pull_queue.h"

#include <algorithm>

namespace rekindle::coordinator {

namespace {
// A puller that asks again may be late by this much.
constexpr Duration kLateness = std::chrono::seconds(2);
}  // namespace

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
