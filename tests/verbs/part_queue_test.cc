#include "transport/verbs/staged/part_queue.h"

#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <vector>

#include <gtest/gtest.h>

namespace rekindle::transport::verbs {
namespace {

using Ended = std::map<std::uint16_t, OpStatus>;

class PartQueueTest : public ::testing::Test {
 protected:
  // An op at 200 * slot of the region. Ops of 100 bytes lie back to back in `local_`.
  void add(std::uint16_t slot, std::uint64_t run_bytes = 100) {
    queue_.add(slot, {.wr_id = slot,
                      .remote = {1, 1},
                      .remote_offset = 200ul * slot,
                      .local = local_.data() + 100ul * slot,
                      .run_bytes = run_bytes});
  }
  void end(const PartQueue::Part& part, OpStatus status = OpStatus::kOk) {
    queue_.end(part, status, report_);
  }

  std::vector<std::byte> local_ = std::vector<std::byte>(10'000);
  PartQueue queue_{8};
  Ended ended_;
  const std::function<void(std::uint16_t, std::uint64_t, OpStatus)> report_ =
      [this](std::uint16_t slot, std::uint64_t wr_id, OpStatus status) {
        EXPECT_EQ(slot, wr_id);
        EXPECT_TRUE(ended_.emplace(slot, status).second) << "reported twice";
      };
};

TEST_F(PartQueueTest, OpsThatContinueEachOtherAreOnePartAndShareItsFate) {
  for (std::uint16_t slot = 0; slot < 4; ++slot) add(slot);
  const auto part = queue_.take(350);
  EXPECT_EQ(part.op_count, 3);
  EXPECT_EQ(part.read.count, 3u);
  EXPECT_EQ(part.read.remote_stride, 200u);
  EXPECT_EQ(part.read.local_stride, 100u);
  end(part, OpStatus::kStale);
  EXPECT_EQ(ended_, (Ended{{0, OpStatus::kStale}, {1, OpStatus::kStale}, {2, OpStatus::kStale}}));
  EXPECT_FALSE(queue_.empty());
}

TEST_F(PartQueueTest, AnOpIsOverWhenItsLastPartIs) {
  add(0, 1000);
  EXPECT_EQ(queue_.bytes_wanted(5000), 1000u);
  const auto first = queue_.take(600);
  const auto second = queue_.take(600);
  EXPECT_TRUE(queue_.empty());
  end(second);
  EXPECT_TRUE(ended_.empty());
  end(first);
  EXPECT_EQ(ended_, (Ended{{0, OpStatus::kOk}}));
}

TEST_F(PartQueueTest, TheRestOfAFailedOpIsNotAskedFor) {
  add(0, 1000);
  add(5);
  end(queue_.take(100), OpStatus::kFault);
  EXPECT_EQ(ended_, (Ended{{0, OpStatus::kFault}}));
  EXPECT_EQ(queue_.take(1000).first_op, 5);
}

TEST_F(PartQueueTest, AtTheEndAnOpWaitsForItsPartsThatAreUnderWay) {
  add(0, 1000);
  add(5);
  const auto part = queue_.take(100);
  queue_.end_rest(OpStatus::kAborted, report_);
  EXPECT_EQ(ended_, (Ended{{5, OpStatus::kAborted}}));
  end(part);
  EXPECT_EQ(ended_.at(0), OpStatus::kAborted);
}

TEST(Parts, TheyBringEveryByteOfAnOpOnceAndFitTheirBlocks) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  const auto pick = [&](std::uint64_t low, std::uint64_t high) {
    return std::uniform_int_distribution<std::uint64_t>(low, high)(random);
  };
  for (int round = 0; round < 2000; ++round) {
    ReadOp op;
    op.run_bytes = pick(1, 300);
    op.count = pick(1, 40);
    op.remote_stride = op.run_bytes + (round % 2 == 0 ? 0 : pick(0, 90));
    op.local_stride = op.run_bytes + (round % 3 == 0 ? 0 : pick(0, 90));
    if (op.count == 1) op.remote_stride = op.local_stride = 0;
    std::vector<std::byte> remote((op.count - 1) * op.remote_stride + op.run_bytes);
    for (auto& byte : remote) byte = static_cast<std::byte>(random());
    const std::size_t extent = (op.count - 1) * op.local_stride + op.run_bytes;
    std::vector<std::byte> local(extent, std::byte{0xee}), expected = local;
    op.local = local.data();
    for (std::uint64_t run = 0; run < op.count; ++run) {
      std::memcpy(expected.data() + run * op.local_stride, remote.data() + run * op.remote_stride,
                  op.run_bytes);
    }
    const ReadOp merged = with_merged_runs(op);
    ASSERT_EQ(merged.total_bytes(), op.total_bytes());
    std::uint64_t position = 0;
    while (position < merged.total_bytes()) {
      const std::uint64_t room = pick(1, 700);
      const ReadOp part = next_part(merged, position, room);
      ASSERT_GT(part.total_bytes(), 0u);
      ASSERT_LE(part.total_bytes(), room);
      for (std::uint64_t run = 0; run < part.count; ++run) {
        std::memcpy(part.local + run * part.local_stride,
                    remote.data() + part.remote_offset + run * part.remote_stride, part.run_bytes);
      }
      position += part.total_bytes();
    }
    ASSERT_EQ(position, op.total_bytes());
    ASSERT_EQ(local, expected);
  }
}

}  // namespace
}  // namespace rekindle::transport::verbs
