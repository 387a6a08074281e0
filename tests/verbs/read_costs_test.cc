#include "transport/verbs/direct/read_costs.h"

#include <gtest/gtest.h>

namespace rekindle::transport::verbs {
namespace {

constexpr std::uint32_t kEntries = 16;

// Round numbers, so that each expectation can be worked out by hand.
constexpr ReadCosts kCosts{.request_ns = 100,
                           .entry_ns = 10,
                           .copied_run_ns = 10,
                           .copied_byte_ns = 0.25,
                           .wire_byte_ns = 0.02};

// Runs that land one behind the other.
ReadOp runs(std::uint64_t bytes, std::uint64_t stride) {
  return {.run_bytes = bytes, .count = 1000, .remote_stride = stride, .local_stride = bytes};
}

RunReads choice(const ReadOp& op, Landing landing = Landing::kRegistered,
                const ReadCosts& costs = kCosts) {
  return cheaper_reads(op, landing, kEntries, costs);
}

TEST(ReadCosts, ARunIsCopiedIfThatTakesLessTimeThanARequest) {
  // The copy of 360 bytes takes 10 + 90 ns.
  EXPECT_EQ(choice(runs(359, 720)), RunReads::kTogether);
  EXPECT_EQ(choice(runs(360, 720)), RunReads::kInPlace);
  EXPECT_EQ(choice(runs(2048, 4096)), RunReads::kInPlace);
  EXPECT_EQ(choice(runs(4096, 20480)), RunReads::kInPlace);
}

TEST(ReadCosts, GapsAreReadAlongAsLongAsTheWireTakesLessTimeThanARequest) {
  // 5,000 bytes take 100 ns.
  EXPECT_EQ(choice(runs(100, 4999)), RunReads::kTogether);
  EXPECT_EQ(choice(runs(100, 5000)), RunReads::kInPlace);
}

TEST(ReadCosts, OnASlowWireGapsCostMoreThanRequests) {
  ReadCosts slow = kCosts;
  slow.wire_byte_ns = 0.32;  // 25 Gb/s
  EXPECT_EQ(choice(runs(100, 200), Landing::kRegistered, slow), RunReads::kTogether);
  EXPECT_EQ(choice(runs(100, 400), Landing::kRegistered, slow), RunReads::kInPlace);
}

TEST(ReadCosts, RunsForUnregisteredMemoryAreCopiedAnyway) {
  EXPECT_EQ(choice(runs(2048, 4096), Landing::kUnregistered), RunReads::kTogether);
  // 10 + 512 + 100 ns against 40 KiB of wire: 819 ns.
  EXPECT_EQ(choice(runs(2048, 40960), Landing::kUnregistered), RunReads::kInPlace);
}

TEST(ReadCosts, ScatterEntriesShareOneRequest) {
  ReadOp op = runs(16, 16);
  op.local_stride = 64;
  // A sixteenth of a request and an entry take 16.25 ns, the copy of 16 bytes 14 ns.
  EXPECT_EQ(choice(op), RunReads::kTogether);
  op.run_bytes = op.remote_stride = 26;  // 16.5 ns
  EXPECT_EQ(choice(op), RunReads::kInPlace);
}

TEST(ReadCosts, RunsWithoutGapsAtBothEndsAreOneRun) {
  EXPECT_EQ(choice(runs(16, 16)), RunReads::kInPlace);
  EXPECT_EQ(choice(runs(16, 16), Landing::kUnregistered), RunReads::kInPlace);
}

TEST(ReadCosts, OverlappingRunsAreReadOneByOne) {
  EXPECT_EQ(choice(runs(100, 50)), RunReads::kInPlace);
  EXPECT_EQ(choice(runs(100, 0)), RunReads::kInPlace);
}

}  // namespace
}  // namespace rekindle::transport::verbs
