#include "recovery/agent/grant_clock.h"

#include <algorithm>
#include <chrono>

namespace rekindle::agent {

namespace {

constexpr std::size_t kIssuersKept = 8;
// The lifetime of a coordinator's grant (Timing::grant_ttl), and the largest difference between two
// readings of a clock.
constexpr std::chrono::milliseconds kGrantLifetime{60'000};
constexpr std::chrono::milliseconds kClockSlack{2'000};

}  // namespace

void GrantClock::observe(const Incarnation& issuer, std::uint64_t issuer_ms, TimePoint now) {
  const auto found = std::find_if(issuers_.begin(), issuers_.end(),
                                  [&](const Issuer& known) { return known.id == issuer; });
  if (found != issuers_.end()) {
    // A late reply would set the clock back, so the furthest reading counts.
    const auto elapsed = static_cast<std::uint64_t>(milliseconds(now - found->at));
    if (issuer_ms > found->issuer_ms + elapsed) *found = {issuer, issuer_ms, now};
    return;
  }
  issuers_.push_back({issuer, issuer_ms, now});
  if (issuers_.size() > kIssuersKept) issuers_.pop_front();
}

Result<void> GrantClock::check(const Incarnation& issuer, std::uint64_t epoch,
                               std::uint64_t expiry_ms, TimePoint now) const {
  const auto found = std::find_if(issuers_.begin(), issuers_.end(),
                                  [&](const Issuer& known) { return known.id == issuer; });
  if (found == issuers_.end()) {
    return fail(ErrorCode::kStale,
                "the grant's issuer is not known here: ask the coordinator again");
  }
  const auto elapsed = static_cast<std::uint64_t>(milliseconds(now - found->at));
  if (found->issuer_ms + elapsed > expiry_ms) {
    return fail(ErrorCode::kDenied, "the grant expired {} ms ago: ask for a new one",
                found->issuer_ms + elapsed - expiry_ms);
  }
  const auto left = std::chrono::milliseconds(
      std::min<std::uint64_t>(expiry_ms - found->issuer_ms - elapsed, 1u << 31));
  const auto replaced_at = epoch == 0 ? std::nullopt : epochs_.replaced_at(epoch);
  if (replaced_at && now + left > *replaced_at + kGrantLifetime + kClockSlack) {
    return fail(ErrorCode::kStale,
                "the grant is of epoch {}, whose coordinator was replaced before it was given "
                "(epoch {} now): ask the new one",
                epoch, epochs_.highest());
  }
  return {};
}

}  // namespace rekindle::agent
