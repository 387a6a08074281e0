#include <fcntl.h>

#include "tests/store/store_fixture.h"

namespace rekindle::store {
namespace {

using ::testing::HasSubstr;

class VerifyTest : public StoreTest {
 protected:
  // Flips a bit of a file behind the store's back.
  static void damage(const fs::path& path, std::uint64_t offset) {
    const int fd = ::open(path.c_str(), O_RDWR);
    ASSERT_GE(fd, 0);
    char byte = 0;
    ASSERT_EQ(::pread(fd, &byte, 1, static_cast<off_t>(offset)), 1);
    byte = static_cast<char>(byte ^ 0x40);
    ASSERT_EQ(::pwrite(fd, &byte, 1, static_cast<off_t>(offset)), 1);
    ::close(fd);
  }
  const LayoutEntry& entry(const StoredVersion& version, const char* tensor,
                           std::size_t box = 0) const {
    return version.manifest.layout.entries_of(*checkpoint()->tensors.find(tensor))[box];
  }
  static fs::path file_of(const StoredVersion& version, const LayoutEntry& entry) {
    return version.directory / version.manifest.layout.segments()[entry.segment].name;
  }
};

TEST_F(VerifyTest, NamesTheFirstBadTensorTileAndOffsetAndCountsTheRest) {
  const LayoutEntry& first = entry(*source_, "embed.weight");
  const LayoutEntry& later = entry(*source_, "lm_head.weight");
  // embed.weight is [1000, 512] BF16: tiles of [1000, 32], 64 B runs; byte 130 is in tile 2.
  damage(file_of(*source_, first), first.offset_bytes + 130);
  damage(file_of(*source_, later), later.offset_bytes + (2 << 20));
  const auto result = verify_version(*source_, 2, nullptr);
  ASSERT_FALSE(result);
  EXPECT_EQ(result.error().code(), ErrorCode::kCorrupt);
  EXPECT_THAT(result.error().message(), HasSubstr("org/model@1"));
  EXPECT_THAT(result.error().message(), HasSubstr("'embed.weight' tile 2 [0:1000, 64:96]"));
  EXPECT_THAT(result.error().message(),
              HasSubstr(fmt::format("offset {} of model-00001", first.offset_bytes + 128)));
  EXPECT_THAT(result.error().message(), HasSubstr("(2 of "));
}

TEST_F(VerifyTest, EveryPartOfAShardIsChecked) {
  const auto version = pull(shard_boxes(*checkpoint()));
  for (const LayoutEntry& e : version->manifest.layout.entries()) {
    if (e.box.empty()) continue;
    const std::uint64_t bytes =
        e.box.elements() * dtype_size_bytes(checkpoint()->tensors[e.tensor].dtype);
    for (const std::uint64_t at : {std::uint64_t{0}, bytes / 2, bytes - 1}) {
      damage(file_of(*version, e), e.offset_bytes + at);
      EXPECT_FALSE(verify_version(*version, 1, nullptr))
          << checkpoint()->tensors[e.tensor].name << " " << at;
      damage(file_of(*version, e), e.offset_bytes + at);
    }
  }
  EXPECT_TRUE(verify_version(*version, 1, nullptr));
}

TEST_F(VerifyTest, RightBytesInTheWrongPlaceDoNotVerify) {
  TempDirectory temp;
  const auto store = open_store(temp.path() / "s");
  write_safetensors(temp.path() / "a.safetensors",
                    {{"a", DType::kU8, {1 << 20}}, {"b", DType::kU8, {1 << 20}}}, 1);
  const auto version = *publish(*store, {"m", 1}, temp.path() / "a.safetensors");
  const fs::path file = version->directory / "a.safetensors";
  std::string bytes = read_bytes(file);
  const std::size_t data = bytes.size() - (2 << 20);
  std::swap_ranges(bytes.begin() + static_cast<std::ptrdiff_t>(data),
                   bytes.begin() + static_cast<std::ptrdiff_t>(data + (1 << 20)),
                   bytes.begin() + static_cast<std::ptrdiff_t>(data + (1 << 20)));
  write_bytes(file, bytes);
  EXPECT_THAT(verify_version(*version, 1, nullptr).error().message(),
              HasSubstr("(2 of 2 tiles are bad)"));
}

TEST_F(VerifyTest, ASegmentTruncatedUnderTheMappingIsAnErrorNotACrash) {
  const fs::path file = source_->directory / "model-00001-of-00002.safetensors";
  const std::uint64_t size = fs::file_size(file);
  fs::resize_file(file, size / 2);
  const auto result = verify_version(*source_, 2, nullptr);
  ASSERT_FALSE(result);
  EXPECT_EQ(result.error().code(), ErrorCode::kCorrupt);
  EXPECT_THAT(result.error().message(), HasSubstr("truncated"));
}

TEST_F(VerifyTest, ASegmentTruncatedInTheMiddleOfVerifyingIsAnErrorNotACrash) {
  const fs::path file = source_->directory / "model-00002-of-00002.safetensors";
  const auto result =
      verify_version(*source_, 1, [&](const PublishProgress&) { fs::resize_file(file, 4096); });
  ASSERT_FALSE(result);
  EXPECT_EQ(result.error().code(), ErrorCode::kCorrupt);
  EXPECT_THAT(result.error().message(), HasSubstr("truncated"));
}

TEST_F(VerifyTest, ProgressEndsAtTheTotal) {
  PublishProgress last;
  ASSERT_TRUE(
      verify_version(*source_, 2, [&](const PublishProgress& progress) { last = progress; }));
  EXPECT_EQ(last.bytes_done, last.bytes_total);
  EXPECT_GT(last.bytes_total, 0u);
}

TEST_F(VerifyTest, OpensACopyWithoutItsStore) {
  for (const fs::path& path : {source_->directory, source_->directory / "rekindle.manifest"}) {
    const auto version = open_version(path);
    ASSERT_TRUE(version) << version.error().message();
    EXPECT_EQ(version->manifest.checkpoint->root, checkpoint()->root);
    EXPECT_TRUE(verify_version(*version, 1, nullptr));
  }
  EXPECT_EQ(open_version(source_path()).error().code(), ErrorCode::kNotFound);
  EXPECT_EQ(open_version(source_path() / "config.json").error().code(), ErrorCode::kInvalid);
}

TEST_F(VerifyTest, AHeaderThatContradictsTheManifestIsCorrupt) {
  const auto version = pull(all_boxes(*checkpoint()));
  const fs::path file = version->directory / version->manifest.layout.segments()[0].name;
  std::string bytes = read_bytes(file);
  const auto at = bytes.find("embed.weight");
  ASSERT_NE(at, std::string::npos);
  bytes[at] = 'E';
  write_bytes(file, bytes);
  EXPECT_THAT(open_version(version->directory).error().message(), HasSubstr("'embed.weight'"));
}

TEST_F(VerifyTest, ATileSpreadOverSeveralBoxesVerifiesByThePublishersDigest) {
  const TensorIndex tensor = *checkpoint()->tensors.find("lm_head.weight");
  const std::vector<TensorBox> boxes = {{tensor, {{0, 0}, {3000, 123}}},
                                        {tensor, {{0, 123}, {3000, 577}}}};
  const auto version = pull(boxes);
  EXPECT_TRUE(version->manifest.part_digests.empty());
  EXPECT_TRUE(verify_version(*version, 1, nullptr));
  const LayoutEntry& second = entry(*version, "lm_head.weight", 1);
  damage(file_of(*version, second), second.offset_bytes + 7);
  EXPECT_FALSE(verify_version(*version, 1, nullptr));
}

}  // namespace
}  // namespace rekindle::store
