#include "transport/verbs/direct/op_expander.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "tests/support/effort.h"

namespace rekindle::transport::verbs {
namespace {

// Local memory registered in pieces with holes between, remote memory cut into windows.
class Book final : public AddressBook {
 public:
  std::vector<std::pair<const std::byte*, std::uint64_t>> registered;
  std::uint64_t window_bytes = ~std::uint64_t{0};

  mutable std::size_t look_ups = 0;

  LocalSpan local(const std::byte* address) const override {
    ++look_ups;
    for (std::uint32_t i = 0; i < registered.size(); ++i) {
      const auto [begin, bytes] = registered[i];
      if (address >= begin && address < begin + bytes) {
        return {i + 1, bytes - static_cast<std::uint64_t>(address - begin)};
      }
    }
    return {};
  }
  std::uint64_t remote_span(RegionKey, std::uint64_t offset) const override {
    ++look_ups;
    return window_bytes - offset % window_bytes;
  }
};

struct Counts {
  std::size_t requests = 0;
  std::size_t bounced = 0;
  std::uint64_t wire_bytes = 0;
};

// Carries the requests out as a NIC would.
Counts run(const ReadOp& op, const ExpandLimits& limits, const Book& book,
           const std::vector<std::byte>& remote) {
  Counts counts;
  OpCursor cursor(op, limits);
  std::uint64_t payload = 0;
  while (!cursor.done()) {
    ReadRequest request;
    cursor.next(op, limits, book, request);
    ++counts.requests;
    counts.wire_bytes += request.wire_bytes;
    payload += request.payload_bytes;
    EXPECT_LE(request.wire_bytes, limits.request_bytes);
    EXPECT_LE(request.wire_bytes, book.remote_span(op.remote, request.remote_offset));
    const std::byte* from = remote.data() + request.remote_offset;
    if (request.bounced) {
      ++counts.bounced;
      EXPECT_LE(request.wire_bytes, limits.bounce_bytes);
      const std::vector<std::byte> block(from, from + request.wire_bytes);
      scatter(op, request, block.data());
      continue;
    }
    EXPECT_LE(request.sge_count, limits.max_sge);
    std::uint64_t scattered = 0;
    for (std::uint32_t i = 0; i < request.sge_count; ++i) {
      const ibv_sge& sge = request.sges[i];
      auto* const to = reinterpret_cast<std::byte*>(sge.addr);
      const LocalSpan span = book.local(to);
      EXPECT_EQ(span.lkey, sge.lkey);
      EXPECT_LE(sge.length, span.bytes);
      std::memcpy(to, from + scattered, sge.length);
      scattered += sge.length;
    }
    EXPECT_EQ(scattered, request.wire_bytes);
  }
  EXPECT_EQ(payload, op.total_bytes());
  return counts;
}

class OpExpander : public ::testing::Test {
 protected:
  OpExpander() : remote_(1 << 20), local_(4 << 20, std::byte{0xee}) {
    std::mt19937_64 random(1);
    for (auto& byte : remote_) byte = static_cast<std::byte>(random());
    book_.registered = {{local_.data(), local_.size()}};
  }
  void expect_landed(const ReadOp& op) const {
    std::vector<std::byte> expected(local_.size(), std::byte{0xee});
    for (std::uint64_t run = 0; run < op.count; ++run) {
      std::memcpy(expected.data() + (op.local - local_.data()) + run * op.local_stride,
                  remote_.data() + op.remote_offset + run * op.remote_stride, op.run_bytes);
    }
    EXPECT_TRUE(expected == local_);
  }

