#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "proto/coordinator.pb.h"
#include "src/base/digest.h"
#include "src/base/ids.h"
#include "src/base/result.h"

// Grants: permission for one puller to read one version from one source incarnation until an expiry
// on the issuer's monotonic clock. HMAC-SHA256 under the cluster secret.
namespace rekindle::rpc {

std::string hmac_sha256(std::string_view key, std::string_view message);  // 32 bytes
bool equal_constant_time(std::string_view a, std::string_view b);
// A 0600 file of 16 to 4096 bytes (surrounding white space is cut); "" for an empty path.
Result<std::string> read_secret(const std::string& path);

void sign_grant(proto::Grant& grant, std::string_view secret);
struct GrantCheck {
  Incarnation puller;
  Incarnation source;
  Digest root;
};
// kDenied with the reason: wrong mac, other puller, other root. kStale: meant for another
// incarnation of this source. Expiry is the caller's, who knows the issuer's clock.
Result<void> check_grant(const proto::Grant& grant, std::string_view secret,
                         const GrantCheck& check);

}  // namespace rekindle::rpc
