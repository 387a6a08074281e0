// Files that somebody else writes to between the digests of their tiles and the commit. The writers
// are in this process: one that was forked from it would keep the store's own descriptors, too.
// The kernel tells of all writers alike.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "src/base/failpoint.h"
#include "src/base/unique_fd.h"
#include "src/store/write_watch.h"
#include "tests/store/store_fixture.h"

namespace rekindle::store {
namespace {

using ::testing::HasSubstr;

constexpr std::size_t kPageBytes = 4096;
constexpr off_t kSomewhere = 512 * 1024;

// Changes one byte by a write, and lets go of the file.
void overwrite(const fs::path& path, off_t offset = kSomewhere) {
  const UniqueFd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  char byte = 0;
  ASSERT_EQ(::pread(fd.get(), &byte, 1, offset), 1);
  byte = static_cast<char>(byte ^ 1);
  ASSERT_EQ(::pwrite(fd.get(), &byte, 1, offset), 1);
}

// A writable mapping without a descriptor. Its page was read first, so that on tmpfs no stamp shows
// what is stored in it.
class ForeignMapping {
 public:
  explicit ForeignMapping(const fs::path& path, off_t offset = kSomewhere)
      : in_page_(static_cast<std::size_t>(offset) % kPageBytes) {
    const UniqueFd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC));
    page_ = static_cast<char*>(::mmap(nullptr, kPageBytes, PROT_READ | PROT_WRITE, MAP_SHARED,
                                      fd.get(), offset - static_cast<off_t>(in_page_)));
    if (page_ == MAP_FAILED) throw std::runtime_error("mmap");
    seen_ = static_cast<volatile char*>(page_)[in_page_];
  }
  ~ForeignMapping() { ::munmap(page_, kPageBytes); }
  ForeignMapping(const ForeignMapping&) = delete;
  ForeignMapping& operator=(const ForeignMapping&) = delete;
  void store() { static_cast<volatile char*>(page_)[in_page_] = static_cast<char>(seen_ ^ 1); }

 private:
  const std::size_t in_page_;
  char* page_ = nullptr;
  char seen_ = 0;
};

void store_through_mapping(const fs::path& path) {
  ForeignMapping mapping(path);
  mapping.store();
}

class ForeignWriteTest : public StoreTest {
 protected:
  ~ForeignWriteTest() override { (void)arm_failpoints(""); }

  CopyState commit(std::unique_ptr<PendingVersion> pending) {
    auto version = store_->commit(std::move(pending));
    EXPECT_TRUE(version) << version.error().message();
    if (!version) return CopyState::kQuarantined;
    committed_ = *version;
    return committed_->verification->state();
  }
  bool has_right_bytes() { return verify_version(*committed_, 2, nullptr).has_value(); }
  static fs::path file(const PendingVersion& pending) { return pending.mapped(0)->path(); }
  static LayoutTiles tiles(const PendingVersion& pending) {
    return tiles_of_layout(*pending.manifest().checkpoint, pending.manifest().layout);
  }
  // Where the first byte lies that the copy holds of a tile.
  static std::pair<std::uint32_t, off_t> place(const PendingVersion& pending, TileIndex tile) {
    const Checkpoint& checkpoint = *pending.manifest().checkpoint;
    const TensorIndex tensor = checkpoint.tiles.tensor_of(tile);
    for (const LayoutEntry& entry : pending.manifest().layout.entries_of(tensor)) {
      const auto part = intersect(entry.box, checkpoint.tiles.tile_box(tile));
      if (!part) continue;
      std::vector<StridedCopy> copies;
      strided_copies(*part, *part, entry.box, dtype_size_bytes(checkpoint.tensors[tensor].dtype),
                     copies);
      return {entry.segment, static_cast<off_t>(entry.offset_bytes + copies.at(0).dst_offset)};
    }
    throw std::runtime_error("the copy does not hold the tile");
  }
  // Every file of a publish that is not committed.
  std::vector<fs::path> staged_files() const {
    std::vector<fs::path> files;
    for (const auto& at : fs::recursive_directory_iterator(store_path() / "staging")) {
      if (at.is_regular_file() && at.path().extension() == ".safetensors") {
        files.push_back(at.path());
      }
    }
    return files;
  }
  // Publishes while `meddle` runs once, after all tiles were digested.
  auto stage_with(const std::function<void(const fs::path&)>& meddle) {
    const fs::path paths[] = {source_path()};
    return store_->stage(id_, paths, [&](const PublishProgress& progress) {
      if (progress.bytes_done == progress.bytes_total) meddle(staged_files().at(0));
    });
  }
  void expect_refused(const Result<std::shared_ptr<SegmentStore::Staged>>& staged) {
    ASSERT_FALSE(staged);
    EXPECT_EQ(staged.error().code(), ErrorCode::kCorrupt);
    EXPECT_THAT(staged.error().message(),
                HasSubstr("was opened for writing while it was published"));
    EXPECT_TRUE(fs::is_empty(store_path() / "staging"));
    EXPECT_EQ(store_->pooled_bytes(), 0u) << "its writer may come back";
  }
  void reopen_with_pool() {
    store_.reset();
    store_ = open_store(store_path(), 1 << 30, std::nullopt);
  }

