#include "src/tensor/checkpoint.h"

#include <gmock/gmock.h>

namespace rekindle {
namespace {

using ::testing::HasSubstr;

Manifest make_manifest() {
  TensorSet set = *TensorSet::create({{"a", DType::kU8, {3 << 20}}, {"b", DType::kF32, {2, 2}}});
  const std::vector<Digest> digests = {{1}, {2}, {3}, {255}};
  const Digest root = checkpoint_root({"org/model", 41}, set, *TileMap::create(set), digests);
  Layout layout =
      pack_layout(set, std::vector<TensorBox>{{0, {{5}, {2 << 20}}}, {1, Box::whole({2, 2})}},
                  1 << 30)
          ->layout;
  auto checkpoint = Checkpoint::create({"org/model", 41}, std::move(set), digests, root);
  EXPECT_TRUE(checkpoint) << checkpoint.error().message();
  return {*checkpoint, std::move(layout), 7, {{0, {11}}, {2, {13}}}};
}

TEST(CheckpointTest, DigestsMustMatchTheRoot) {
  const TensorSet set = *TensorSet::create({{"a", DType::kU8, {3 << 20}}});
  const std::vector<Digest> digests = {{1}, {2}, {3}};
  const Digest root = checkpoint_root({"m", 1}, set, *TileMap::create(set), digests);
  EXPECT_TRUE(Checkpoint::create({"m", 1}, set, digests, root));
  for (const auto& wrong : std::vector<std::vector<Digest>>{
           {{1}, {2}}, {{1}, {2}, {4}}, {{2}, {1}, {3}}, {{1}, {2}, {3}, {0}}}) {
    const auto checkpoint = Checkpoint::create({"m", 1}, set, wrong, root);
    ASSERT_FALSE(checkpoint);
    EXPECT_EQ(checkpoint.error().code(), ErrorCode::kCorrupt);
  }
  EXPECT_FALSE(Checkpoint::create({"../m", 1}, set, digests, root));
  // The root names its model and version, too.
  EXPECT_FALSE(Checkpoint::create({"m", 2}, set, digests, root));
  EXPECT_FALSE(Checkpoint::create({"n", 1}, set, digests, root));
}

TEST(CheckpointTest, DigestBytesAreReadBackAsTheSameDigests) {
  const std::vector<Digest> digests = {{1}, {2}};
  const std::string bytes(digest_bytes(digests));
  EXPECT_EQ(bytes, digests[0].to_bytes() + digests[1].to_bytes());
  auto read = parse_digests(bytes);
  ASSERT_TRUE(read);
  EXPECT_EQ(*read, digests);
  EXPECT_TRUE(digest_bytes({}).empty());
  EXPECT_FALSE(parse_digests(std::string_view(bytes).substr(1)));
}

TEST(ManifestTest, SurvivesSerialization) {
  const Manifest manifest = make_manifest();
  const auto parsed = Manifest::parse(manifest.serialize());
  ASSERT_TRUE(parsed) << parsed.error().message();
  EXPECT_EQ(parsed->checkpoint->id, manifest.checkpoint->id);
  EXPECT_EQ(parsed->checkpoint->root, manifest.checkpoint->root);
  EXPECT_EQ(parsed->checkpoint->tile_digests, manifest.checkpoint->tile_digests);
  EXPECT_EQ(parsed->layout.digest(), manifest.layout.digest());
  EXPECT_EQ(parsed->generation, 7u);
  EXPECT_EQ(parsed->part_digests, manifest.part_digests);
}

TEST(ManifestTest, TheLayoutsOfAJointPublicationAscendAndHaveItsOwn) {
  Manifest manifest = make_manifest();
  const Digest own = manifest.layout.digest();
  const Digest before{0}, after = Digest::from_bytes(std::string(32, '\xff'));
  manifest.part_layouts = {before, own, after};
  auto read = Manifest::parse(manifest.serialize());
  ASSERT_TRUE(read) << read.error().message();
  EXPECT_EQ(read->part_layouts, manifest.part_layouts);
  for (const auto& wrong :
       std::vector<std::vector<Digest>>{{before, after}, {after, own}, {own, own}, {own, before}}) {
    manifest.part_layouts = wrong;
    const auto refused = Manifest::parse(manifest.serialize());
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code(), ErrorCode::kCorrupt);
  }
}

TEST(ManifestTest, EveryDamagedByteIsNoticed) {
  const std::string bytes = make_manifest().serialize();
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    std::string damaged = bytes;
    damaged[i] = static_cast<char>(damaged[i] ^ 0x10);
    const auto flipped = Manifest::parse(damaged);
    ASSERT_FALSE(flipped) << "byte " << i;
    EXPECT_EQ(flipped.error().code(), ErrorCode::kCorrupt);
    EXPECT_FALSE(Manifest::parse(std::string_view(bytes).substr(0, i)));
  }
  EXPECT_THAT(Manifest::parse(bytes + "x").error().message(), HasSubstr("tail"));
  EXPECT_FALSE(Manifest::parse(""));
}

TEST(ManifestTest, AnotherFormatIsNamedAndNotCalledDamage) {
  for (const std::string format : {"01", "03"}) {
    std::string bytes = make_manifest().serialize();
    bytes.replace(6, 2, format);
    const auto refused = Manifest::parse(bytes);
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code(), ErrorCode::kInvalid);
    EXPECT_THAT(refused.error().message(),
                HasSubstr("its format is " + format + ", this release (rekindle "));
  }
}

// Tile 0 is held from byte 5 on: its proof is the bytes 0 to 4 alone.
TEST(ManifestTest, ProofsMustHaveTheLengthThatTheLayoutNeeds) {
  Manifest manifest = make_manifest();
  manifest.part_proofs = "01234";
  const auto parsed = Manifest::parse(manifest.serialize());
  ASSERT_TRUE(parsed) << parsed.error().message();
  EXPECT_EQ(parsed->part_proofs, "01234");
  EXPECT_EQ(parsed->part_digests[1].proofs_begin, 5u);
  manifest.part_proofs = "012345";
  EXPECT_FALSE(Manifest::parse(manifest.serialize()));
}

TEST(ManifestTest, PartDigestsMustBeAscendingTilesOfTheCheckpoint) {
  Manifest manifest = make_manifest();
  manifest.part_digests = {{2, {1}}, {0, {1}}};
  EXPECT_FALSE(Manifest::parse(manifest.serialize()));
  manifest.part_digests = {{4, {1}}};
  EXPECT_FALSE(Manifest::parse(manifest.serialize()));
}

}  // namespace
}  // namespace rekindle
