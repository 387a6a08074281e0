#include "recovery/device/process/pinned_copies.h"

#include <thread>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <gtest/gtest.h>

#include "src/bucket/double_device.h"
#include "tests/bucket/sample.h"
#include "tests/support/process.h"

namespace rekindle::device {
namespace {

using std::chrono::milliseconds;
using std::chrono::minutes;

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

class LingeringTest : public ::testing::Test {
 protected:
  UniqueFd make(const std::string& name) {
    testing::write_file(directory_ / name, std::string(4096, 'x'));
    return open(name);
  }
  UniqueFd open(const std::string& name) {
    return UniqueFd(::open((directory_ / name).c_str(), O_RDWR | O_CLOEXEC));
  }
  void linger(Segment segment, UniqueFd file) {
    std::vector<Segment> segments;
    segments.push_back(std::move(segment));
    std::vector<UniqueFd> files;
    files.push_back(std::move(file));
    lingering_.add(std::move(segments), std::move(files), now_);
  }
  Segment map(const UniqueFd& file) {
    auto segment = *cache_.get(file.get(), 4096);
    // A thread that pins the segment holds it, too.
    EXPECT_TRUE(pinner_.wait(*segment, SteadyClock().now() + std::chrono::seconds(20)));
    EXPECT_TRUE(testing::eventually([&] { return segment.use_count() == 1; }));
    return segment;
  }

  testing::TempDir directory_{true};
  std::unique_ptr<bucket::Device> device_ = bucket::make_double_device("double:0", 1 << 20);
  bucket::Pinner pinner_{*device_, 1};
  SegmentCache cache_{pinner_};
  std::size_t let_go_ = 0;
  Lingering lingering_{[this](std::vector<Segment> segments) { let_go_ += segments.size(); }};
  TimePoint now_{minutes(60)};
};

TEST_F(LingeringTest, WhatHasANameStaysForWhoeverTakesItsFile) {
  auto file = make("pooled");
  auto segment = map(file);
  const bucket::PinnedSegment* const before = segment.get();
  linger(std::move(segment), std::move(file));
  EXPECT_TRUE(lingering_.look(now_ + minutes(1)));
  ASSERT_EQ(::rename((directory_ / "pooled").c_str(), (directory_ / "next").c_str()), 0);
  const Segment taken = *cache_.get(open("next").get(), 4096);
  EXPECT_EQ(taken.get(), before);
  EXPECT_FALSE(lingering_.look(now_ + minutes(2))) << "somebody else has it now";
  EXPECT_EQ(let_go_, 1u);
}

TEST_F(LingeringTest, WhatHasNoNameAnyMoreIsLetGo) {
  auto file = make("gone");
  auto segment = map(file);
  linger(std::move(segment), std::move(file));
  EXPECT_TRUE(lingering_.look(now_));
  ASSERT_EQ(::unlink((directory_ / "gone").c_str()), 0);
  EXPECT_FALSE(lingering_.look(now_ + milliseconds(1)));
  EXPECT_EQ(let_go_, 1u);
}

TEST_F(LingeringTest, AnotherNameDoesNotCount) {
  auto file = make("linked");
  ASSERT_EQ(::link((directory_ / "linked").c_str(), (directory_ / "theirs").c_str()), 0);
  auto segment = map(file);
  linger(std::move(segment), std::move(file));
  EXPECT_TRUE(lingering_.look(now_));
  ASSERT_EQ(::unlink((directory_ / "linked").c_str()), 0);
  EXPECT_FALSE(lingering_.look(now_));
}

TEST_F(LingeringTest, NothingStaysForEver) {
  auto file = make("kept");
  auto segment = map(file);
  linger(std::move(segment), std::move(file));
  EXPECT_TRUE(lingering_.look(now_ + minutes(9)));
  EXPECT_FALSE(lingering_.look(now_ + minutes(10)));
  EXPECT_EQ(let_go_, 1u);
}

class PinnedCopiesTest : public ::testing::Test {
 protected:
  const bucket::testing::Sample sample_ =
      bucket::testing::sample_of({{"w", DType::kF32, Shape{256, 256}}}, 1);
  std::unique_ptr<bucket::Device> device_ = bucket::make_double_device("double:0", 1 << 20);
  TimePoint now_{minutes(60)};
};

TEST_F(PinnedCopiesTest, ACopySettlesOnce) {
  PinnedCopies copies(device_.get(), 1);
  ASSERT_TRUE(copies.hold(7, sample_.files(), sample_.segment_bytes, now_));
  std::vector<PinnedCopies::Settled> settled;
  EXPECT_TRUE(testing::eventually([&] {
    for (auto& one : copies.take_settled(now_ + milliseconds(3))) settled.push_back(one);
    return !settled.empty();
  }));
  ASSERT_EQ(settled.size(), 1u);
  EXPECT_EQ(settled[0].copy, 7u);
  EXPECT_EQ(settled[0].elapsed, milliseconds(3));
  EXPECT_EQ(settled[0].problem, "");
  EXPECT_EQ(copies.pinned_bytes(), sample_.segment_bytes.front());
  EXPECT_TRUE(copies.take_settled(now_).empty());
  EXPECT_FALSE(copies.look(now_));
  copies.drop(7, Pages::kStay, now_);
  copies.drop(7, Pages::kStay, now_);
}

TEST_F(PinnedCopiesTest, FilesWhosePagesAreGoneAreMappedAnew) {
  PinnedCopies copies(device_.get(), 1);
  const std::vector<UniqueFd> files = sample_.files();
  for (const Pages pages : {Pages::kStay, Pages::kGone}) {
    std::vector<UniqueFd> held;
    for (const UniqueFd& file : files) held.emplace_back(::dup(file.get()));
    ASSERT_TRUE(copies.hold(7, std::move(held), sample_.segment_bytes, now_));
    const auto before = copies.map(files, sample_.segment_bytes);
    copies.drop(7, pages, now_);
    const auto after = copies.map(files, sample_.segment_bytes);
    ASSERT_TRUE(before && after);
    EXPECT_EQ(before->front() == after->front(), pages == Pages::kStay);
  }
}

TEST_F(PinnedCopiesTest, WithoutADeviceNothingIsHeld) {
  PinnedCopies copies(nullptr, 1);
  const auto held = copies.hold(7, sample_.files(), sample_.segment_bytes, now_);
  ASSERT_FALSE(held);
  EXPECT_EQ(held.error().code(), ErrorCode::kNotFound);
  EXPECT_TRUE(copies.take_settled(now_).empty());
  EXPECT_EQ(copies.pinned_bytes(), 0u);
  EXPECT_EQ(copies.pinner(), nullptr);
}

TEST_F(PinnedCopiesTest, EachSegmentHasItsFile) {
  PinnedCopies copies(device_.get(), 1);
  const auto mapped = copies.map(sample_.files(), {});
  ASSERT_FALSE(mapped);
  EXPECT_EQ(mapped.error().code(), ErrorCode::kInvalid);
}

}  // namespace
}  // namespace rekindle::device
