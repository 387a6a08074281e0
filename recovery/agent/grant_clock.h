#pragma once

#include <cstdint>
#include <deque>

#include "recovery/agent/highest_epoch.h"
#include "src/base/clock.h"
#include "src/base/ids.h"
#include "src/base/result.h"

namespace rekindle::agent {

// Grants expire on the monotonic clock of their issuer, so that no wall clock matters. This class
// remembers the clocks of the last few issuers: coordinators, and this process itself. Pure;
// control thread only.
class GrantClock {
 public:
  // The clock of `issuer` shows `issuer_ms` now.
  void observe(const Incarnation& issuer, std::uint64_t issuer_ms, TimePoint now);
  // kStale: the issuer is unknown, or a coordinator that has been replaced. kDenied: the grant has
  // expired. A grant of an earlier epoch holds until it expires if it may have been given before
  // this agent heard of the new epoch: a change of the coordinator ends no pull. `epoch` 0: the
  // source gave the grant itself.
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