  std::vector<std::byte> remote_;
  std::vector<std::byte> local_;
  Book book_;
  ExpandLimits limits_;
};

TEST_F(OpExpander, AContiguousReadBecomesRequestsOfTheLargestSize) {
  limits_.request_bytes = 256 << 10;
  const ReadOp op{.remote_offset = 3, .local = local_.data() + 5, .run_bytes = 1'000'000};
  const Counts counts = run(op, limits_, book_, remote_);
  EXPECT_EQ(counts.requests, 4u);
  EXPECT_EQ(counts.bounced, 0u);
  EXPECT_EQ(counts.wire_bytes, 1'000'000u);
  expect_landed(op);
}

TEST_F(OpExpander, LocalRunsOfAContiguousReadShareRequestsByScatterLists) {
  const ReadOp op{.local = local_.data(),
                  .run_bytes = 8192,
                  .count = 32,
                  .remote_stride = 8192,
                  .local_stride = 10'000};
  const Counts counts = run(op, limits_, book_, remote_);
  EXPECT_EQ(counts.requests, 2u);  // 16 runs each
  EXPECT_EQ(counts.bounced, 0u);
  expect_landed(op);
}

TEST_F(OpExpander, ShortLocalRunsAreReadAtOnceAndScatteredHere) {
  const ReadOp op{.local = local_.data(),
                  .run_bytes = 16,
                  .count = 10'000,
                  .remote_stride = 16,
                  .local_stride = 40};
  const Counts counts = run(op, limits_, book_, remote_);
  EXPECT_EQ(counts.requests, 1u);
  EXPECT_EQ(counts.bounced, 1u);
  expect_landed(op);
}

TEST_F(OpExpander, ShortRemoteRunsCloseTogetherAreCoveredByOneRead) {
  const ReadOp op{.local = local_.data(),
                  .run_bytes = 64,
                  .count = 200,
                  .remote_stride = 1024,
                  .local_stride = 64};
  const Counts counts = run(op, limits_, book_, remote_);
  EXPECT_EQ(counts.requests, 1u);
  EXPECT_EQ(counts.bounced, 1u);
  EXPECT_EQ(counts.wire_bytes, 199u * 1024 + 64);
  expect_landed(op);
}

TEST_F(OpExpander, RemoteRunsFarApartAreReadOneByOne) {
  const ReadOp op{.local = local_.data(),
                  .run_bytes = 4096,
                  .count = 20,
                  .remote_stride = 50'000,
                  .local_stride = 4096};
  const Counts counts = run(op, limits_, book_, remote_);
  EXPECT_EQ(counts.requests, 20u);
  EXPECT_EQ(counts.bounced, 0u);
  EXPECT_EQ(counts.wire_bytes, op.total_bytes());
  expect_landed(op);
}

// The look-ups would cost the CPU more than the rest of such a request.
TEST_F(OpExpander, ManyShortRunsAreLookedUpOnceForEachWindow) {
  const ReadOp op{.local = local_.data(),
                  .run_bytes = 1024,
                  .count = 400,
                  .remote_stride = 2048,
                  .local_stride = 4096};
  OpCursor cursor(op, limits_);
  ReadRequest request;
  for (book_.window_bytes = 256 << 10; !cursor.done();) cursor.next(op, limits_, book_, request);
  EXPECT_LE(book_.look_ups, 3u * 4) << "of two addresses, one of them twice, in four windows";
  EXPECT_EQ(run(op, limits_, book_, remote_).requests, 400u);
  expect_landed(op);
}

TEST_F(OpExpander, RunsOfAFewKiBAreNotCopiedHoweverCloseTheyAre) {
  const ReadOp op{.local = local_.data(),
                  .run_bytes = 2048,
                  .count = 100,
                  .remote_stride = 4096,
                  .local_stride = 2048};
  const Counts counts = run(op, limits_, book_, remote_);
  EXPECT_EQ(counts.requests, 100u);
  EXPECT_EQ(counts.bounced, 0u);
  expect_landed(op);
}

// They are copied in any case, so a request for each would be more work.
TEST_F(OpExpander, RunsForUnregisteredMemoryShareRequests) {
  book_.registered.clear();
  const ReadOp op{.local = local_.data(),
                  .run_bytes = 2048,
                  .count = 100,
                  .remote_stride = 4096,
                  .local_stride = 2048};
  const Counts counts = run(op, limits_, book_, remote_);
  EXPECT_EQ(counts.requests, 2u);
  EXPECT_EQ(counts.bounced, 2u);
  expect_landed(op);
}

TEST_F(OpExpander, WhatIsNotRegisteredIsBouncedAndTheRestIsNot) {
  book_.registered = {{local_.data() + 500'000, 500'000}};
  const ReadOp op{.local = local_.data(), .run_bytes = 1'000'000};
  const Counts counts = run(op, limits_, book_, remote_);
  EXPECT_GT(counts.bounced, 0u);
  EXPECT_LT(counts.bounced, counts.requests);
  expect_landed(op);
}

TEST_F(OpExpander, RandomOpsLandAsANaiveCopyWould) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  const auto pick = [&](std::uint64_t low, std::uint64_t high) {
    return std::uniform_int_distribution<std::uint64_t>(low, high)(random);
  };
  for (std::uint64_t round = 0; round < testing::effort(300); ++round) {
    std::fill(local_.begin(), local_.end(), std::byte{0xee});
    limits_.request_bytes = static_cast<std::uint32_t>(pick(1, 300'000));
    limits_.bounce_bytes = static_cast<std::uint32_t>(pick(1, limits_.request_bytes));
    limits_.max_sge = static_cast<std::uint32_t>(pick(1, kMaxSge));
    limits_.costs.request_ns = static_cast<double>(pick(0, 3000));
    book_.window_bytes = pick(1, 1 << 20);
    book_.registered.clear();
    for (std::uint64_t at = 0; at < local_.size();) {
      const std::uint64_t bytes = pick(1, 400'000);
      const std::uint64_t end = std::min<std::uint64_t>(at + bytes, local_.size());
      if (pick(0, 3) > 0) book_.registered.emplace_back(local_.data() + at, end - at);
      at = end;
    }
    ReadOp op;
    op.count = round % 5 == 0 ? 1 : pick(1, 60);
    op.run_bytes = pick(1, round % 3 == 0 ? 40 : 9000);
    op.remote_stride = op.run_bytes + (round % 2 == 0 ? 0 : pick(0, 5000));
    op.local_stride = op.run_bytes + (round % 4 == 0 ? 0 : pick(0, 2000));
    const std::uint64_t extent = (op.count - 1) * op.remote_stride + op.run_bytes;
    op.remote_offset = pick(0, remote_.size() - extent);
    op.local = local_.data() + pick(0, 1000);
    (void)run(op, limits_, book_, remote_);
    expect_landed(op);
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace rekindle::transport::verbs
