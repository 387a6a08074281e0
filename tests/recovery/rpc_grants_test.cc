#include <fstream>

#include <sys/stat.h>
#include <unistd.h>

#include <gtest/gtest.h>

#include "recovery/rpc/convert.h"
#include "recovery/rpc/credentials.h"
#include "recovery/rpc/grants.h"
#include "tests/recovery/rpc_fixture.h"

namespace rekindle::rpc {
namespace {

struct Signed {
  Incarnation puller = Incarnation::random();
  Incarnation source = Incarnation::random();
  Identity issuer = testing::make_identity(proto::ROLE_COORDINATOR, "c", "secret");
  Digest root{1, 2};
  proto::Grant grant;

  Signed() {
    grant.set_puller_incarnation(puller.to_bytes());
    grant.set_source_incarnation(source.to_bytes());
    *grant.mutable_root() = to_proto(root);
    grant.set_issuer(issuer.incarnation.to_bytes());
    grant.set_expiry_ms(1000);
    grant.set_serial(7);
    sign_grant(grant, issuer);
  }
  ErrorCode code_with(std::string_view key, std::string_view secret) const {
    const auto checked = check_grant(grant, key, secret, {puller, source, root});
    return checked ? ErrorCode::kInternal : checked.error().code();
  }
  ErrorCode by_key() const { return code_with(issuer.key->public_key(), ""); }
  ErrorCode by_secret() const { return code_with("", "secret"); }
};
constexpr ErrorCode kAccepted = ErrorCode::kInternal;

TEST(Grants, ASignedGrantIsAccepted) {
  EXPECT_EQ(Signed().by_key(), kAccepted);
  EXPECT_EQ(Signed().by_secret(), kAccepted) << "for a source of protocol 2";
}

TEST(Grants, AnyChangedFieldBreaksTheSignature) {
  const auto tampered = [](auto change) {
    Signed it;
    change(it.grant);
    EXPECT_EQ(it.by_secret(), it.by_key());
    return it.by_key();
  };
  EXPECT_EQ(tampered([](auto& g) { g.set_expiry_ms(2000); }), ErrorCode::kDenied);
  EXPECT_EQ(tampered([](auto& g) { g.set_serial(8); }), ErrorCode::kDenied);
  EXPECT_EQ(tampered([](auto& g) { g.set_epoch(8); }), ErrorCode::kDenied);
  EXPECT_EQ(tampered([](auto& g) { g.set_max_bytes_per_second(1); }), ErrorCode::kDenied);
  EXPECT_EQ(tampered([](auto& g) { g.set_issuer(std::string(16, 'x')); }), ErrorCode::kDenied);
  EXPECT_EQ(tampered([](auto& g) { g.mutable_root()->set_value(std::string(32, 9)); }),
            ErrorCode::kDenied);
  EXPECT_EQ(tampered([](auto& g) { g.set_puller_incarnation(std::string(16, 'x')); }),
            ErrorCode::kDenied);
  EXPECT_EQ(tampered([](auto& g) {
              g.clear_mac();
              g.clear_signature();
            }),
            ErrorCode::kDenied);
  EXPECT_EQ(Signed().code_with("", "another"), ErrorCode::kDenied);
}

TEST(Grants, S5AMemberWithTheSecretForgesNoGrantOfACoordinator) {
  const Signed honest;
  Signed forged;
  forged.grant.set_issuer(honest.issuer.incarnation.to_bytes());
  sign_grant(forged.grant, forged.issuer);
  EXPECT_EQ(forged.code_with(honest.issuer.key->public_key(), "secret"), ErrorCode::kDenied);
  forged.grant.clear_signature();
  EXPECT_EQ(forged.code_with(honest.issuer.key->public_key(), "secret"), ErrorCode::kDenied)
      << "its MAC is right";
}

TEST(Grants, AGrantOfAnotherLifeIsStaleAndOfAnotherPullerDenied) {
  Signed it;
  it.source = Incarnation::random();
  EXPECT_EQ(it.by_key(), ErrorCode::kStale);
  Signed other;
  other.puller = Incarnation::random();
  EXPECT_EQ(other.by_key(), ErrorCode::kDenied);
  Signed root;
  root.root = {3, 4};
  EXPECT_EQ(root.by_key(), ErrorCode::kDenied);
}

class SecretFile : public ::testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/rekindle-secret-XXXXXX";
    const int fd = ::mkstemp(name);
    ASSERT_GE(fd, 0);
    ::close(fd);
    path_ = name;
  }
  void TearDown() override { ::unlink(path_.c_str()); }
  void write(const std::string& text) { std::ofstream(path_) << text; }
  std::string path_;
};

