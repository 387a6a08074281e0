#include <fcntl.h>

#include "tests/store/store_fixture.h"

namespace rekindle::store {
namespace {

using ::testing::HasSubstr;

class PublishTest : public ::testing::TestWithParam<Adopt> {
 protected:
  PublishTest() { store_ = open_store(temp_.path() / "store"); }
  fs::path source() const { return temp_.path() / "source"; }
  Result<std::shared_ptr<const StoredVersion>> publish_source(std::uint64_t version) {
    return publish(*store_, {"m", version}, source(), GetParam());
  }
  bool nothing_staged() const { return fs::is_empty(temp_.path() / "store" / "staging"); }

  TempDirectory temp_;
  std::unique_ptr<SegmentStore> store_;
};

INSTANTIATE_TEST_SUITE_P(CopyAndLink, PublishTest,
                         ::testing::Values(Adopt::kCopy, Adopt::kLinkWhenPossible),
                         [](const auto& p) { return p.param == Adopt::kCopy ? "Copy" : "Link"; });

TEST_P(PublishTest, TheCopyIsTheFilesByteForByteAndVerifies) {
  write_checkpoint(source(), 7);
  const auto version = publish_source(41);
  ASSERT_TRUE(version) << version.error().message();
  const Manifest& manifest = (*version)->manifest;
  ASSERT_EQ(manifest.layout.segments().size(), 3u);
  for (const char* name :
       {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}) {
    EXPECT_EQ(read_bytes((*version)->directory / name), read_bytes(source() / name));
  }
  EXPECT_EQ(manifest.layout.segments()[2].name, "rekindle-files.safetensors");
  EXPECT_TRUE(safetensors::read_header((*version)->directory / "rekindle-files.safetensors"));
  EXPECT_TRUE(verify_version(**version, 2, nullptr));
  EXPECT_TRUE(nothing_staged());
  EXPECT_EQ(store_->used_bytes(), manifest.layout.segment_bytes());

  // Small files are tensors; README.md is none of them.
  const TensorSet& tensors = manifest.checkpoint->tensors;
  for (const char* name : {"config.json", "1_Pooling/config.json", "vocab.txt"}) {
    const auto index = tensors.find(std::string(kFileTensorPrefix) + name);
    ASSERT_TRUE(index) << name;
    const auto bytes = (*version)->array(manifest.layout.entries_of(*index)[0]);
    EXPECT_EQ(std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()),
              read_bytes(source() / name));
  }
  EXPECT_EQ(tensors.size(), 6u + 3u);
}

TEST_P(PublishTest, DigestsAreThoseOfEachTileInItsTensor) {
  write_checkpoint(source(), 7);
  const auto version = *publish_source(41);
  const Checkpoint& checkpoint = *version->manifest.checkpoint;
  for (TileIndex tile = 0; tile < checkpoint.tiles.tile_count(); ++tile) {
    const TensorIndex tensor = checkpoint.tiles.tensor_of(tile);
    const TensorInfo& info = checkpoint.tensors[tensor];
    const auto bytes = version->array(version->manifest.layout.entries_of(tensor)[0]);
    const auto packed = test::naive_extract(checkpoint.tiles.tile_box(tile), Box::whole(info.shape),
                                            bytes, dtype_size_bytes(info.dtype));
    EXPECT_EQ(checkpoint.tile_digests[tile],
              xxh3_64(packed, tile_seed(tensor, tile - checkpoint.tiles.first_tile(tensor))));
  }
}

TEST_P(PublishTest, TheSameVersionTwiceIsOneCopyAndAnotherRootIsDenied) {
  write_checkpoint(source(), 7);
  const auto first = *publish_source(41);
  const auto again = publish_source(41);
  ASSERT_TRUE(again) << again.error().message();
  EXPECT_EQ(*again, first);
  EXPECT_EQ(store_->versions().size(), 1u);

  fs::remove_all(source());
  write_checkpoint(source(), 8);
  const auto other = publish_source(41);
  ASSERT_FALSE(other);
  EXPECT_EQ(other.error().code(), ErrorCode::kDenied);
  EXPECT_THAT(other.error().message(), HasSubstr(first->manifest.checkpoint->root.hex()));
  EXPECT_TRUE(publish_source(42));
  EXPECT_EQ(store_->versions().size(), 2u);
  EXPECT_TRUE(nothing_staged());
}

TEST_P(PublishTest, WhatIsStagedAndDroppedLeavesNothing) {
  write_checkpoint(source(), 7);
  const fs::path paths[] = {source()};
  {
    const auto staged = store_->stage({"m", 1}, paths, GetParam(), nullptr);
    ASSERT_TRUE(staged);
    EXPECT_GT(store_->used_bytes(), 0u);
    EXPECT_TRUE(store_->find({"m", 1}).empty());
  }
  EXPECT_EQ(store_->used_bytes(), 0u);
  EXPECT_TRUE(nothing_staged());
  auto staged = *store_->stage({"m", 1}, paths, GetParam(), nullptr);
  store_->discard_staged(staged);
  EXPECT_TRUE(nothing_staged());
  EXPECT_TRUE(fs::exists(source() / "model-00001-of-00002.safetensors"));
}

TEST_P(PublishTest, ProgressEndsAtTheTotal) {
  write_checkpoint(source(), 7);
  const fs::path paths[] = {source()};
  PublishProgress last;
  std::uint64_t calls = 0;
  const auto staged =
      store_->stage({"m", 1}, paths, GetParam(), [&](const PublishProgress& progress) {
        EXPECT_GT(progress.bytes_done, last.bytes_done);
        last = progress;
        ++calls;
      });
  ASSERT_TRUE(staged);
  EXPECT_GT(calls, 1u);
  EXPECT_EQ(last.bytes_done, last.bytes_total);
  EXPECT_EQ(last.bytes_total, store_->staged_manifest(**staged).checkpoint->tensors.total_bytes());
}

TEST_P(PublishTest, ASourceThatIsTruncatedMeanwhileIsAnErrorNotACrash) {
  write_safetensors(source() / "a.safetensors", {{"w", DType::kU8, {64 << 20}}}, 1);
  const fs::path paths[] = {source()};
  const auto staged = store_->stage({"m", 1}, paths, GetParam(), [&](const PublishProgress&) {
    fs::resize_file(source() / "a.safetensors", 4096);
  });
  ASSERT_FALSE(staged);
  EXPECT_EQ(staged.error().code(), ErrorCode::kCorrupt);
  EXPECT_THAT(staged.error().message(), HasSubstr("truncated"));
  EXPECT_TRUE(nothing_staged());
  EXPECT_EQ(store_->used_bytes(), 0u);
}

TEST_P(PublishTest, ASourceThatIsWrittenToMeanwhileIsAnError) {
  write_safetensors(source() / "a.safetensors", {{"w", DType::kU8, {32 << 20}}}, 1);
  const fs::path paths[] = {source()};
  bool written = false;
  const auto staged = store_->stage({"m", 1}, paths, GetParam(), [&](const PublishProgress&) {
    if (written) return;
    written = true;
    ::usleep(20'000);  // past the clock tick of the file's time stamp
    const int fd = ::open((source() / "a.safetensors").c_str(), O_WRONLY);
    EXPECT_EQ(::pwrite(fd, "x", 1, 5000), 1);
    ::close(fd);
  });
  ASSERT_FALSE(staged);
  EXPECT_EQ(staged.error().code(), ErrorCode::kCorrupt);
  EXPECT_THAT(staged.error().message(), HasSubstr("changed while it was published"));
}

TEST_P(PublishTest, BadFilesAreNamed) {
  EXPECT_THAT(publish_source(1).error().message(), HasSubstr("no such file"));
  write_bytes(source() / "bad.safetensors", std::string("\x10\0\0\0\0\0\0\0{}", 10));
  const auto bad = publish_source(1);
  ASSERT_FALSE(bad);
  EXPECT_EQ(bad.error().code(), ErrorCode::kInvalid);
  EXPECT_THAT(bad.error().message(), HasSubstr("bad.safetensors"));
  fs::remove(source() / "bad.safetensors");
  write_safetensors(source() / "a.safetensors", {{"w", DType::kU8, {4}}}, 1);
  write_safetensors(source() / "b.safetensors", {{"w", DType::kU8, {4}}}, 2);
  EXPECT_THAT(publish_source(1).error().message(), HasSubstr("'w' appears twice"));
  EXPECT_FALSE(publish(*store_, {"../m", 1}, source()));
}

TEST_P(PublishTest, AnIndexNamesTheFilesAndMissingOnesAreNamed) {
  write_checkpoint(source(), 7);
  write_safetensors(source() / "consolidated.safetensors", {{"other", DType::kU8, {4}}}, 1);
  write_bytes(source() / "model.safetensors.index.json",
              R"({"metadata":{},"weight_map":{"scalar":"model-00001-of-00002.safetensors"}})");
  const auto version = publish_source(1);
  ASSERT_TRUE(version) << version.error().message();
  EXPECT_FALSE((*version)->manifest.checkpoint->tensors.find("other"));
  EXPECT_FALSE((*version)->manifest.checkpoint->tensors.find("lm_head.weight"));
  EXPECT_FALSE((*version)->manifest.checkpoint->tensors.find(
      "__rekindle_file__/model.safetensors.index.json"));
  const auto write_index = [&](const std::string& file) {
    write_bytes(source() / "model.safetensors.index.json",
                R"({"weight_map":{"w":")" + file + "\"}}");
  };
  write_index("gone.safetensors");
  EXPECT_THAT(publish_source(2).error().message(), HasSubstr("gone.safetensors"));
  for (const char* bad :
       {"../x.safetensors", "/etc/passwd", "sub/x.safetensors", ".x.safetensors", ""}) {
    write_index(bad);
    EXPECT_EQ(publish_source(2).error().code(), ErrorCode::kInvalid) << bad;
  }
}

TEST_P(PublishTest, BeyondTheBudgetNamesTheBytesMissingAndKeepsWhatIsThere) {
  write_checkpoint(source(), 7);
  store_.reset();
  store_ = open_store(temp_.path() / "store", 9'000'000);
  ASSERT_TRUE(publish_source(1));
  const auto second = publish_source(2);
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().code(), ErrorCode::kExhausted);
  const std::uint64_t bytes = (*store_->versions().at(0)).manifest.layout.segment_bytes();
  EXPECT_THAT(second.error().message(),
              HasSubstr(fmt::format("{} are missing", 2 * bytes - 9'000'000)));
  EXPECT_EQ(store_->versions().size(), 1u);
}