  std::shared_ptr<const StoredVersion> committed_;
};

TEST_F(ForeignWriteTest, B1APullThatSomebodyWroteToAfterItsDigestsIsNotVerified) {
  auto pending = begin(all_boxes(*checkpoint()));
  fill_all(*pending, *source_);
  overwrite(file(*pending));
  EXPECT_EQ(commit(std::move(pending)), CopyState::kUnverified);
  EXPECT_FALSE(has_right_bytes()) << "or this test shows nothing";
}

TEST_F(ForeignWriteTest, B1APullThatSomebodyStoredToThroughAMappingIsNotVerified) {
  auto pending = begin(all_boxes(*checkpoint()));
  fill_all(*pending, *source_);
  store_through_mapping(file(*pending));
  EXPECT_EQ(commit(std::move(pending)), CopyState::kUnverified);
  EXPECT_FALSE(has_right_bytes()) << "or this test shows nothing";
}

TEST_F(ForeignWriteTest, B1APullThatSomebodyTruncatedAndMadeLongAgainIsNotVerified) {
  auto pending = begin(all_boxes(*checkpoint()));
  fill_all(*pending, *source_);
  const auto size = static_cast<off_t>(fs::file_size(file(*pending)));
  ASSERT_EQ(::truncate(file(*pending).c_str(), kSomewhere), 0);
  ASSERT_EQ(::truncate(file(*pending).c_str(), size), 0);
  EXPECT_EQ(commit(std::move(pending)), CopyState::kUnverified);
  EXPECT_FALSE(has_right_bytes()) << "or this test shows nothing";
}

TEST_F(ForeignWriteTest, B1AResumedPullThatSomebodyWroteToIsNotVerified) {
  auto pending = begin(all_boxes(*checkpoint()));
  fill_tiles(*pending, *source_, 0, 3);
  pending.reset();
  reopen();
  pending = begin(all_boxes(*checkpoint()));
  ASSERT_TRUE(pending->verified().test(0));
  const auto [segment, offset] = place(*pending, 0);
  ForeignMapping(pending->mapped(segment)->path(), offset).store();
  fill_tiles(*pending, *source_, 3, checkpoint()->tiles.tile_count());
  EXPECT_EQ(commit(std::move(pending)), CopyState::kUnverified);
  EXPECT_FALSE(has_right_bytes()) << "or this test shows nothing";
}

TEST_F(ForeignWriteTest, B1ACopyThatSomebodyWroteToWhileItWasMendedIsNotVerified) {
  auto copy = pull(all_boxes(*checkpoint()));
  const TileIndex bad = checkpoint()->tiles.tile_count() - 1;
  const auto aside = store_->set_aside(*copy, std::vector<TileIndex>{bad});
  ASSERT_TRUE(aside) << aside.error().message();
  copy.reset();
  auto pending = store_->begin(aside->checkpoint, aside->packed);
  ASSERT_TRUE(pending) << pending.error().message();
  store_through_mapping(file(**pending));
  fill_tiles(**pending, *source_, bad, bad + 1);
  EXPECT_EQ(commit(std::move(*pending)), CopyState::kUnverified);
  EXPECT_FALSE(has_right_bytes()) << "or this test shows nothing";
}

