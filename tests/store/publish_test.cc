#include <algorithm>
#include <atomic>

#include <fcntl.h>
#include <sys/mman.h>

#include "src/base/blake3.h"
#include "tests/store/store_fixture.h"

namespace rekindle::store {
namespace {

using ::testing::HasSubstr;

class PublishTest : public ::testing::Test {
 protected:
  PublishTest() { store_ = open_store(temp_.path() / "store"); }
  fs::path source() const { return temp_.path() / "source"; }
  Result<std::shared_ptr<const StoredVersion>> publish_source(std::uint64_t version) {
    return publish(*store_, {"m", version}, source());
  }
  bool nothing_staged() const { return fs::is_empty(temp_.path() / "store" / "staging"); }

  TempDirectory temp_;
  std::unique_ptr<SegmentStore> store_;
};

TEST_F(PublishTest, TheCopyIsTheFilesByteForByteAndVerifies) {
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

TEST_F(PublishTest, DigestsAreThoseOfEachTileInItsTensor) {
  write_checkpoint(source(), 7);
  const auto version = *publish_source(41);
  const Checkpoint& checkpoint = *version->manifest.checkpoint;
  for (TileIndex tile = 0; tile < checkpoint.tiles.tile_count(); ++tile) {
    const TensorIndex tensor = checkpoint.tiles.tensor_of(tile);
    const TensorInfo& info = checkpoint.tensors[tensor];
    const auto bytes = version->array(version->manifest.layout.entries_of(tensor)[0]);
    const auto packed = test::naive_extract(checkpoint.tiles.tile_box(tile), Box::whole(info.shape),
                                            bytes, dtype_size_bytes(info.dtype));
    EXPECT_EQ(checkpoint.tile_digests[tile], blake3(packed));
  }
}

TEST_F(PublishTest, TheSameVersionTwiceIsOneCopyAndAnotherRootIsDenied) {
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

TEST_F(PublishTest, WhatIsStagedAndDroppedLeavesNothing) {
  write_checkpoint(source(), 7);
  const fs::path paths[] = {source()};
  {
    const auto staged = store_->stage({"m", 1}, paths, nullptr);
    ASSERT_TRUE(staged);
    EXPECT_GT(store_->used_bytes(), 0u);
    EXPECT_TRUE(store_->find({"m", 1}).empty());
  }
  EXPECT_EQ(store_->used_bytes(), 0u);
  EXPECT_TRUE(nothing_staged());
  auto staged = *store_->stage({"m", 1}, paths, nullptr);
  store_->discard_staged(staged);
  EXPECT_TRUE(nothing_staged());
  EXPECT_TRUE(fs::exists(source() / "model-00001-of-00002.safetensors"));
}

TEST_F(PublishTest, ProgressEndsAtTheTotal) {
  write_checkpoint(source(), 7);
  const fs::path paths[] = {source()};
  PublishProgress last;
  std::uint64_t calls = 0;
  const auto staged = store_->stage({"m", 1}, paths, [&](const PublishProgress& progress) {
    EXPECT_GT(progress.bytes_done, last.bytes_done);
    last = progress;
    ++calls;
  });
  ASSERT_TRUE(staged);
  EXPECT_GT(calls, 1u);
  EXPECT_EQ(last.bytes_done, last.bytes_total);
  EXPECT_EQ(last.bytes_total, store_->staged_manifest(**staged).checkpoint->tensors.total_bytes());
}

TEST_F(PublishTest, ASourceThatIsTruncatedMeanwhileIsAnErrorNotACrash) {
  write_safetensors(source() / "a.safetensors", {{"w", DType::kU8, {64 << 20}}}, 1);
  const fs::path paths[] = {source()};
  const auto staged = store_->stage({"m", 1}, paths, [&](const PublishProgress&) {
    fs::resize_file(source() / "a.safetensors", 4096);
  });
  ASSERT_FALSE(staged);
  EXPECT_EQ(staged.error().code(), ErrorCode::kCorrupt);
  EXPECT_THAT(staged.error().message(), HasSubstr("truncated"));
  EXPECT_TRUE(nothing_staged());
  EXPECT_EQ(store_->used_bytes(), 0u);
}

TEST_F(PublishTest, ASourceThatIsWrittenToMeanwhileIsAnError) {
  write_safetensors(source() / "a.safetensors", {{"w", DType::kU8, {32 << 20}}}, 1);
  const fs::path paths[] = {source()};
  bool written = false;
  const auto staged = store_->stage({"m", 1}, paths, [&](const PublishProgress&) {
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

TEST_F(PublishTest, BadFilesAreNamed) {
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
  fs::remove(source() / "b.safetensors");
  write_bytes(source() / "config.json", "{}");
  write_bytes(source() / "Config.json", "{}");
  EXPECT_THAT(publish_source(1).error().message(), HasSubstr("'Config.json' and 'config.json'"));
  EXPECT_THAT(publish_source(1).error().message(), HasSubstr(source().string()));
}

TEST_F(PublishTest, AnIndexNamesTheFilesAndMissingOnesAreNamed) {
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

TEST_F(PublishTest, BeyondTheBudgetNamesTheBytesMissingAndKeepsWhatIsThere) {
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

TEST_F(PublishTest, AShardIsRefusedAsACheckpoint) {
  write_checkpoint(source(), 7);
  const auto version = *publish_source(1);
  const Checkpoint& checkpoint = *version->manifest.checkpoint;
  auto pending =
      *store_->begin(version->manifest.checkpoint, pack(checkpoint, shard_boxes(checkpoint)));
  fill_all(*pending, *version);
  const auto shard = *store_->commit(std::move(pending));
  const auto refused = publish(*store_, {"m", 2}, shard->directory);
  ASSERT_FALSE(refused);
  EXPECT_THAT(refused.error().message(), HasSubstr("is a shard"));
}

// Its small files are tensors of a name that only the store may give.
TEST_F(PublishTest, S8ATensorNamedLikeASmallFileIsRefused) {
  const std::string name = std::string(kFileTensorPrefix) + "config.json";
  write_checkpoint(source(), 7);
  write_safetensors(source() / "extra.safetensors",
                    {{"w", DType::kU8, {4}}, {name, DType::kU8, {8}}}, 1);
  const auto refused = publish_source(1);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), ErrorCode::kInvalid);
  EXPECT_THAT(refused.error().message(),
              HasSubstr("extra.safetensors has a tensor named '" + name));
  EXPECT_TRUE(store_->versions().empty());
  EXPECT_TRUE(nothing_staged());
}

TEST_F(PublishTest, B1WhatItsOwnerDoesToTheFilesLaterDoesNotReachTheCopy) {
  write_checkpoint(source(), 7);
  const fs::path file = source() / "model-00001-of-00002.safetensors";
  const std::string published = read_bytes(file);
  const int fd = ::open(file.c_str(), O_RDWR);
  void* const before = ::mmap(nullptr, published.size(), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  const auto version = publish_source(1);
  ASSERT_TRUE(version) << version.error().message();
  std::memset(before, 'x', published.size());
  ASSERT_EQ(::pwrite(fd, "yyyy", 4, 100'000), 4);
  ASSERT_EQ(::ftruncate(fd, 200'000), 0);
  ::close(fd);
  ::munmap(before, published.size());
  EXPECT_EQ(read_bytes((*version)->directory / file.filename()), published);
  EXPECT_TRUE(verify_version(**version, 2, nullptr));
  EXPECT_EQ((*version)->verification->state(), CopyState::kVerified);
}

TEST(PublishNamesTest, FilesThroughSymbolicLinksKeepTheirName) {
  TempDirectory temp;  // as a hub cache: names are links to blobs
  const auto store = open_store(temp.path() / "store");
  const fs::path model = temp.path() / "models--org--m";
  write_safetensors(model / "blobs" / "abcdef", {{"w", DType::kU8, {4}}}, 1);
  const fs::path snapshot = model / "snapshots" / "revision";
  fs::create_directories(snapshot);
  fs::create_symlink("../../blobs/abcdef", snapshot / "model.safetensors");
  fs::create_directory_symlink(snapshot, temp.path() / "link");
  const auto version = publish(*store, {"m", 1}, temp.path() / "link");
  ASSERT_TRUE(version) << version.error().message();
  EXPECT_TRUE(fs::is_regular_file(fs::symlink_status((*version)->directory / "model.safetensors")));
}

// Everybody who may pull the version would get the file.
TEST_F(PublishTest, NoLinkOfACheckpointLeadsOutOfIt) {
  write_checkpoint(source(), 7);
  const fs::path secret = temp_.path() / "secret";
  fs::create_directory(secret);
  std::ofstream(secret / "key.json") << "a key of this host";
  write_safetensors(secret / "other.safetensors", {{"o", DType::kU8, {4}}}, 1);
  const std::vector<std::pair<fs::path, fs::path>> links{
      {source() / "tokenizer.json", "/etc/passwd"},
      {source() / "sub", secret},
      {source() / "x.txt", "../secret/key.json"},
      {source() / "more.safetensors", secret / "other.safetensors"}};
  for (const auto& [link, target] : links) {
    fs::create_symlink(target, link);
    const auto refused = publish_source(1);
    ASSERT_FALSE(refused) << link;
    EXPECT_EQ(refused.error().code(), ErrorCode::kDenied);
    EXPECT_THAT(refused.error().message(), HasSubstr(link.string()));
    EXPECT_THAT(refused.error().message(), HasSubstr("leads out of the checkpoint"));
    fs::remove(link);
  }
  EXPECT_TRUE(store_->versions().empty());
  fs::create_symlink("config.json", source() / "tokenizer.json");
  const auto within = publish_source(1);
  EXPECT_TRUE(within) << within.error().message();
}

// What a trainer fills: files that the store made and that others may still write to.
class FilledTest : public ::testing::Test {
 protected:
  void SetUp() override {
    store_ = open_store(temp_.path() / "store", 1 << 30, std::nullopt);
    fs::create_directory(directory_);
    tensors_ = *TensorSet::create(
        {{"a", DType::kF32, {300, 1000}}, {"b", DType::kU8, {50'000}}, {"s", DType::kI64, {}}});
    test::Rng rng(3);
    for (TensorIndex i = 0; i < tensors_.size(); ++i) {
      bytes_.push_back(test::random_bytes(rng, tensors_[i].size_bytes()));
    }
  }
  // Segments of the store with the bytes in them.
  FilledSegments fill() {
    std::vector<TensorBox> boxes;
    for (TensorIndex i = 0; i < tensors_.size(); ++i) {
      boxes.push_back({i, Box::whole(tensors_[i].shape)});
    }
    FilledSegments filled{tensors_, *pack_layout(tensors_, boxes, 1 << 30), {}};
    const auto specs = filled.packed.layout.segments();
    for (std::size_t i = 0; i < specs.size(); ++i) {
      auto segment = *store_->create_segment(directory_ / specs[i].name, specs[i].size_bytes);
      const std::string& header = filled.packed.headers[i];
      std::memcpy(segment->writable().data(), header.data(), header.size());
      filled.segments.push_back(std::move(segment));
    }
    for (const LayoutEntry& entry : filled.packed.layout.entries()) {
      std::memcpy(filled.segments[entry.segment]->writable().data() + entry.offset_bytes,
                  bytes_[entry.tensor].data(), bytes_[entry.tensor].size());
    }
    return filled;
  }
  void seal(FilledSegments& filled, bool stopped = false) {
    const std::atomic<bool> stop = stopped;
    const auto tiles = TileMap::create(filled.tensors);
    ASSERT_TRUE(tiles);
    for (std::uint32_t i = 0; i < filled.segments.size(); ++i) {
      auto sealed = seal_segment(filled, *tiles, i, stop);
      ASSERT_TRUE(sealed) << sealed.error().message();
      filled.sealed.push_back(*std::move(sealed));
    }
  }
  Result<std::shared_ptr<const StoredVersion>> publish_filled(FilledSegments filled) {
    TRY(auto staged, store_->stage_segments({"t", 1}, std::move(filled), nullptr));
    return store_->commit_staged(std::move(staged));
  }
  void expect_published_bytes(const StoredVersion& version) {
    for (const LayoutEntry& entry : version.manifest.layout.entries()) {
      const auto array = version.array(entry);
      EXPECT_TRUE(std::ranges::equal(array, bytes_[entry.tensor])) << tensors_[entry.tensor].name;
    }
    EXPECT_TRUE(verify_version(version, 2, nullptr));
    EXPECT_EQ(version.verification->state(), CopyState::kVerified);
  }
  static ino_t inode_of(const fs::path& path) {
    struct stat status {};
    EXPECT_EQ(::stat(path.c_str(), &status), 0) << path;
    return status.st_ino;
  }

  TempDirectory temp_;
  const fs::path directory_ = temp_.path() / "filled";
  std::unique_ptr<SegmentStore> store_;
  TensorSet tensors_ = *TensorSet::create({});
  std::vector<std::vector<std::byte>> bytes_;
};

TEST_F(FilledTest, AFileThatNobodyCanWriteToIsTakenOverWithoutACopy) {
  auto filled = fill();
  const fs::path path = filled.segments[0]->path();
  const ino_t inode = inode_of(path);
  const auto version = publish_filled(std::move(filled));
  ASSERT_TRUE(version) << version.error().message();
  EXPECT_FALSE(fs::exists(path));
  EXPECT_EQ(inode_of((*version)->segments[0]->path()), inode);
  expect_published_bytes(**version);
  // Nothing of this process can write to it either.
  EXPECT_NE(*(*version)->segments[0]->lease(), 0u);
  (*version)->segments[0]->end_lease();
}

TEST_F(FilledTest, S7WhoKeepsADescriptorCannotChangeWhatIsServed) {
  auto filled = fill();
  const fs::path path = filled.segments[0]->path();
  const int kept = ::open(path.c_str(), O_RDWR);
  const ino_t inode = inode_of(path);
  const auto version = publish_filled(std::move(filled));
  ASSERT_TRUE(version) << version.error().message();
  EXPECT_NE(inode_of((*version)->segments[0]->path()), inode);
  const std::string wrong(4096, 'w');
  for (off_t at = 0; at < 1'000'000; at += 4096) ::pwrite(kept, wrong.data(), wrong.size(), at);
  expect_published_bytes(**version);
  ::close(kept);
}

TEST_F(FilledTest, S7WhoKeepsAMappingCannotChangeWhatIsServed) {
  auto filled = fill();
  const fs::path path = filled.segments[0]->path();
  const std::uint64_t size = filled.segments[0]->bytes().size();
  const int fd = ::open(path.c_str(), O_RDWR);
  void* const kept = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  ::close(fd);
  ASSERT_NE(kept, MAP_FAILED);
  const auto version = publish_filled(std::move(filled));
  ASSERT_TRUE(version) << version.error().message();
  std::memset(kept, 'w', size);
  expect_published_bytes(**version);
  // Nor is the file used again, in which it would see the next version.
  ASSERT_TRUE(store_->remove_segment(path));
  EXPECT_EQ(store_->pooled_bytes(), 0u);
  ::munmap(kept, size);
}

TEST_F(FilledTest, B1WhoOpensTheFileForWritingMeanwhileEndsThePublish) {
  auto filled = fill();
  const ino_t inode = inode_of(filled.segments[0]->path());
  bool opened = false;
  const auto staged =
      store_->stage_segments({"t", 1}, std::move(filled), [&](const PublishProgress&) {
        for (const auto& at : fs::recursive_directory_iterator(temp_.path() / "store")) {
          if (opened || !at.is_regular_file() || inode_of(at.path()) != inode) continue;
          opened = true;
          const int fd = ::open(at.path().c_str(), O_WRONLY | O_NONBLOCK);
          EXPECT_EQ(fd, -1);  // the kernel asks the holder of the lease first
        }
      });
  EXPECT_TRUE(opened);
  ASSERT_FALSE(staged);
  EXPECT_EQ(staged.error().code(), ErrorCode::kCorrupt);
  EXPECT_THAT(staged.error().message(), HasSubstr("was opened for writing while it was published"));
  EXPECT_TRUE(fs::is_empty(temp_.path() / "store" / "staging"));
}

TEST_F(FilledTest, ASealedSegmentGivesTheSameRootAndIsNotDigestedAgain) {
  const auto known = publish_filled(fill());
  ASSERT_TRUE(known) << known.error().message();
  const Digest root = (*known)->manifest.checkpoint->root;
  ASSERT_TRUE(store_->retire({"t", 1}));
  auto filled = fill();
  seal(filled);
  const auto version = publish_filled(filled);
  ASSERT_TRUE(version) << version.error().message();
  EXPECT_EQ((*version)->manifest.checkpoint->root, root);
  expect_published_bytes(**version);
  ASSERT_TRUE(store_->retire({"t", 1}));
  // A leaf that no byte has shows whose leaves count.
  filled = fill();
  seal(filled);
  auto other = std::make_shared<SealedSegment>(*filled.sealed[0]);
  ASSERT_FALSE(other->leaves.empty());
  other->leaves.begin()->second = Digest();
  filled.sealed[0] = std::move(other);
  const auto wrong = publish_filled(std::move(filled));
  ASSERT_TRUE(wrong) << wrong.error().message();
  EXPECT_NE((*wrong)->manifest.checkpoint->root, root);
}

TEST_F(FilledTest, TilesThatAStoppedSealLacksAreDigestedWhenTheSegmentIsStaged) {
  auto filled = fill();
  seal(filled, true);
  EXPECT_TRUE(filled.sealed[0]->leaves.empty());
  const auto version = publish_filled(std::move(filled));
  ASSERT_TRUE(version) << version.error().message();
  expect_published_bytes(**version);
}

TEST_F(FilledTest, B1WhoOpensASealedSegmentForWritingEndsThePublish) {
  auto filled = fill();
  seal(filled);
  const int fd = ::open(filled.segments[0]->path().c_str(), O_WRONLY);
  ASSERT_NE(fd, -1);  // when the lease has ended
  EXPECT_EQ(::pwrite(fd, "w", 1, 1'000'000), 1);
  ::close(fd);
  const auto version = publish_filled(std::move(filled));
  ASSERT_FALSE(version);
  EXPECT_EQ(version.error().code(), ErrorCode::kCorrupt);
  EXPECT_THAT(version.error().message(),
              HasSubstr("was opened for writing while it was published"));
  EXPECT_TRUE(fs::is_empty(temp_.path() / "store" / "staging"));
}

TEST_F(FilledTest, S7ASegmentThatSomebodyMayWriteToIsNotSealed) {
  auto filled = fill();
  const int kept = ::open(filled.segments[0]->path().c_str(), O_RDWR);
  const auto tiles = TileMap::create(tensors_);
  const std::atomic<bool> stop = false;
  const auto sealed = seal_segment(filled, *tiles, 0, stop);
  ASSERT_FALSE(sealed);
  EXPECT_EQ(sealed.error().code(), ErrorCode::kUnavailable);
  ::close(kept);
}

TEST_F(FilledTest, AHeaderThatWasOverwrittenIsRefused) {
  auto filled = fill();
  filled.segments[0]->writable()[20] ^= std::byte{1};
  const auto version = publish_filled(std::move(filled));
  ASSERT_FALSE(version);
  EXPECT_THAT(version.error().message(), HasSubstr("the header of segment"));
}

// The states of a copy, docs/internals/integrity.md.
class CopyStateTest : public StoreTest {
 protected:
  const StoredVersion& copy() const { return *source_; }
  CopyState state() const { return copy().verification->state(); }
  fs::path file() const { return copy().segments[0]->path(); }
};

TEST_F(CopyStateTest, WhatWasDigestedAtItsCommitIsVerifiedAndWhatWasFoundIsNot) {
  EXPECT_EQ(state(), CopyState::kVerified);
  const auto record = copy().verification->record();
  ASSERT_TRUE(record);
  EXPECT_EQ(record->root, copy().manifest.checkpoint->root);
  EXPECT_EQ(record->files.size(), copy().segments.size());
  EXPECT_EQ(pull(all_boxes(*checkpoint()))->verification->state(), CopyState::kVerified);
  reopen();
  const auto found = store_->versions().at(0);
  EXPECT_EQ(found->verification->state(), CopyState::kUnverified);
  const auto before = found->verification->stamp();
  ASSERT_TRUE(before);
  EXPECT_TRUE(found->verification->record(*before));
  EXPECT_EQ(found->verification->state(), CopyState::kVerified);
}

TEST_F(CopyStateTest, B1AnyChangeThroughTheFileSystemMakesItUnverified) {
  const auto expect_unverified = [&](const char* what, auto change) {
    const auto now = copy().verification->stamp();
    ASSERT_TRUE(now) << what;
    ASSERT_TRUE(copy().verification->record(*now)) << what;
    ASSERT_EQ(state(), CopyState::kVerified) << what;
    ::usleep(20'000);  // past the clock tick of the file's time stamp
    change();
    EXPECT_EQ(state(), CopyState::kUnverified) << what;
    EXPECT_FALSE(copy().verification->record()) << what;
  };
  expect_unverified("write", [&] {
    const int fd = ::open(file().c_str(), O_WRONLY);
    ASSERT_EQ(::pwrite(fd, "x", 1, 5000), 1);
    ::close(fd);
  });
  expect_unverified("a time stamp that is set back", [&] {
    struct stat status {};
    ASSERT_EQ(::stat(file().c_str(), &status), 0);
    const int fd = ::open(file().c_str(), O_WRONLY);
    ASSERT_EQ(::pwrite(fd, "y", 1, 5000), 1);
    const timespec times[] = {status.st_atim, status.st_mtim};
    ASSERT_EQ(::futimens(fd, times), 0);
    ::close(fd);
  });
  const std::string bytes = read_bytes(file());
  expect_unverified("truncation", [&] { fs::resize_file(file(), bytes.size() - 1); });
  fs::resize_file(file(), bytes.size());
  expect_unverified("replacement", [&] {
    write_bytes(file().string() + ".other", bytes);
    fs::rename(file().string() + ".other", file());
  });
  // The file that is mapped is not the one that has the name.
  const auto now = copy().verification->stamp();
  ASSERT_FALSE(now);
  EXPECT_EQ(now.error().code(), ErrorCode::kCorrupt);
}

TEST_F(CopyStateTest, WhatChangesWhileItIsReadIsNotRecorded) {
  reopen();
  const auto copy = publish(*store_, {"m", 2}, source_path());
  ASSERT_TRUE(copy);
  const auto before = *(*copy)->verification->stamp();
  ::usleep(20'000);
  const int fd = ::open((*copy)->segments[0]->path().c_str(), O_WRONLY);
  ASSERT_EQ(::pwrite(fd, "x", 1, 5000), 1);
  ::close(fd);
  EXPECT_FALSE((*copy)->verification->record(before));
  EXPECT_EQ((*copy)->verification->state(), CopyState::kUnverified);
}

TEST_F(CopyStateTest, AQuarantinedCopyStaysOne) {
  copy().verification->quarantine("tile 3 of tensor w");
  EXPECT_EQ(state(), CopyState::kQuarantined);
  EXPECT_EQ(copy().verification->why_quarantined(), "tile 3 of tensor w");
  const auto now = copy().verification->stamp();
  ASSERT_TRUE(now);
  EXPECT_FALSE(copy().verification->record(*now));
  EXPECT_EQ(state(), CopyState::kQuarantined);
}

TEST_F(CopyStateTest, PublishingAgainReplacesACopyThatIsNotKnownToBeRight) {
  const std::string good = read_bytes(file());
  ::usleep(20'000);
  const int fd = ::open(file().c_str(), O_WRONLY);
  ASSERT_EQ(::pwrite(fd, "wrong", 5, 5000), 5);
  ::close(fd);
  const auto again = publish(*source_store_, id_, source_path());
  ASSERT_TRUE(again) << again.error().message();
  EXPECT_NE(*again, source_);
  EXPECT_EQ(read_bytes((*again)->segments[0]->path()), good);
  EXPECT_EQ((*again)->verification->state(), CopyState::kVerified);
  EXPECT_EQ(source_store_->versions().size(), 1u);
}

}  // namespace
}  // namespace rekindle::store
