#include "recovery/rpc/grants.h"

#include "recovery/rpc/convert.h"
#include "src/base/failpoint.h"
#include "src/crypto/bound_text.h"
#include "src/crypto/hmac.h"

namespace rekindle::rpc {

namespace {

constexpr std::string_view kAuthenticated = "rekindle grant v2";
constexpr std::string_view kSigned = "rekindle grant v3";

std::string grant_text(std::string_view label, const proto::Grant& grant) {
  crypto::BoundText text(label);
  text.bytes(grant.puller_incarnation()).bytes(grant.source_incarnation());
  text.bytes(grant.root().value());
  text.bytes(grant.issuer()).u64(grant.expiry_ms());
  text.u64(grant.max_bytes_per_second()).u64(grant.serial()).u64(grant.epoch());
  return std::move(text).take();
}

}  // namespace

GrantTimes grant_times() {
  using std::chrono::milliseconds;
  if (failpoint("grants.short")) return {};
  return {milliseconds(4000), milliseconds(500), milliseconds(1000)};
}

void sign_grant(proto::Grant& grant, const Identity& issuer) {
  if (issuer.key != nullptr) grant.set_signature(issuer.key->sign(grant_text(kSigned, grant)));
  grant.set_mac(crypto::hmac_sha256(issuer.secret.reveal(), grant_text(kAuthenticated, grant)));
}

Result<void> check_grant(const proto::Grant& grant, std::string_view issuer_key,
                         std::string_view secret, const GrantCheck& check) {
  if (!issuer_key.empty()) {
    if (!crypto::verify(issuer_key, grant_text(kSigned, grant), grant.signature())) {
      return fail(ErrorCode::kDenied, "the grant is not signed by the coordinator that it names");
    }
  } else if (!crypto::equal_constant_time(
                 grant.mac(), crypto::hmac_sha256(secret, grant_text(kAuthenticated, grant)))) {
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
