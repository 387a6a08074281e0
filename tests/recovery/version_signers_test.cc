// Which versions become known to a coordinator that trusts only some publishers.
#include "recovery/coordinator/core/version_signers.h"

#include <gmock/gmock.h>

#include "tests/recovery/coordinator_fixture.h"

namespace rekindle::coordinator::testing {
namespace {

using crypto::SigningKey;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class TrustedPublishers : public ::testing::Test {
 protected:
  TrustedPublishers() {
    PublisherTrust trust;
    EXPECT_TRUE(trust.add("qwen3", key_.public_key()));
    world_.core->trust(std::move(trust));
  }
  VersionSignature signature(const SigningKey& key, const ModelVersion& id,
                             std::uint64_t root = 1) const {
    return sign_version(key, id, test::numbered_digest(root, 7));
  }
  Holding holding(std::vector<VersionSignature> signatures) const {
    Holding result = CoreWorld::holding(kV1);
    result.signatures = std::move(signatures);
    return result;
  }
  std::vector<VersionSignature> known() const {
    return world_.core->fleet().signers.of(kV1, test::numbered_digest(1, 7));
  }

  const SigningKey key_ = SigningKey::generate();
  CoreWorld world_;
};

TEST_F(TrustedPublishers, S2AnAnnouncedCopyMakesAVersionKnownOnlyWithATrustedSignature) {
  const NodeInfo node = world_.node("a");
  ASSERT_TRUE(world_.enroll(node));
  const SigningKey other = SigningKey::generate();
  for (const auto& wrong : {holding({}), holding({signature(other, kV1)}),
                            holding({signature(key_, kV2)}), holding({signature(key_, kV1, 2)})}) {
    const auto conflicts = world_.announce(node, {wrong});
    ASSERT_TRUE(conflicts);
    ASSERT_THAT(*conflicts, SizeIs(1));
    EXPECT_THAT(conflicts->front().why, HasSubstr("--trust-publisher"));
    EXPECT_EQ(world_.core->fleet().catalog.find(kV1), nullptr);
  }
  const auto good = world_.announce(node, {holding({signature(key_, kV1)})});
  ASSERT_TRUE(good);
  EXPECT_THAT(*good, IsEmpty());
  EXPECT_NE(world_.core->fleet().catalog.find(kV1), nullptr);
  EXPECT_THAT(known(), SizeIs(1));
}

TEST_F(TrustedPublishers, AHolderThatStripsTheSignatureTakesItFromNobody) {
  const NodeInfo honest = world_.node("a"), stripping = world_.node("b");
  ASSERT_TRUE(world_.enroll(honest));
  ASSERT_TRUE(world_.enroll(stripping));
  ASSERT_TRUE(world_.announce(honest, {holding({signature(key_, kV1)})}));
  const auto stripped = world_.announce(stripping, {holding({})});
  ASSERT_TRUE(stripped);
  EXPECT_THAT(*stripped, IsEmpty());
  EXPECT_THAT(known(), SizeIs(1));
  const auto opened = world_.core->open_pull({world_.node("p"), "qwen3", 1, ""}, world_.now);
  ASSERT_TRUE(opened);
  EXPECT_EQ(opened->signatures, std::vector{signature(key_, kV1)});
}

TEST_F(TrustedPublishers, OtherModelsNeedNoSignature) {
  const NodeInfo node = world_.node("a");
  ASSERT_TRUE(world_.enroll(node));
  const ModelVersion other{"llama", 1};
  const auto conflicts = world_.announce(node, {CoreWorld::holding(other)});
  ASSERT_TRUE(conflicts);
  EXPECT_THAT(*conflicts, IsEmpty());
  EXPECT_NE(world_.core->fleet().catalog.find(other), nullptr);
}

TEST_F(TrustedPublishers, TheSignaturesOfARetiredVersionAreForgotten) {
  const NodeInfo node = world_.node("a");
  ASSERT_TRUE(world_.enroll(node));
  ASSERT_TRUE(world_.announce(node, {holding({signature(key_, kV1)})}));
  ASSERT_TRUE(world_.core->retire(kV1, world_.now));
  EXPECT_THAT(known(), IsEmpty());
}

}  // namespace
}  // namespace rekindle::coordinator::testing
