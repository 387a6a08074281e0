#pragma once

#include <cstdint>
#include <deque>

#include "recovery/agent/highest_epoch.h"
#include "src/base/clock.h"
#include "src/base/ids.h"
#include "src/base/result.h"

namespace rekindle::agent {

// Grants expire on their issuer's monotonic clock, so that no wall clock matters. This remembers,
// for the last few issuers (coordinator incarnations, this process itself), what their clock showed
// when. Pure; control thread only.
class GrantClock {
 public:
  // `issuer` said that its clock shows `issuer_ms` now.
  void observe(const Incarnation& issuer, std::uint64_t issuer_ms, TimePoint now);
  // kStale for an issuer that was never heard of, or a coordinator that has been replaced; kDenied
  // when the grant has expired. A grant of an earlier epoch holds until it expires when it may have
  // been given before this agent heard of the new one: a change of the coordinator ends no pull.
  // `epoch` 0: its source gave it itself.
  Result<void> check(const Incarnation& issuer, std::uint64_t epoch, std::uint64_t expiry_ms,
                     TimePoint now) const;
  HighestEpoch& epochs() { return epochs_; }

 private:
  struct Issuer {
    Incarnation id;
    std::uint64_t issuer_ms = 0;
    TimePoint at{};
  };
  std::deque<Issuer> issuers_;
  HighestEpoch epochs_;
};

}  // namespace rekindle::agent