TEST_F(SecretFile, WhiteSpaceAroundItIsCut) {
  write("  0123456789abcdef\n");
  EXPECT_EQ(read_secrets(path_)->front().reveal(), "0123456789abcdef");
  EXPECT_TRUE(read_secrets("")->empty());
}

TEST_F(SecretFile, EachLineIsASecretAndTwoAreAcceptedAtATime) {
  write("0123456789abcdef\n\nfedcba9876543210\r\n");
  const auto two = read_secrets(path_);
  ASSERT_TRUE(two) << two.error().message();
  ASSERT_EQ(two->size(), 2u);
  EXPECT_EQ(two->front().reveal(), "0123456789abcdef");
  EXPECT_EQ(two->back().reveal(), "fedcba9876543210");
  write("0123456789abcdef\nshort\n");
  EXPECT_EQ(read_secrets(path_).error().code(), ErrorCode::kInvalid);
  write("0123456789abcdef\nfedcba9876543210\nand a third secret\n");
  EXPECT_EQ(read_secrets(path_).error().code(), ErrorCode::kInvalid);
}

TEST_F(SecretFile, EqualLinesAndWhatIsNoTextAreRefused) {
  write("0123456789abcdef\n0123456789abcdef\n");
  EXPECT_NE(read_secrets(path_).error().message().find("the same secret"), std::string::npos);
  write(std::string("0123456789\0abcdefgh", 19));
  EXPECT_NE(read_secrets(path_).error().message().find("not text"), std::string::npos);
}

TEST_F(SecretFile, OneThatOthersCanReadIsRefused) {
  write("0123456789abcdef");
  ::chmod(path_.c_str(), 0644);
  const auto secret = read_secrets(path_);
  ASSERT_FALSE(secret);
  EXPECT_EQ(secret.error().code(), ErrorCode::kDenied);
  EXPECT_NE(secret.error().message().find("chmod 600"), std::string::npos);
  EXPECT_EQ(secret.error().message().find("0123456789abcdef"), std::string::npos);
}

TEST_F(SecretFile, OneOfAnotherUserIsRefused) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root gives files away";
  write("0123456789abcdef");
  ASSERT_EQ(::chown(path_.c_str(), 65534, 65534), 0);
  const auto secret = read_secrets(path_);
  ASSERT_FALSE(secret);
  EXPECT_EQ(secret.error().code(), ErrorCode::kDenied);
  EXPECT_NE(secret.error().message().find("another user (uid 65534)"), std::string::npos);
}

TEST_F(SecretFile, OneOfRootMayBeReadableByAGroup) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root makes files of root";
  write("0123456789abcdef");
  ::chmod(path_.c_str(), 0440);
  EXPECT_TRUE(read_secrets(path_));
  for (const mode_t mode : {0444u, 0460u, 0441u}) {
    ::chmod(path_.c_str(), mode);
    EXPECT_FALSE(read_secrets(path_)) << std::oct << mode;
  }
}

TEST_F(SecretFile, TooShortTooLongAndMissingAreRefused) {
  write("short");
  EXPECT_EQ(read_secrets(path_).error().code(), ErrorCode::kInvalid);
  write(std::string(5000, 'x'));
  EXPECT_EQ(read_secrets(path_).error().code(), ErrorCode::kInvalid);
  EXPECT_EQ(read_secrets("/nonexistent/secret").error().code(), ErrorCode::kNotFound);
  EXPECT_EQ(read_secrets("/tmp").error().code(), ErrorCode::kInvalid);
}

}  // namespace
}  // namespace rekindle::rpc