// A part of a tile has no published digest of its own: the store digests what the file holds when
// the last part has verified. Bytes that somebody has written before are then in that digest.
TEST_F(ForeignWriteTest, B1APartOfATileThatWasWrittenToBeforeItsMarkDoesNotBecomeItsOwnReference) {
  for (const bool through_mapping : {false, true}) {
    auto pending = begin(shard_boxes(*checkpoint()));
    const TileIndex part = tiles(*pending).partial.at(0);
    const auto [segment, offset] = place(*pending, part);
    const fs::path path = pending->mapped(segment)->path();
    fill_all(*pending, *source_);
    {
      std::optional<ForeignMapping> mapping;
      if (through_mapping) {
        mapping.emplace(path, offset).store();
      } else {
        overwrite(path, offset);
      }
      pending->mark_verified(part);
    }
    EXPECT_EQ(commit(std::move(pending)), CopyState::kUnverified);
    EXPECT_FALSE(verify_stored_tile(*committed_, part));
    committed_.reset();
    ASSERT_TRUE(store_->retire(id_));
  }
}

TEST_F(ForeignWriteTest, B1WhatTheNextLifeOfAPullFindsOfSuchPartsIsFetchedAgain) {
  for (const bool through_mapping : {false, true}) {
    auto pending = begin(shard_boxes(*checkpoint()));
    const LayoutTiles held = tiles(*pending);
    const TileIndex part = held.partial.at(0);
    const auto [segment, offset] = place(*pending, part);
    const fs::path path = pending->mapped(segment)->path();
    fill_all(*pending, *source_);
    {
      std::optional<ForeignMapping> mapping;
      if (through_mapping) {
        mapping.emplace(path, offset).store();
      } else {
        overwrite(path, offset);
      }
      pending->mark_verified(part);
    }
    pending.reset();
    reopen();
    pending = begin(shard_boxes(*checkpoint()));
    EXPECT_FALSE(pending->verified().test(part));
    fill_all(*pending, *source_);
    EXPECT_EQ(commit(std::move(pending)), CopyState::kVerified);
    EXPECT_TRUE(has_right_bytes());
    committed_.reset();
    ASSERT_TRUE(store_->retire(id_));
  }
}

TEST_F(ForeignWriteTest, B1APublishWhoseCopySomebodyWroteToFails) {
  reopen_with_pool();
  expect_refused(stage_with([](const fs::path& path) { overwrite(path); }));
}

TEST_F(ForeignWriteTest, B1APublishWhoseCopySomebodyStoredToThroughAMappingFails) {
  reopen_with_pool();
  expect_refused(stage_with([](const fs::path& path) { store_through_mapping(path); }));
}

TEST_F(ForeignWriteTest, B1APublishWhoseCopySomebodyMayWriteToFails) {
  reopen_with_pool();
  std::optional<ForeignMapping> kept;
  expect_refused(stage_with([&](const fs::path& path) { kept.emplace(path); }));
}

TEST_F(ForeignWriteTest, B1APublishWhoseCopySomebodyWroteToBeforeTheCommitFails) {
  const fs::path paths[] = {source_path()};
  auto staged = store_->stage(id_, paths, nullptr);
  ASSERT_TRUE(staged) << staged.error().message();
  store_through_mapping(staged_files().at(0));
  const auto version = store_->commit_staged(std::move(*staged));
  ASSERT_FALSE(version);
  EXPECT_EQ(version.error().code(), ErrorCode::kCorrupt);
  EXPECT_TRUE(store_->versions().empty());
}

TEST_F(ForeignWriteTest, WhatNobodyElseWroteToIsVerifiedAtItsCommit) {
  for (const auto& boxes : {all_boxes(*checkpoint()), shard_boxes(*checkpoint())}) {
    auto pending = begin(boxes);
    (void)read_bytes(file(*pending));
    fill_all(*pending, *source_);
    (void)read_bytes(file(*pending));
    EXPECT_EQ(commit(std::move(pending)), CopyState::kVerified);
    EXPECT_TRUE(has_right_bytes());
    committed_.reset();
    ASSERT_TRUE(store_->retire(id_));
  }
  const auto published = publish(*store_, id_, source_path());
  ASSERT_TRUE(published) << published.error().message();
  EXPECT_EQ((*published)->verification->state(), CopyState::kVerified);
}

