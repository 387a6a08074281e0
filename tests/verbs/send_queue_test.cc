#include "transport/verbs/direct/send_queue.h"

#include <cerrno>

#include <gtest/gtest.h>

#include "tests/verbs/fake_endpoint.h"

namespace rekindle::transport::verbs {
namespace {

constexpr std::uint32_t kBytes = 64;
constexpr std::uint32_t kTag = 3;

// A queue of `depth` on a queue pair of the same depth; requests are numbered by their op.
class SendQueueTest : public ::testing::Test {
 protected:
  void make(std::uint32_t depth, std::uint32_t first = 0) {
    pair_ = std::make_unique<FakePair>(
        FakeDevice{.name = "mlx5_0"},
        EndpointOptions{.send_requests = depth, .completions = static_cast<int>(depth)});
    pair_->connect();
    pair_->network.deliver_by_hand();
    queue_ = std::make_unique<SendQueue>(kTag, depth, first);
  }
  void add(std::uint16_t op, bool last) {
    ReadRequest request;
    request.wire_bytes = request.payload_bytes = kBytes;
    request.sge_count = 1;
    request.sges[0] = pair_->a.sge(op % 1024 * kBytes, kBytes);
    queue_->add(op, request, {}, pair_->b.address(op % 1024 * kBytes), pair_->b.mr->rkey, last);
  }
  int flush() { return queue_->flush(pair_->host_a, pair_->a.qp.get(), unposted_); }
  // Ops of everything that the completions so far cover, in order; -1 where a completion was for
  // it.
  std::vector<int> retired() {
    std::vector<int> ops;
    for (const auto& wc : pair_->a.poll()) {
      EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
      bool is_last = false;
      while (!is_last) {
        const auto sent = queue_->retire(wc.wr_id, is_last);
        if (!sent) {
          ADD_FAILURE() << "a completion for nothing";
          break;
        }
        ops.push_back(sent->op);
      }
      ops.push_back(-1);
    }
    return ops;
  }

  std::unique_ptr<FakePair> pair_;
  std::unique_ptr<SendQueue> queue_;
  std::vector<SentRequest> unposted_;
};

TEST_F(SendQueueTest, OneCompletionRetiresTheUnsignalledRequestsBeforeItInOrder) {
  make(16);
  for (const int op : {1, 2, 3, 4, 5}) add(static_cast<std::uint16_t>(op), op == 2);
  ASSERT_EQ(flush(), 0);
  EXPECT_EQ(queue_->outstanding(), 5u);
  pair_->network.deliver();
  // 5 is the last of its chain, whatever it is of its op.
  EXPECT_EQ(retired(), (std::vector<int>{1, 2, -1, 3, 4, 5, -1}));
  EXPECT_EQ(queue_->outstanding(), 0u);
}

TEST_F(SendQueueTest, WhatAPostDidNotTakeIsHandedBackAndTheRestStaysOut) {
  for (std::size_t taken = 0; taken < 4; ++taken) {
    make(16);
    unposted_.clear();
    pair_->network.fail_call(FakeCall::kPostSend, {.error = ENOMEM, .taken = taken});
    for (std::uint16_t op = 0; op < 4; ++op) add(op, true);
    EXPECT_EQ(flush(), ENOMEM);
    EXPECT_EQ(unposted_.size(), 4 - taken);
    EXPECT_EQ(queue_->outstanding(), taken);
    for (const auto& sent : unposted_) EXPECT_GE(sent.op, taken);
    // The queue goes on from there.
    add(9, true);
    ASSERT_EQ(flush(), 0);
    pair_->network.deliver();
    const auto ops = retired();
    ASSERT_EQ(ops.size(), 2 * (taken + 1));
    EXPECT_EQ(ops[2 * taken], 9);
  }
}

TEST_F(SendQueueTest, CompletionsOfAnotherLifeRetireNothing) {
  make(16);
  for (std::uint16_t op = 0; op < 3; ++op) add(op, true);
  ASSERT_EQ(flush(), 0);
  bool is_last = false;
  const std::uint64_t tag = std::uint64_t{kTag} << 32;
  for (const std::uint64_t id : {tag | 3, tag | 0xffffffff, tag | 0x80000000, std::uint64_t{1},
                                 std::uint64_t{kTag + 1} << 32 | 1}) {
    EXPECT_FALSE(queue_->retire(id, is_last)) << id;
  }
  EXPECT_EQ(queue_->outstanding(), 3u);
  pair_->network.deliver();
  EXPECT_EQ(retired(), (std::vector<int>{0, -1, 1, -1, 2, -1}));
}

TEST_F(SendQueueTest, DropHandsBackTheOldestFirst) {
  make(4);
  for (std::uint16_t op = 5; op < 8; ++op) add(op, true);
  ASSERT_EQ(flush(), 0);
  for (std::uint16_t op = 5; op < 8; ++op) EXPECT_EQ(queue_->drop()->op, op);
  EXPECT_FALSE(queue_->drop());
  pair_->network.deliver();
  (void)pair_->a.poll();
}

// Positions are 32 bits wide and wrap around; depths are what devices allow, not powers of two.
TEST_F(SendQueueTest, PositionsWrapAroundAtAnyDepth) {
  for (const std::uint32_t depth : {1u, 3u, 16u, 100u, 128u}) {
    SCOPED_TRACE(depth);
    make(depth, 0xffff'ffff - 2 * depth);
    std::uint16_t next = 0, expected = 0;
    for (int round = 0; round < 12; ++round) {
      while (!queue_->full()) {
        const int error = queue_->chain_full() ? flush() : 0;
        ASSERT_EQ(error, 0);
        add(next, next % 5 == 4);
        ++next;
      }
      ASSERT_EQ(flush(), 0);
      EXPECT_EQ(queue_->outstanding(), depth);
      // Some of them, so that the ring is entered at every place.
      pair_->network.deliver(round % 2 == 0 ? depth : depth / 2 + 1);
      for (const int op : retired()) {
        if (op < 0) continue;
        ASSERT_EQ(op, expected);
        ++expected;
      }
    }
    pair_->network.deliver();
    (void)retired();
    EXPECT_EQ(queue_->outstanding(), 0u);
  }
}

}  // namespace
}  // namespace rekindle::transport::verbs
