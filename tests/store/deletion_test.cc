#include <thread>

#include "src/base/failpoint.h"
#include "tests/store/store_fixture.h"

// Files that nobody needs any more are deleted behind the call that lets go of them.
namespace rekindle::store {
namespace {

// A store in which an earlier life has left a pull of org/model@1 over.
class DeletionTest : public StoreTest {
 protected:
  void SetUp() override {
    StoreTest::SetUp();
    for (const std::uint64_t version : {2u, 3u}) {
      const auto published = publish(*source_store_, {id_.model, version}, source_path());
      ASSERT_TRUE(published) << published.error().message();
      newer_.push_back(*published);
    }
    const auto pending = begin(all_boxes(*checkpoint()));
    bytes_ = pending->manifest().layout.segment_bytes();
    files_ = static_cast<std::ptrdiff_t>(pending->manifest().layout.segments().size());
    ASSERT_GT(files_, 1);
  }
  void TearDown() override { EXPECT_TRUE(arm_failpoints("")); }

  void open_again(std::uint64_t budget_bytes, std::optional<std::uint64_t> pool_bytes) {
    store_.reset();
    store_ = open_store(store_path(), budget_bytes, pool_bytes);
  }
  Result<std::unique_ptr<PendingVersion>> begin_like(const StoredVersion& copy) {
    const auto& checkpoint = copy.manifest.checkpoint;
    return store_->begin(checkpoint, pack(*checkpoint, all_boxes(*checkpoint)));
  }
  void commit_newer() {
    auto pending = begin_like(*newer_[0]);
    ASSERT_TRUE(pending) << pending.error().message();
    fill_all(**pending, *newer_[0]);
    const auto version = store_->commit(std::move(*pending));
    ASSERT_TRUE(version) << version.error().message();
    EXPECT_TRUE(verify_version(**version, 1, nullptr));
  }
  fs::path pool() const { return store_path() / "pool"; }
  fs::path left_over() const { return store_path() / "models" / "org%2Fmodel@1"; }
  std::ptrdiff_t files_to_delete() const {
    const fs::directory_iterator files(pool());
    return std::distance(fs::begin(files), fs::end(files));
  }
  std::uint64_t bytes_to_delete() const {
    std::uint64_t bytes = 0;
    for (const auto& file : fs::directory_iterator(pool())) {
      std::error_code gone;
      const std::uint64_t size = file.file_size(gone);
      bytes += gone ? 0 : size;
    }
    return bytes;
  }

