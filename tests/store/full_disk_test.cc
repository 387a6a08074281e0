#include <chrono>
#include <thread>

#include <fcntl.h>

#include "src/base/failpoint.h"
#include "tests/store/mount_namespace.h"
#include "tests/store/store_fixture.h"

// A real full file system: a small tmpfs, mounted in a namespace of a child.
namespace rekindle::store {
namespace {

using ::testing::HasSubstr;

class FullDiskTest : public StoreTest {
 protected:
  template <typename Body>
  void on_small_tmpfs(Body body) {
    store::on_small_tmpfs(small(), body);
  }
  fs::path small() const { return temp_.path() / "small"; }
};

TEST_F(FullDiskTest, AFullStoreIsAnErrorThatNamesTheBytesAndKeepsEarlierVersions) {
  on_small_tmpfs([&] {
    store_ = open_store(small() / "s", 1 << 30);  // the budget allows more than there is
    auto first = pull(all_boxes(*checkpoint()));
    ASSERT_NE(first, nullptr);
    const std::uint64_t used = store_->used_bytes();

    write_safetensors(temp_.path() / "large" / "a.safetensors", {{"w", DType::kU8, {15 << 20}}}, 5);
    const auto published = publish(*store_, {"large", 1}, temp_.path() / "large");
    ASSERT_FALSE(published);
    EXPECT_EQ(published.error().code(), ErrorCode::kExhausted);
    EXPECT_THAT(published.error().message(), HasSubstr("available"));
    EXPECT_EQ(store_->used_bytes(), used);

    const auto large = *publish(*source_store_, {"large", 1}, temp_.path() / "large");
    const auto& checkpoint = large->manifest.checkpoint;
    const auto pulled = store_->begin(checkpoint, pack(*checkpoint, all_boxes(*checkpoint)));
    ASSERT_FALSE(pulled);
    EXPECT_EQ(pulled.error().code(), ErrorCode::kExhausted);
    EXPECT_EQ(store_->used_bytes(), used);

    EXPECT_TRUE(verify_version(*first, 1, nullptr));
    ASSERT_TRUE(store_->retire(id_));
    EXPECT_FALSE(store_->begin(checkpoint, pack(*checkpoint, all_boxes(*checkpoint))));
    first.reset();  // the last reader lets go of the memory
    EXPECT_TRUE(store_->begin(checkpoint, pack(*checkpoint, all_boxes(*checkpoint))));
  });
}

TEST_F(FullDiskTest, ThePoolGoesBeforeAnythingIsRefused) {
  write_safetensors(temp_.path() / "large" / "a.safetensors", {{"w", DType::kU8, {15 << 20}}}, 5);
  const auto large = *publish(*source_store_, {"large", 1}, temp_.path() / "large");
  on_small_tmpfs([&] {
    store_ = open_store(small() / "s", 1 << 30, 1 << 30);
    auto first = pull(all_boxes(*checkpoint()));
    ASSERT_NE(first, nullptr);
    const std::uint64_t bytes = first->manifest.layout.segment_bytes();
    ASSERT_TRUE(store_->retire(id_));
    const auto& other = large->manifest.checkpoint;
    const auto begin_large = [&] { return store_->begin(other, pack(*other, all_boxes(*other))); };
    const auto refused = begin_large();
    ASSERT_FALSE(refused);  // what a reader has is no room
    EXPECT_EQ(refused.error().code(), ErrorCode::kExhausted);
    EXPECT_EQ(store_->pooled_bytes(), bytes);
    EXPECT_TRUE(verify_version(*first, 1, nullptr));
    first.reset();
    auto pending = begin_large();
    ASSERT_TRUE(pending) << pending.error().message();
    EXPECT_LT(store_->pooled_bytes(), bytes);
    fill_all(**pending, *large);
    EXPECT_TRUE(store_->commit(std::move(*pending)));
    // A manifest and a resume file need room, too.
    ASSERT_TRUE(store_->retire({"large", 1}));
    ASSERT_GT(store_->pooled_bytes(), 0u);
    EXPECT_FALSE(write_text((small() / "filler").c_str(), std::string(20 << 20, 'f')));
    EXPECT_TRUE(begin_large());
  });
}

TEST_F(FullDiskTest, APublishAndATrainersFileHaveThePoolsRoom) {
  write_safetensors(temp_.path() / "large" / "a.safetensors", {{"w", DType::kU8, {15 << 20}}}, 5);
  on_small_tmpfs([&] {
    store_ = open_store(small() / "s", 1 << 30, 1 << 30);
    pull(all_boxes(*checkpoint()));
    ASSERT_TRUE(store_->retire(id_));
    ASSERT_GT(store_->pooled_bytes(), 5u << 20);
    {
      const auto published = publish(*store_, {"large", 1}, temp_.path() / "large");
      ASSERT_TRUE(published) << published.error().message();
    }
    ASSERT_TRUE(store_->retire({"large", 1}));
    ASSERT_GT(store_->pooled_bytes(), 14u << 20);
    const auto segment = store_->create_segment(small() / "w.safetensors", 16 << 20);
    ASSERT_TRUE(segment) << segment.error().message();
    EXPECT_EQ(store_->create_segment(small() / "v.safetensors", 16 << 20).error().code(),
              ErrorCode::kExhausted);
  });
}

// Files are deleted outside of the pool's lock: their room comes a while after they are off its
// books.
TEST_F(FullDiskTest, WhoLacksRoomWaitsForFilesThatAreBeingDeleted) {
  on_small_tmpfs([&] {
    store_ = open_store(small() / "s", 1 << 30, 1 << 30);
    const fs::path pooled = small() / "pooled.safetensors";
    ASSERT_TRUE(store_->create_segment(pooled, 15 << 20));
    ASSERT_TRUE(store_->remove_segment(pooled));
    ASSERT_EQ(store_->pooled_bytes(), 15u << 20);
    store_->trim_pool(TimePoint{});
    ASSERT_TRUE(arm_failpoints("store.pool.delete=sleep:300"));
    std::thread deleting([&] { store_->trim_pool(TimePoint{} + std::chrono::minutes(10)); });
    while (store_->pooled_bytes() != 0) std::this_thread::yield();
    const auto segment = store_->create_segment(small() / "w.safetensors", 16 << 20);
    EXPECT_TRUE(segment) << segment.error().message();
    deleting.join();
  });
}

// A device process has the file pinned, or a reader has it mapped.
TEST_F(FullDiskTest, AFileThatAProcessStillHasIsWaitedForBeforeTheNextOneGoes) {
  on_small_tmpfs([&] {
    store_ = open_store(small() / "s", 1 << 30, 1 << 30);
    for (const std::uint64_t mib : {std::uint64_t{12}, std::uint64_t{3}}) {
      const fs::path pooled = small() / "pooled.safetensors";
      ASSERT_TRUE(store_->create_segment(pooled, mib << 20));
      ASSERT_TRUE(store_->remove_segment(pooled));
    }
    ASSERT_EQ(store_->pooled_bytes(), 15u << 20);
    UniqueFd held;
    for (const auto& file : fs::directory_iterator(small() / "s" / "pool")) {
      if (file.file_size() != 12u << 20) continue;
      held = UniqueFd(::open(file.path().c_str(), O_RDONLY | O_CLOEXEC));
    }
    ASSERT_TRUE(held);
    std::thread process([&] {
      while (store_->pooled_bytes() == 15u << 20) std::this_thread::yield();
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      held.reset();
    });
    const auto segment = store_->create_segment(small() / "w.safetensors", 8 << 20);
    EXPECT_TRUE(segment) << segment.error().message();
    EXPECT_EQ(store_->pooled_bytes(), 3u << 20) << "both files were deleted";
    process.join();
  });
}

TEST_F(FullDiskTest, WhoLacksRoomWaitsForWhatACommitHasDeleted) {
  write_safetensors(temp_.path() / "large" / "a.safetensors", {{"w", DType::kU8, {8 << 20}}}, 5);
  const auto older = *publish(*source_store_, {"large", 1}, temp_.path() / "large");
  const auto newer = *publish(*source_store_, {"large", 2}, temp_.path() / "large");
  on_small_tmpfs([&] {
    store_ = open_store(small() / "s", 1 << 30);
    const auto begin_like = [&](const StoredVersion& copy) {
      const auto& checkpoint = copy.manifest.checkpoint;
      return *store_->begin(checkpoint, pack(*checkpoint, all_boxes(*checkpoint)));
    };
    begin_like(*older).reset();
    ASSERT_TRUE(arm_failpoints("store.pool.delete_later=sleep:300"));
    auto pending = begin_like(*newer);
    fill_all(*pending, *newer);
    ASSERT_TRUE(store_->commit(std::move(pending)));
    const auto segment = store_->create_segment(small() / "w.safetensors", 10 << 20);
    EXPECT_TRUE(segment) << segment.error().message();
  });
}

}  // namespace
}  // namespace rekindle::store