TEST_P(PublishTest, AShardIsRefusedAsACheckpoint) {
  write_checkpoint(source(), 7);
  const auto version = *publish_source(1);
  const Checkpoint& checkpoint = *version->manifest.checkpoint;
  auto pending =
      *store_->begin(version->manifest.checkpoint, pack(checkpoint, shard_boxes(checkpoint)));
  fill_all(*pending, *version);
  const auto shard = *store_->commit(std::move(pending));
  const auto refused = publish(*store_, {"m", 2}, shard->directory, GetParam());
  ASSERT_FALSE(refused);
  EXPECT_THAT(refused.error().message(), HasSubstr("is a shard"));
}

TEST_P(PublishTest, APulledDirectoryPublishesAgainWithTheSameTensors) {
  write_checkpoint(source(), 7);
  const auto version = *publish_source(1);
  const Checkpoint& checkpoint = *version->manifest.checkpoint;
  TempDirectory other;
  const auto second = open_store(other.path() / "s");
  auto pending =
      *second->begin(version->manifest.checkpoint, pack(checkpoint, all_boxes(checkpoint)));
  fill_all(*pending, *version);
  const auto pulled = *second->commit(std::move(pending));
  const auto again = publish(*second, {"m", 2}, pulled->directory, GetParam());
  ASSERT_TRUE(again) << again.error().message();
  EXPECT_EQ((*again)->manifest.checkpoint->root, checkpoint.root);
}

