#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "proto/coordinator.pb.h"
#include "src/base/digest.h"
#include "src/base/ids.h"
#include "src/base/result.h"

// Grants: permission for one puller to read one version from one source incarnation until an expiry
// on the issuer's monotonic clock. HMAC-SHA256 under the cluster secret.
namespace rekindle::rpc {

// The bytes that a MAC covers: a label, then fields that cannot run into each other. Byte strings
// carry their length; integers are little-endian and have a fixed size.
class MacText {
 public:
  explicit MacText(std::string_view label) { bytes(label); }
  MacText& bytes(std::string_view value) {
    u64(value.size());
    text_.append(value);
    return *this;
  }
  MacText& u64(std::uint64_t value) {
    for (int shift = 0; shift < 64; shift += 8) text_ += static_cast<char>(value >> shift & 0xff);
    return *this;
  }
  std::string take() && { return std::move(text_); }

 private:
  std::string text_;
};

// Returns 32 bytes.
std::string hmac_sha256(std::string_view key, std::string_view message);
bool equal_constant_time(std::string_view a, std::string_view b);
// Reads a file of mode 0600 with 16 to 4096 bytes, and cuts surrounding white space. Returns "" for
// an empty path.
Result<std::string> read_secret(const std::string& path);

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
