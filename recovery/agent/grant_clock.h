#pragma once

#include <cstdint>
#include <deque>

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
  // kStale for an issuer that was never heard of; kDenied when the grant has expired.
  Result<void> check(const Incarnation& issuer, std::uint64_t expiry_ms, TimePoint now) const;

 private:
  struct Issuer {
    Incarnation id;
    std::uint64_t issuer_ms = 0;
    TimePoint at{};
  };
  std::deque<Issuer> issuers_;
};

}  // namespace rekindle::agent
