#pragma once

#include <string>
#include <string_view>

#include "proto/coordinator.pb.h"
#include "src/base/digest.h"
#include "src/base/ids.h"
#include "src/base/result.h"

// Grants: permission for one puller to read one version from one source incarnation until an expiry
// on the issuer's monotonic clock. HMAC-SHA256 under the cluster secret.
namespace rekindle::rpc {

void sign_grant(proto::Grant& grant, std::string_view secret);
struct GrantCheck {
  Incarnation puller;
  Incarnation source;
  Digest root;
};
// kDenied with the reason: wrong MAC, another puller, another root. kStale: the grant is for
// another incarnation of this source. The caller checks the expiry, because it knows the issuer's
// clock.
Result<void> check_grant(const proto::Grant& grant, std::string_view secret,
                         const GrantCheck& check);

}  // namespace rekindle::rpc
