#include "recovery/device/segment_cache.h"

#include <thread>

#include <fcntl.h>

#include <gtest/gtest.h>

#include "src/bucket/double_device.h"
#include "tests/bucket/sample.h"

namespace rekindle::device {
namespace {

class SegmentCacheTest : public ::testing::Test {
 protected:
  int fd() const { return files_.front().get(); }
  std::uint64_t bytes() const { return sample_.segment_bytes.front(); }
  UniqueFd reopened(int flags) const {
    return UniqueFd(::open(fmt::format("/proc/self/fd/{}", fd()).c_str(), flags | O_CLOEXEC));
  }

  const bucket::testing::Sample sample_ =
      bucket::testing::sample_of({{"w", DType::kF32, Shape{256, 256}}}, 1);
  const std::vector<UniqueFd> files_ = sample_.files();
  std::unique_ptr<bucket::Device> device_ = bucket::make_double_device("double:0", 1 << 20);
  bucket::Pinner pinner_{*device_, 1};
  SegmentCache cache_{pinner_};
};

TEST_F(SegmentCacheTest, AFileIsMappedOnceHoweverItIsOpened) {
  const auto one = *cache_.get(fd(), bytes());
  EXPECT_EQ(*cache_.get(reopened(O_RDWR).get(), bytes()), one);
  EXPECT_EQ(*cache_.get(reopened(O_RDONLY).get(), bytes()), one);
  EXPECT_EQ(cache_.mapped_bytes(), bytes());
}

TEST_F(SegmentCacheTest, WhatNobodyHasIsLetGoOf) {
  auto one = *cache_.get(fd(), bytes());
  auto two = *cache_.get(fd(), bytes());
  ASSERT_TRUE(pinner_.wait(*one, SteadyClock().now() + std::chrono::seconds(20)));
  one.reset();
  EXPECT_EQ(pinner_.pinned_bytes(), bytes());
  two.reset();
  // A thread that has pinned the last piece may hold it a moment longer.
  const TimePoint give_up = SteadyClock().now() + std::chrono::seconds(20);
  while (cache_.mapped_bytes() != 0 && SteadyClock().now() < give_up) std::this_thread::yield();
  EXPECT_EQ(cache_.mapped_bytes(), 0u);
}

TEST_F(SegmentCacheTest, OneThatCannotBePinnedGivesWayToOneThatCan) {
  const auto reading = *cache_.get(reopened(O_RDONLY).get(), bytes());
  const auto writable = *cache_.get(fd(), bytes());
  EXPECT_NE(reading, writable);
  EXPECT_EQ(*cache_.get(reopened(O_RDONLY).get(), bytes()), writable);
}

TEST_F(SegmentCacheTest, AFileThatIsTooShortIsRefused) {
  EXPECT_FALSE(cache_.get(fd(), bytes() + (1 << 20)));
}

}  // namespace
}  // namespace rekindle::device
