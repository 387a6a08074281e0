#include "src/tensor/version_signature.h"

#include <gmock/gmock.h>

#include "src/tensor/checkpoint.h"

namespace rekindle {
namespace {

using crypto::SigningKey;
using ::testing::AllOf;
using ::testing::HasSubstr;

const ModelVersion kId{"org/qwen3", 41};
const Digest kRoot{1, 2, 3};

TEST(VersionSignature, IsOfOneModelOneVersionAndOneRoot) {
  const auto key = SigningKey::generate();
  const VersionSignature good = sign_version(key, kId, kRoot);
  EXPECT_TRUE(is_valid(good, kId, kRoot));
  EXPECT_FALSE(is_valid(good, {"org/qwen2", 41}, kRoot));
  EXPECT_FALSE(is_valid(good, {"org/qwen3", 42}, kRoot));
  EXPECT_FALSE(is_valid(good, kId, Digest{1, 2, 4}));
  EXPECT_FALSE(is_valid({SigningKey::generate().public_key(), good.signature}, kId, kRoot));
  EXPECT_FALSE(is_valid({good.public_key, good.signature.substr(1)}, kId, kRoot));
  EXPECT_FALSE(is_valid({}, kId, kRoot));
}

TEST(VersionSignature, OnlyValidOnesCountAndEachKeyOnce) {
  const auto key = SigningKey::generate(), other = SigningKey::generate();
  const VersionSignature good = sign_version(key, kId, kRoot);
  const VersionSignature wrong = sign_version(other, {"m", 1}, kRoot);
  EXPECT_EQ(valid_signatures(std::vector{wrong, good, good}, kId, kRoot), std::vector{good});
  std::vector<VersionSignature> all = {good};
  EXPECT_FALSE(add_signatures(all, std::vector{good}));
  for (std::size_t i = all.size(); i < kMaxSignatures; ++i) {
    EXPECT_TRUE(add_signatures(all, std::vector{sign_version(SigningKey::generate(), kId, kRoot)}));
  }
  EXPECT_FALSE(add_signatures(all, std::vector{sign_version(other, kId, kRoot)}));
}

TEST(PublisherTrust, WithoutRulesEveryVersionIsTaken) {
  EXPECT_TRUE(PublisherTrust().check(kId, kRoot, {}));
  EXPECT_FALSE(PublisherTrust().covers("m"));
}

TEST(PublisherTrust, DemandsASignatureOfOneOfItsKeysForMatchingModels) {
  const auto key = SigningKey::generate(), other = SigningKey::generate();
  PublisherTrust trust;
  ASSERT_TRUE(trust.add("org/*", key.public_key()));
  ASSERT_FALSE(trust.add("", key.public_key()));
  EXPECT_TRUE(trust.check({"elsewhere", 1}, kRoot, {}));
  EXPECT_TRUE(trust.check(kId, kRoot, std::vector{sign_version(key, kId, kRoot)}));

  const auto unsigned_version = trust.check(kId, kRoot, {});
  ASSERT_FALSE(unsigned_version);
  EXPECT_EQ(unsigned_version.error().code(), ErrorCode::kDenied);
  EXPECT_THAT(unsigned_version.error().message(),
              AllOf(HasSubstr("org/qwen3@41"), HasSubstr("has no signature"),
                    HasSubstr(crypto::key_id(key.public_key())), HasSubstr(kRoot.hex())));
  const auto by_another = trust.check(kId, kRoot, std::vector{sign_version(other, kId, kRoot)});
  ASSERT_FALSE(by_another);
  EXPECT_THAT(by_another.error().message(),
              HasSubstr("is signed by " + crypto::key_id(other.public_key())));
  const auto of_another = trust.check(kId, kRoot, std::vector{sign_version(key, {"m", 1}, kRoot)});
  ASSERT_FALSE(of_another);
  EXPECT_THAT(of_another.error().message(), HasSubstr("of another version or root"));
}

TEST(PublisherTrust, RefusesPatternsThatMatchNoModel) {
  const auto key = crypto::SigningKey::generate();
  PublisherTrust trust;
  for (const char* const models :
       {"m[", "m[!]", "m[a", "m]", "m\\", " m", "m,n", "m@*", "m\\*", "m[[:alpha:]", "m[@]"}) {
    const auto added = trust.add(models, key.public_key());
    ASSERT_FALSE(added) << models;
    EXPECT_EQ(added.error().code(), ErrorCode::kInvalid);
    EXPECT_NE(added.error().message().find(models), std::string::npos) << added.error().message();
  }
  for (const char* const models :
       {"*", "org/m-1.0_b+c", "m?", "[a-z]*", "[!a]", "[^a]", "[[:digit:]]"}) {
    EXPECT_TRUE(trust.add(models, key.public_key())) << models;
  }
}

TEST(PublisherTrust, EachOfSeveralKeysIsEnough) {
  const auto first = SigningKey::generate(), second = SigningKey::generate();
  PublisherTrust trust;
  ASSERT_TRUE(trust.add("*", first.public_key()));
  ASSERT_TRUE(trust.add("org/*", second.public_key()));
  EXPECT_TRUE(trust.check(kId, kRoot, std::vector{sign_version(first, kId, kRoot)}));
  EXPECT_TRUE(trust.check(kId, kRoot, std::vector{sign_version(second, kId, kRoot)}));
  EXPECT_FALSE(trust.check({"m", 1}, kRoot, std::vector{sign_version(second, {"m", 1}, kRoot)}));
  EXPECT_EQ(trust.keys("org/qwen3").size(), 2u);
  EXPECT_EQ(trust.keys("m"), std::vector{first.public_key()});
}

TEST(ManifestSignatures, AreKeptAndWrongOnesAreDropped) {
  const auto key = SigningKey::generate();
  const ModelVersion id{"m", 1};
  TensorSet set = *TensorSet::create({{"a", DType::kU8, {4}}});
  const Digest root = checkpoint_root(id, set, *TileMap::create(set), std::vector<Digest>{{1}});
  const VersionSignature good = sign_version(key, id, root);
  auto checkpoint = Checkpoint::create(id, set, {{1}}, root, std::vector{good});
  ASSERT_TRUE(checkpoint);
  Layout layout = pack_layout(set, std::vector<TensorBox>{{0, Box::whole({4})}}, 1 << 20)->layout;
  const auto read = Manifest::parse(Manifest{*checkpoint, layout, 1}.serialize());
  ASSERT_TRUE(read) << read.error().message();
  EXPECT_EQ(read->checkpoint->signatures, std::vector{good});

  Checkpoint forged = **checkpoint;
  forged.signatures = {sign_version(key, {"m", 2}, root)};
  const auto without =
      Manifest::parse(Manifest{std::make_shared<const Checkpoint>(forged), layout, 1}.serialize());
  ASSERT_TRUE(without) << without.error().message();
  EXPECT_TRUE(without->checkpoint->signatures.empty());
}

}  // namespace
}  // namespace rekindle
