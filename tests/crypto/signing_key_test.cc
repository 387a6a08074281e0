#include "src/crypto/signing_key.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace rekindle::crypto {
namespace {

using ::testing::HasSubstr;

std::string unhex(std::string_view hex) {
  std::string raw;
  for (std::size_t i = 0; i + 1 < hex.size(); i += 2) {
    raw += static_cast<char>(std::stoi(std::string(hex.substr(i, 2)), nullptr, 16));
  }
  return raw;
}

TEST(SigningKey, VerifiesTheVectorsOfRfc8032) {
  const auto key = unhex("3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c");
  const auto signature = unhex(
      "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
      "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00");
  EXPECT_TRUE(verify(key, "\x72", signature));
  EXPECT_FALSE(verify(key, "\x73", signature));
  EXPECT_FALSE(verify(key, "\x72", signature.substr(1)));
  EXPECT_FALSE(verify(key.substr(1), "\x72", signature));
  EXPECT_FALSE(verify("", "\x72", signature));
}

TEST(SigningKey, ItsSignatureIsOfItsKeyAndText) {
  const SigningKey key = SigningKey::generate();
  const SigningKey other = SigningKey::generate();
  EXPECT_NE(key.public_key(), other.public_key());
  const std::string signature = key.sign("text");
  EXPECT_TRUE(verify(key.public_key(), "text", signature));
  EXPECT_FALSE(verify(key.public_key(), "Text", signature));
  EXPECT_FALSE(verify(other.public_key(), "text", signature));
}

TEST(SigningKey, GoesToAFileAndBack) {
  const SigningKey key = SigningKey::generate();
  const auto same = SigningKey::from_pem(key.to_pem());
  ASSERT_TRUE(same);
  EXPECT_EQ(same->public_key(), key.public_key());
  const auto public_key = public_key_from_pem(public_key_to_pem(key.public_key()));
  ASSERT_TRUE(public_key);
  EXPECT_EQ(*public_key, key.public_key());
}

TEST(SigningKey, RefusesWhatIsNoKeyOfEd25519) {
  const auto text = SigningKey::from_pem("hello");
  ASSERT_FALSE(text);
  EXPECT_THAT(text.error().message(), HasSubstr("openssl genpkey -algorithm ed25519"));
  // A private key of X25519.
  const auto other = SigningKey::from_pem(
      "-----BEGIN PRIVATE KEY-----\n"
      "MC4CAQAwBQYDK2VuBCIEIBCL8rFPXKmAWY6wmMR3bqIEDJ5JYc1G8DLZXWPTAJpV\n"
      "-----END PRIVATE KEY-----\n");
  ASSERT_FALSE(other);
  EXPECT_THAT(other.error().message(), HasSubstr("not of Ed25519"));
  EXPECT_FALSE(public_key_from_pem("-----BEGIN PUBLIC KEY-----\n"));
}

}  // namespace
}  // namespace rekindle::crypto
