#include "recovery/coordinator/core/candidacy.h"

#include <algorithm>
#include <utility>

namespace rekindle::coordinator {

namespace {

constexpr BootTime kBetweenTries{300};
// After a failed term, so that another coordinator may lead.
constexpr BootTime kAfterFailedTerm{1000};
constexpr BootTime kShortestRequest{50};
constexpr BootTime kLongestRequest{1000};

}  // namespace

LeaderLease::State LeaderLease::advance(BootTime now) {
  if (state_ == State::kOver || now < until_) return state_;
  why_over_ = check(now).error().message();
  return state_ = State::kOver;
}

LeaderLease::State LeaderLease::answered(BootTime asked_at, const Result<bool>& renewed,
                                         BootTime now) {
  if (state_ == State::kOver) return state_;
  if (!renewed) {
    state_ = State::kAway;
    return advance(now);
  }
  if (!*renewed) {
    why_over_ = "the lease in etcd has run out";
    return state_ = State::kOver;
  }
  until_ = std::max(until_, asked_at + ttl_);
  state_ = State::kHeld;
  return advance(now);
}

BootTime LeaderLease::next_request_in(BootTime now) const {
  const BootTime interval = state_ == State::kAway ? kBetweenTries : ttl_ / 3;
  return std::clamp(until_ - now, BootTime::zero(), interval);
}

BootTime LeaderLease::request_limit(BootTime now) const {
  return std::clamp(until_ - now, kShortestRequest, kLongestRequest);
}

Result<void> LeaderLease::check(BootTime now) const {
  if (now < until_) return {};
  return fail(ErrorCode::kUnavailable,
              "this coordinator has not reached etcd for {} s and cannot know that it still "
              "leads; retry, or ask the others",
              std::chrono::duration_cast<std::chrono::seconds>(ttl_).count());
}

void Candidacy::stand_by(BootTime pause) {
  state_ = stopping_ ? State::kOver : State::kStandingBy;
  pause_ = stopping_ ? BootTime::zero() : pause;
}

void Candidacy::stop() {
  stopping_ = true;
  if (state_ == State::kStandingBy) state_ = State::kOver;
}

std::optional<std::string> Candidacy::campaigned(const Result<void>& won) {
  if (won) {
    state_ = State::kConfirming;
    pause_ = BootTime::zero();
    last_loss_.clear();
    return std::nullopt;
  }
  stand_by(kBetweenTries);
  const std::string& why = won.error().message();
  if (std::exchange(last_loss_, why) == why) return std::nullopt;
  return why;
}

void Candidacy::confirmed(const Result<bool>& renewed) {
  if (stopping_ || !renewed || !*renewed) return stand_by(kBetweenTries);
  state_ = State::kLeading;
}

void Candidacy::term_ended(const Result<void>& outcome) {
  const bool may_try_again = outcome || outcome.error().code() == ErrorCode::kUnavailable ||
                             outcome.error().code() == ErrorCode::kStale;
  if (may_try_again) return stand_by(outcome ? BootTime::zero() : kAfterFailedTerm);
  state_ = State::kOver;
  outcome_ = outcome;
}

}  // namespace rekindle::coordinator
