#include "src/base/digest.h"

#include <gtest/gtest.h>

namespace rekindle {
namespace {

TEST(DigestTest, HexSurvivesAndBadHexIsRefused) {
  Digest digest;
  for (std::size_t i = 0; i < digest.bytes.size(); ++i) {
    digest.bytes[i] = static_cast<std::uint8_t>(i * 8 + 1);
  }
  const std::string hex = "0109111921293139414951596169717981899199a1a9b1b9c1c9d1d9e1e9f1f9";
  EXPECT_EQ(digest.hex(), hex);
  EXPECT_EQ(Digest::from_hex(hex).value(), digest);
  for (const std::string& bad : {std::string(), std::string("0"), hex.substr(1), hex + "0",
                                 "+" + hex.substr(1), "g" + hex.substr(1)}) {
    EXPECT_FALSE(Digest::from_hex(bad)) << bad;
  }
}

TEST(DigestTest, WireBytesOfAnotherLengthAreNil) {
  const Digest digest{1, 2, 3};
  EXPECT_EQ(Digest::from_bytes(digest.to_bytes()), digest);
  EXPECT_TRUE(Digest::from_bytes(digest.to_bytes() + "x").is_nil());
  EXPECT_TRUE(Digest::from_bytes(std::string(31, 'x')).is_nil());
  EXPECT_TRUE(Digest::from_bytes("").is_nil());
}

}  // namespace
}  // namespace rekindle