TEST_F(ForeignWriteTest, SoIsAResumedPull) {
  auto pending = begin(shard_boxes(*checkpoint()));
  fill_tiles(*pending, *source_, 0, 3);
  pending.reset();
  pending = begin(shard_boxes(*checkpoint()));  // in the same process
  fill_tiles(*pending, *source_, 3, 6);
  pending.reset();
  reopen();
  pending = begin(shard_boxes(*checkpoint()));
  EXPECT_GT(pending->verified().count(), 0u);
  fill_all(*pending, *source_);
  EXPECT_EQ(commit(std::move(pending)), CopyState::kVerified);
}

TEST_F(ForeignWriteTest, SoIsACopyInFilesOfThePool) {
  reopen_with_pool();
  ino_t inode = 0;
  for (int i = 0; i < 3; ++i) {
    committed_.reset();
    if (i > 0) {
      ASSERT_TRUE(store_->retire(id_));
    }
    auto pending = begin(all_boxes(*checkpoint()));
    fill_all(*pending, *source_);
    EXPECT_EQ(commit(std::move(pending)), CopyState::kVerified);
    if (i > 0) {
      EXPECT_EQ(committed_->segments[0]->stamp()->inode, inode);
    }
    inode = committed_->segments[0]->stamp()->inode;
  }
}

TEST_F(ForeignWriteTest, SoIsAMendedCopy) {
  for (const auto& boxes : {all_boxes(*checkpoint()), shard_boxes(*checkpoint())}) {
    auto copy = pull(boxes);
    const auto aside = store_->set_aside(*copy, std::vector<TileIndex>{0});
    ASSERT_TRUE(aside) << aside.error().message();
    copy.reset();
    auto pending = store_->begin(aside->checkpoint, aside->packed);
    ASSERT_TRUE(pending) << pending.error().message();
    fill_tiles(**pending, *source_, 0, 1);
    EXPECT_EQ(commit(std::move(*pending)), CopyState::kVerified);
    EXPECT_TRUE(has_right_bytes());
    committed_.reset();
    ASSERT_TRUE(store_->retire(id_));
  }
}

// A device process has the files of a copy that waits for a round open for writing. It closes them
// when it likes. Only a write by a system call cannot be its own.
TEST_F(ForeignWriteTest, AProcessThatTheFileWasLentToMayCloseIt) {
  auto pending = begin(all_boxes(*checkpoint()));
  pending->mapped(0)->lend_for_writing();
  { const ForeignMapping trusted(file(*pending)); }
  fill_all(*pending, *source_);
  EXPECT_EQ(commit(std::move(pending)), CopyState::kVerified);
  EXPECT_TRUE(has_right_bytes());
}

TEST_F(ForeignWriteTest, B1AFileThatWasLentAndThenWrittenToIsNotVerified) {
  auto pending = begin(all_boxes(*checkpoint()));
  pending->mapped(0)->lend_for_writing();
  fill_all(*pending, *source_);
  overwrite(file(*pending));
  EXPECT_EQ(commit(std::move(pending)), CopyState::kUnverified);
}

// The device process lets go of a file later than the agent, which may use it again meanwhile.
TEST_F(ForeignWriteTest, AFileOfThePoolThatWasLentStaysLent) {
  reopen_with_pool();
  auto pending = begin(all_boxes(*checkpoint()));
  pending->mapped(0)->lend_for_writing();
  auto trusted = std::make_unique<ForeignMapping>(file(*pending));
  fill_all(*pending, *source_);
  EXPECT_EQ(commit(std::move(pending)), CopyState::kVerified);
  for (const bool lets_go : {false, true}) {
    committed_.reset();
    ASSERT_TRUE(store_->retire(id_));
    pending = begin(all_boxes(*checkpoint()));
    fill_all(*pending, *source_);
    if (lets_go) trusted.reset();
    EXPECT_EQ(commit(std::move(pending)), CopyState::kVerified);
  }
}

