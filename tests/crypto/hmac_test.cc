#include "src/crypto/hmac.h"

#include <gtest/gtest.h>

#include "src/base/ids.h"

namespace rekindle::crypto {
namespace {

TEST(Hmac, MatchesRfc4231) {
  const auto hex = [](const std::string& mac) {
    return to_hex(reinterpret_cast<const std::uint8_t*>(mac.data()), mac.size());
  };
  EXPECT_EQ(hex(hmac_sha256("Jefe", "what do ya want for nothing?")),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(hex(hmac_sha256(std::string(20, '\x0b'), "Hi There")),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
}

}  // namespace
}  // namespace rekindle::crypto
