#pragma once

#include <chrono>
#include <string>
#include <string_view>

#include "proto/coordinator.pb.h"
#include "recovery/rpc/rpc.h"
#include "src/base/digest.h"
#include "src/base/ids.h"
#include "src/base/result.h"

// Grants: permission for one puller to read one version from one source incarnation until an expiry
// on the issuer's monotonic clock. The issuer signs them with the key of its incarnation.
namespace rekindle::rpc {

// Of all grants. The failpoint grants.short makes them short.
struct GrantTimes {
  std::chrono::milliseconds life{60'000};
  // Pullers renew their sessions this often, by their newest grant.
  std::chrono::milliseconds renewal{10'000};
  // Sessions outlive their grants for so long after a coordinator came back.
  std::chrono::milliseconds patience{20'000};
};
GrantTimes grant_times();

// Signs the grant as its issuer. Sources of protocol 2 know no signatures, so it also gets a MAC
// under the cluster secret.
void sign_grant(proto::Grant& grant, const Identity& issuer);
struct GrantCheck {
  Incarnation puller;
  Incarnation source;
  Digest root;
};
// kDenied with the reason: wrong signature, another puller, another root. kStale: the grant is for
// another incarnation of this source. `issuer_key`: of grant.issuer; "" for an issuer of protocol
// 2, whose grants have only the MAC. The caller checks the expiry, because it knows the issuer's
// clock.
Result<void> check_grant(const proto::Grant& grant, std::string_view issuer_key,
                         std::string_view secret, const GrantCheck& check);

}  // namespace rekindle::rpc