// Without inotify nobody can tell: every tile is read again before the copy is used.
TEST_F(ForeignWriteTest, WhereNobodyCanTellAPullIsCommittedButNotVerified) {
  ASSERT_TRUE(arm_failpoints("store.watch=error:ENOSPC"));
  auto pending = begin(shard_boxes(*checkpoint()));
  fill_all(*pending, *source_);
  EXPECT_EQ(commit(std::move(pending)), CopyState::kUnverified);
  EXPECT_TRUE(has_right_bytes()) << "the parts of tiles keep their digests";
}

TEST_F(ForeignWriteTest, WhereNobodyCanTellAPublishIsCommittedButNotVerified) {
  ASSERT_TRUE(arm_failpoints("store.watch=error:ENOSPC"));
  const auto published = publish(*store_, id_, source_path());
  ASSERT_TRUE(published) << published.error().message();
  EXPECT_EQ((*published)->verification->state(), CopyState::kUnverified);
  EXPECT_TRUE(verify_version(**published, 2, nullptr));
}

TEST_F(ForeignWriteTest, AWatchTellsOwnClosesFromThoseOfOthers) {
  const fs::path path = temp_.path() / "file";
  write_bytes(path, std::string(4 * kPageBytes, 'x'));
  WriteWatch watch;
  std::vector<std::unique_ptr<WatchedFile>> files;
  UniqueFd own(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  files.push_back(watch.add(own.get(), path));
  files.push_back(watch.add(own.get(), path));  // the same file
  files[0]->close_own(std::move(own));
  auto seen = watch.seen(files);
  EXPECT_TRUE(seen[0].watched && !seen[0].written && !seen[0].closed);
  EXPECT_TRUE(seen[1].closed) << "of which nobody has said that it is our own";
  fs::rename(path, temp_.path() / "renamed");
  ::close(::open((temp_.path() / "renamed").c_str(), O_RDONLY | O_CLOEXEC));
  EXPECT_FALSE(watch.seen(files)[0].closed);
  ::close(::open((temp_.path() / "renamed").c_str(), O_WRONLY | O_CLOEXEC));
  seen = watch.seen(files);
  EXPECT_TRUE(seen[0].closed && !seen[0].written);
  files.pop_back();
  overwrite(temp_.path() / "renamed", 0);
  EXPECT_TRUE(watch.seen(files)[0].written) << "the other watch of the file has ended";
}

TEST_F(ForeignWriteTest, EventsThatTheKernelLostCountAsWrites) {
  const fs::path path = temp_.path() / "file";
  const fs::path other = temp_.path() / "other";
  write_bytes(path, std::string(kPageBytes, 'x'));
  write_bytes(other, std::string(kPageBytes, 'x'));
  WriteWatch watch;
  std::vector<std::unique_ptr<WatchedFile>> files;
  for (const fs::path& one : {path, other}) {
    const UniqueFd fd(::open(one.c_str(), O_RDONLY | O_CLOEXEC));
    files.push_back(watch.add(fd.get(), one));
  }
  const int limit = std::stoi(read_bytes("/proc/sys/fs/inotify/max_queued_events"));
  for (int events = 0; events <= limit; events += 2) overwrite(path, 0);
  EXPECT_TRUE(watch.seen(files)[1].written);
}

// Somebody may still have its files open.
TEST_F(ForeignWriteTest, TheFilesOfADiscardedPullThatSomebodyWroteToAreNotUsedAgain) {
  reopen_with_pool();
  auto pending = begin(all_boxes(*checkpoint()));
  overwrite(file(*pending));
  store_->discard(std::move(pending));
  EXPECT_EQ(store_->pooled_bytes(), 0u);
  pending = begin(all_boxes(*checkpoint()));
  fill_all(*pending, *source_);  // only files with all their pages are pooled
  store_->discard(std::move(pending));
  EXPECT_GT(store_->pooled_bytes(), 0u);
}

}  // namespace
}  // namespace rekindle::store
