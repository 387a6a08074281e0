#include "recovery/rpc/grants.h"

#include "recovery/rpc/convert.h"
#include "src/crypto/bound_text.h"
#include "src/crypto/hmac.h"

namespace rekindle::rpc {

namespace {

std::string grant_text(const proto::Grant& grant) {
  crypto::BoundText text("rekindle grant v2");
  text.bytes(grant.puller_incarnation()).bytes(grant.source_incarnation());
  text.bytes(grant.root().value());
  text.bytes(grant.issuer()).u64(grant.expiry_ms());
  text.u64(grant.max_bytes_per_second()).u64(grant.serial()).u64(grant.epoch());
  return std::move(text).take();
}

}  // namespace

void sign_grant(proto::Grant& grant, std::string_view secret) {
  grant.set_mac(crypto::hmac_sha256(secret, grant_text(grant)));
}

Result<void> check_grant(const proto::Grant& grant, std::string_view secret,
                         const GrantCheck& check) {
  if (!crypto::equal_constant_time(grant.mac(), crypto::hmac_sha256(secret, grant_text(grant)))) {
    return fail(ErrorCode::kDenied,
                "the grant is not signed with this cluster's secret; do all parties use the same "
                "secret file?");
  }
  if (grant.source_incarnation() != check.source.to_bytes()) {
    return fail(ErrorCode::kStale, "the grant is for an earlier life of this source; ask again");
  }
  if (grant.puller_incarnation() != check.puller.to_bytes()) {
    return fail(ErrorCode::kDenied, "the grant belongs to another puller");
  }
  if (from_proto(grant.root()) != check.root) {
    return fail(ErrorCode::kDenied, "the grant is for checkpoint root {}, not {}",
                from_proto(grant.root()).hex(), check.root.hex());
  }
  return {};
}

}  // namespace rekindle::rpc
