#include "recovery/coordinator/grant_signer.h"

#include <algorithm>

#include "recovery/rpc/convert.h"
#include "recovery/rpc/grants.h"
#include "src/base/clock.h"

namespace rekindle::coordinator {

GrantSigner::GrantSigner(const rpc::Identity& issuer, Duration lifetime)
    : issuer_(issuer), lifetime_ms_(static_cast<std::uint64_t>(milliseconds(lifetime))) {}

const proto::Grant& GrantSigner::sign(const GrantTerms& terms) {
  const Key key{terms.puller, terms.source, terms.root, terms.max_bytes_per_second, terms.epoch};
  const auto given = given_.find(key);
  if (given != given_.end() && given->second.expiry_ms() + lifetime_ms_ / 2 >= terms.expiry_ms) {
    return given->second;
  }
  if (given_.size() >= look_at_) {
    forget_expired(terms.expiry_ms - std::min(lifetime_ms_, terms.expiry_ms));
    look_at_ = std::max<std::size_t>(1024, 2 * given_.size());
  }
  proto::Grant& grant = given_[key];
  grant.Clear();
  grant.set_puller_incarnation(terms.puller.to_bytes());
  grant.set_source_incarnation(terms.source.to_bytes());
  *grant.mutable_root() = rpc::to_proto(terms.root);
  grant.set_issuer(issuer_.incarnation.to_bytes());
  grant.set_expiry_ms(terms.expiry_ms);
  grant.set_max_bytes_per_second(terms.max_bytes_per_second);
  grant.set_serial(terms.serial);
  grant.set_epoch(terms.epoch);
  rpc::sign_grant(grant, issuer_);
  return grant;
}

void GrantSigner::forget_expired(std::uint64_t now_ms) {
  std::erase_if(given_, [&](const auto& entry) { return entry.second.expiry_ms() < now_ms; });
}

}  // namespace rekindle::coordinator