TEST(PublishLinkTest, OwnFilesOnTheSameFileSystemAreLinkedAndOthersCopied) {
  TempDirectory temp;
  const auto store = open_store(temp.path() / "store");
  const fs::path file = temp.path() / "source" / "a.safetensors";
  write_safetensors(file, {{"w", DType::kU8, {4}}}, 1);
  const auto links = [&] { return fs::hard_link_count(file); };
  ASSERT_TRUE(publish(*store, {"m", 1}, file, Adopt::kCopy));
  EXPECT_EQ(links(), 1u);
  ASSERT_TRUE(publish(*store, {"m", 2}, file, Adopt::kLinkWhenPossible));
  EXPECT_EQ(links(), 2u);
  ASSERT_EQ(::chmod(file.c_str(), 0664), 0);  // someone else may write to it
  ASSERT_TRUE(publish(*store, {"m", 3}, file, Adopt::kLinkWhenPossible));
  EXPECT_EQ(links(), 2u);
  ASSERT_TRUE(store->retire({"m", 2}));
  EXPECT_EQ(links(), 1u);
}

TEST(PublishLinkTest, FilesThroughSymbolicLinksKeepTheirName) {
  TempDirectory temp;  // as a hub cache: names are links to blobs
  const auto store = open_store(temp.path() / "store");
  write_safetensors(temp.path() / "blobs" / "abcdef", {{"w", DType::kU8, {4}}}, 1);
  fs::create_directories(temp.path() / "snapshot");
  fs::create_symlink("../blobs/abcdef", temp.path() / "snapshot" / "model.safetensors");
  for (const Adopt adopt : {Adopt::kCopy, Adopt::kLinkWhenPossible}) {
    const auto version =
        publish(*store, {"m", static_cast<std::uint64_t>(adopt)}, temp.path() / "snapshot", adopt);
    ASSERT_TRUE(version) << version.error().message();
    EXPECT_TRUE(
        fs::is_regular_file(fs::symlink_status((*version)->directory / "model.safetensors")));
  }
}

}  // namespace
}  // namespace rekindle::store
