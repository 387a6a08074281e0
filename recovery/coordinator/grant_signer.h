#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <tuple>

#include "proto/coordinator.pb.h"
#include "recovery/coordinator/core/source_selection.h"
#include "recovery/rpc/rpc.h"

namespace rekindle::coordinator {

// Makes grants of the core's terms and signs them. A puller gets new terms for each source with
// each report of its progress, so a signature is used again until half of its life has passed:
// signing is what would cost most in a coordinator with many pulls.
class GrantSigner {
 public:
  // `lifetime`: of a grant.
  GrantSigner(const rpc::Identity& issuer, Duration lifetime);
  const proto::Grant& sign(const GrantTerms& terms);
  std::size_t kept() const { return given_.size(); }

 private:
  // All terms but the expiry and the serial.
  using Key = std::tuple<Incarnation, Incarnation, Digest, std::uint64_t, std::uint64_t>;
  void forget_expired(std::uint64_t now_ms);

  const rpc::Identity issuer_;
  const std::uint64_t lifetime_ms_;
  std::map<Key, proto::Grant> given_;
  // The size of `given_` at which expired grants are looked for again.
  std::size_t look_at_ = 1024;
};

}  // namespace rekindle::coordinator
