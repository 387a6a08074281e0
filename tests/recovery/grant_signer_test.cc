#include "recovery/coordinator/grant_signer.h"

#include <gtest/gtest.h>

#include "recovery/rpc/grants.h"
#include "tests/recovery/rpc_fixture.h"

namespace rekindle::coordinator {
namespace {

using namespace std::chrono_literals;

class GrantSignerTest : public ::testing::Test {
 protected:
  GrantTerms terms(std::uint64_t expiry_ms) {
    GrantTerms terms;
    terms.puller = puller_;
    terms.source = source_;
    terms.root = {1, 2};
    terms.expiry_ms = expiry_ms;
    terms.serial = next_serial_++;
    terms.epoch = 3;
    return terms;
  }
  bool right(const proto::Grant& grant) const {
    return rpc::check_grant(grant, issuer_.key->public_key(), "", {puller_, source_, {1, 2}})
        .has_value();
  }

  const rpc::Identity issuer_ = rpc::testing::make_identity(proto::ROLE_COORDINATOR, "c");
  const Incarnation puller_ = Incarnation::random();
  const Incarnation source_ = Incarnation::random();
  std::uint64_t next_serial_ = 1;
  GrantSigner signer_{issuer_, 60s};
};

TEST_F(GrantSignerTest, AGrantIsSignedAgainWhenHalfOfItsLifeHasPassed) {
  const proto::Grant first = signer_.sign(terms(100'000));
  EXPECT_TRUE(right(first));
  EXPECT_EQ(first.serial(), 1u);
  EXPECT_EQ(first.epoch(), 3u);
  EXPECT_EQ(signer_.sign(terms(130'000)).serial(), 1u);
  const proto::Grant second = signer_.sign(terms(130'001));
  EXPECT_EQ(second.serial(), 3u);
  EXPECT_EQ(second.expiry_ms(), 130'001u);
  EXPECT_TRUE(right(second));
}

TEST_F(GrantSignerTest, OtherTermsAreAnotherGrant) {
  signer_.sign(terms(100'000));
  auto capped = terms(100'000);
  capped.max_bytes_per_second = 7;
  EXPECT_EQ(signer_.sign(capped).max_bytes_per_second(), 7u);
  auto later = terms(100'000);
  later.epoch = 4;
  EXPECT_EQ(signer_.sign(later).epoch(), 4u);
  auto other = terms(100'000);
  other.puller = Incarnation::random();
  EXPECT_EQ(signer_.sign(other).puller_incarnation(), other.puller.to_bytes());
}

TEST_F(GrantSignerTest, ExpiredGrantsAreForgotten) {
  for (int i = 0; i < 5000; ++i) {
    auto one = terms(60'000 + static_cast<std::uint64_t>(i) * 1000);
    one.puller = Incarnation::random();
    signer_.sign(one);
  }
  EXPECT_LE(signer_.kept(), 1200u) << "60 of them live at a time";
}

}  // namespace
}  // namespace rekindle::coordinator
