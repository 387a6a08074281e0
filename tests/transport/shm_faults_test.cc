// Neighbours that freeze or die.
#include <csignal>
#include <cstring>

#include <gtest/gtest.h>

#include "src/base/units.h"
#include "tests/transport/source_process.h"
#include "tests/transport/transport_fixture.h"
#include "transport/shm/shm_transport.h"

namespace rekindle::transport::testing {
namespace {

std::unique_ptr<Path> connect(const PathTarget& target) {
  auto path = shm::make_connector()->connect(target, test_deadline());
  EXPECT_TRUE(path) << path.error().message();
  return path ? std::move(*path) : nullptr;
}

TEST(ShmFaults, AMappedRegionIsReadOnThroughAFrozenSource) {
  SourceUnderTest source("shm", 8 * kMiB);
  const TestSegment expected(8 * kMiB);
  const auto path = connect(source.target());
  std::vector<std::byte> local(8 * kMiB);
  const ReadOp op{.remote = source.key(), .local = local.data(), .run_bytes = local.size()};
  ASSERT_EQ(read_one(*path, op), OpStatus::kOk);
  source.freeze();
  std::fill(local.begin(), local.end(), std::byte{0});
  EXPECT_EQ(read_one(*path, op), OpStatus::kOk);
  EXPECT_EQ(std::memcmp(local.data(), expected.bytes().data(), local.size()), 0);
  source.process().signal(SIGCONT);
}

TEST(ShmFaults, AFrozenSourceThatMustBeAskedIsSilenceAndAbortDrains) {
  SourceUnderTest source("shm", 8 * kMiB);
  const auto path = connect(source.target());
  source.freeze();
  std::vector<std::byte> local(8 * kMiB);
  std::vector<ReadOp> ops;
  for (std::size_t i = 0; i < 8; ++i) {
    ops.push_back({.wr_id = i,
                   .remote = source.key(),
                   .remote_offset = i * kMiB,
                   .local = local.data(),
                   .run_bytes = kMiB});
  }
  ASSERT_EQ(path->post(ops).value(), ops.size());
  std::vector<Completion> some(8);
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(path->poll(some), 0u);
    ::usleep(5000);
  }
  EXPECT_EQ(path->bytes_landed(), 0u);
  path->abort();
  const auto completions = drain(*path);
  EXPECT_EQ(sorted_ids(completions), first_ids(8));
  for (const auto& completion : completions) EXPECT_EQ(completion.status, OpStatus::kAborted);
  source.process().signal(SIGCONT);
}

TEST(ShmFaults, ConnectingToAFrozenSourceEndsAtTheDeadline) {
  SourceUnderTest source("shm", 4096);
  source.freeze();
  const auto path =
      shm::make_connector()->connect(source.target(), std::chrono::steady_clock::now() + 200ms);
  ASSERT_FALSE(path);
  EXPECT_EQ(path.error().code(), ErrorCode::kTimeout) << path.error().message();
}

TEST(ShmFaults, ASourceKilledMidReadReportsEveryOpOnceAndOkMeansTheBytesAreThere) {
  for (int round = 0; round < 5; ++round) {
    SourceUnderTest source("shm", 64 * kMiB);
    const TestSegment expected(64 * kMiB);
    const auto path = connect(source.target());
    std::vector<std::byte> local(64 * kMiB);
    std::vector<ReadOp> ops;
    for (std::size_t i = 0; i < 256; ++i) {
      ops.push_back({.wr_id = i,
                     .remote = source.key(),
                     .remote_offset = i % 64 * kMiB,
                     .local = local.data() + i % 64 * kMiB,
                     .run_bytes = kMiB});
    }
    ASSERT_EQ(path->post(ops).value(), ops.size());
    std::vector<Completion> completions(1);
    ASSERT_TRUE(eventually([&] { return path->poll(completions) == 1; }));
    source.process().kill();
    const auto rest = drain(*path);
    completions.insert(completions.end(), rest.begin(), rest.end());
    EXPECT_EQ(sorted_ids(completions), first_ids(ops.size()));
    for (const auto& completion : completions) {
      if (completion.status != OpStatus::kOk) {
        EXPECT_EQ(completion.status, OpStatus::kPeerLost);
        continue;
      }
      const ReadOp& op = ops[completion.wr_id];
      EXPECT_EQ(std::memcmp(op.local, expected.bytes().data() + op.remote_offset, op.run_bytes), 0);
    }
    EXPECT_TRUE(eventually([&] { return !path->post({}).has_value(); }));
  }
}

TEST(ShmFaults, TheAddressOfADeadSourceIsUnavailable) {
  auto source = std::make_unique<SourceUnderTest>("shm", 4096);
  const PathTarget target = source->target();
  source->process().kill();
  EXPECT_TRUE(eventually([&] {
    const auto path = shm::make_connector()->connect(target, test_deadline());
    return !path && path.error().code() == ErrorCode::kUnavailable;
  }));
}

}  // namespace
}  // namespace rekindle::transport::testing
