#include "recovery/device/lingering.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <gtest/gtest.h>

#include "src/bucket/double_device.h"
#include "tests/support/process.h"

namespace rekindle::device {
namespace {

using std::chrono::milliseconds;
using std::chrono::minutes;

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
    // A thread that pins holds it, too.
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

}  // namespace
}  // namespace rekindle::device