  std::vector<std::shared_ptr<const StoredVersion>> newer_;  // org/model@2 and @3
  std::uint64_t bytes_ = 0;                                  // of each copy
  std::ptrdiff_t files_ = 0;
};

TEST_F(DeletionTest, ACommitIsDoneBeforeWhatIsLeftOverIsDeleted) {
  reopen();
  ASSERT_TRUE(arm_failpoints("store.pool.delete_later=hold"));
  ASSERT_NO_FATAL_FAILURE(commit_newer());
  EXPECT_FALSE(fs::exists(left_over()));
  EXPECT_EQ(files_to_delete(), files_);
  EXPECT_EQ(store_->used_bytes(), bytes_);
  // Nor does it keep the older version from being pulled after all.
  EXPECT_EQ(begin(all_boxes(*checkpoint()))->verified().count(), 0u);
  ASSERT_TRUE(arm_failpoints(""));
  wait_until_deleted();
}

TEST_F(DeletionTest, APublishReplacesAPullWithoutWaitingForItsDeletion) {
  reopen();
  const fs::path target = left_over() / source_->manifest.layout.digest().hex().substr(0, 16);
  write_bytes(target / "rekindle.manifest.partial", "begun");
  write_bytes(target / "model.safetensors.partial", "bytes");
  ASSERT_TRUE(arm_failpoints("store.pool.delete_later=hold"));
  ASSERT_TRUE(publish(*store_, id_, source_path()));
  EXPECT_EQ(files_to_delete(), 1);
}

TEST_F(DeletionTest, ADiscardedPullBeginsAgainBeforeItsFilesAreDeleted) {
  ASSERT_TRUE(arm_failpoints("store.pool.delete_later=hold"));
  store_->discard(begin(all_boxes(*checkpoint())));
  EXPECT_EQ(files_to_delete(), files_);
  EXPECT_EQ(store_->used_bytes(), 0u);
  EXPECT_NE(begin(all_boxes(*checkpoint())), nullptr);
}

// The budget has room for two copies and a half: the third pull needs what the first one has left.
TEST_F(DeletionTest, WhoLacksTheBudgetsRoomWaitsForTheDeletion) {
  open_again(bytes_ * 5 / 2, 0);
  ASSERT_TRUE(arm_failpoints("store.pool.delete_later=sleep:100"));
  ASSERT_NO_FATAL_FAILURE(commit_newer());
  const auto& layout = newer_[1]->manifest.layout;
  EXPECT_EQ(store_->missing_bytes({id_.model, 3}, layout), 0u) << "nothing else has to go";
  const auto pending = begin_like(*newer_[1]);
  ASSERT_TRUE(pending) << pending.error().message();
  EXPECT_LE(store_->used_bytes() + bytes_to_delete(), store_->budget_bytes());
}

TEST_F(DeletionTest, WhatIsNotDeletedWhenTheStoreIsClosedTheNextOpenDeletes) {
  open_again(1 << 30, std::nullopt);
  const fs::path kept = temp_.path() / "kept.safetensors";
  ASSERT_TRUE(store_->create_segment(kept, 12'345));
  ASSERT_TRUE(store_->remove_segment(kept));
  const fs::path pooled = fs::directory_iterator(pool())->path();
  ASSERT_TRUE(arm_failpoints("store.pool.delete_later=hold"));
  ASSERT_NO_FATAL_FAILURE(commit_newer());
  std::thread closing([&] { store_.reset(); });
  while (fs::exists(pooled)) std::this_thread::yield();  // what is pooled goes with the store
  ASSERT_TRUE(arm_failpoints(""));
  closing.join();
  EXPECT_EQ(files_to_delete(), files_);
  reopen();
  wait_until_deleted();
  EXPECT_EQ(store_->versions().size(), 1u);
  EXPECT_EQ(store_->used_bytes(), bytes_);
}

// Of publishes, of removals and of the pool.
TEST_F(DeletionTest, WhatACrashHasLeftIsDeletedBehindTheOpen) {
  store_.reset();
  write_bytes(pool() / "1", "pooled");
  write_bytes(pool() / "not a number", "x");
  write_bytes(pool() / "directory" / "file", "x");
  write_bytes(store_path() / "staging" / "0123456789abcdef" / "a.safetensors", "staged");
  write_bytes(store_path() / "staging" / "0123456789abcdef" / "rekindle.manifest", "x");
  const fs::path copy = fs::directory_iterator(left_over())->path();
  fs::rename(copy / "rekindle.manifest.partial", copy / "rekindle.retired");
  ASSERT_TRUE(arm_failpoints("store.pool.delete_later=hold"));
  reopen();
  EXPECT_FALSE(fs::exists(left_over()));
  EXPECT_TRUE(fs::is_empty(store_path() / "staging"));
  EXPECT_EQ(files_to_delete(), 3 + files_);
  EXPECT_EQ(store_->used_bytes(), 0u);
  EXPECT_EQ(store_->pooled_bytes(), 0u);
  EXPECT_EQ(read_bytes(pool() / "1"), "pooled") << "another file has taken its name";
  ASSERT_NO_FATAL_FAILURE(commit_newer());
  ASSERT_TRUE(arm_failpoints(""));
  wait_until_deleted();
}

// A budget of two copies and a half; two and a half are still to be deleted.
TEST_F(DeletionTest, WhatACrashHasLeftIsWaitedForByWhoLacksItsRoom) {
  store_.reset();
  write_bytes(pool() / "1", std::string(bytes_ * 5 / 2, 'x'));
  ASSERT_TRUE(arm_failpoints("store.pool.delete_later=sleep:100"));
  open_again(bytes_ * 5 / 2, 0);
  ASSERT_NO_FATAL_FAILURE(commit_newer());
  EXPECT_LE(store_->used_bytes() + bytes_to_delete(), store_->budget_bytes());
}

TEST_F(DeletionTest, AFileWithAnotherNameStaysThere) {
  fs::path segment;
  for (const auto& file : fs::recursive_directory_iterator(left_over())) {
    if (file.path().string().ends_with(".safetensors.partial")) segment = file.path();
  }
  const fs::path other = temp_.path() / "other.safetensors";
  fs::create_hard_link(segment, other);
  const std::string before = read_bytes(other);
  reopen();
  ASSERT_TRUE(arm_failpoints("store.pool.delete_later=hold"));
  ASSERT_NO_FATAL_FAILURE(commit_newer());
  EXPECT_EQ(files_to_delete(), files_ - 1);
  EXPECT_EQ(read_bytes(other), before);
  EXPECT_FALSE(fs::exists(left_over()));
}

}  // namespace
}  // namespace rekindle::store
