// Sources that freeze, die or come back as somebody else, each in a process of its own.
#include <csignal>
#include <cstring>

#include <gtest/gtest.h>

#include "src/base/units.h"
#include "tests/transport/source_process.h"
#include "tests/transport/transport_fixture.h"
#include "transport/shm/shm_transport.h"
#include "transport/tcp/tcp_transport.h"

namespace rekindle::transport::testing {
namespace {

Result<std::unique_ptr<Path>> try_connect(const PathTarget& target,
                                          TimePoint deadline = test_deadline()) {
  const auto connector = target.transport == "tcp" ? tcp::make_connector() : shm::make_connector();
  return connector->connect(target, deadline);
}

std::unique_ptr<Path> connect(const PathTarget& target) {
  auto path = try_connect(target);
  EXPECT_TRUE(path) << path.error().message();
  return path ? std::move(*path) : nullptr;
}

std::vector<ReadOp> slices(RegionKey key, std::vector<std::byte>& local, std::size_t count) {
  const std::size_t size = local.size() / count;
  std::vector<ReadOp> ops;
  for (std::size_t i = 0; i < count; ++i) {
    ops.push_back({.wr_id = i,
                   .remote = key,
                   .remote_offset = i * size,
                   .local = local.data() + i * size,
                   .run_bytes = size});
  }
  return ops;
}

class SourceProcessFaults : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Transports, SourceProcessFaults, ::testing::Values("tcp", "shm"),
                         [](const auto& parameter) { return std::string(parameter.param); });

TEST_P(SourceProcessFaults, ConnectingToAFrozenSourceEndsAtTheDeadline) {
  SourceUnderTest source(GetParam(), 4096);
  source.freeze();
  const auto path = try_connect(source.target(), std::chrono::steady_clock::now() + 200ms);
  ASSERT_FALSE(path);
  EXPECT_EQ(path.error().code(), ErrorCode::kTimeout) << path.error().message();
}

TEST_P(SourceProcessFaults, ASourceKilledMidReadReportsEveryOpOnceAndOkMeansTheBytesAreThere) {
  for (int round = 0; round < 5; ++round) {
    SourceUnderTest source(GetParam(), 64 * kMiB);
    const TestSegment expected(64 * kMiB);
    const auto path = connect(source.target());
    std::vector<std::byte> local(64 * kMiB);
    const auto ops = slices(source.key(), local, 256);
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
    EXPECT_TRUE(eventually([&] {
      const auto refused = path->post({});
      return !refused && refused.error().code() == ErrorCode::kPeerLost;
    }));
  }
}

TEST(TcpSourceFaults, AFrozenSourceIsSilenceAndAbortDrainsAtOnce) {
  SourceUnderTest source("tcp", 64 * kMiB);
  const auto path = connect(source.target());
  std::vector<std::byte> local(64 * kMiB);
  const auto ops = slices(source.key(), local, 16);
  std::vector<Completion> completions;
  std::vector<Completion> some(64);
  source.freeze();
  ASSERT_EQ(path->post(ops).value(), ops.size());
  // The kernel still delivers some bytes. Then there is silence, and no error.
  std::uint64_t landed = path->bytes_landed();
  for (int quiet = 0; quiet < 20;) {
    const std::size_t count = path->poll(some);
    completions.insert(completions.end(), some.begin(),
                       some.begin() + static_cast<std::ptrdiff_t>(count));
    quiet = path->bytes_landed() == landed ? quiet + 1 : 0;
    landed = path->bytes_landed();
    ::usleep(5000);
  }
  ASSERT_GT(path->in_flight(), 0u);
  for (const auto& completion : completions) EXPECT_EQ(completion.status, OpStatus::kOk);
  path->abort();
  const std::size_t rest = path->in_flight();
  ASSERT_EQ(path->poll(some), rest) << "abort() must not wait for the frozen peer";
  for (std::size_t i = 0; i < rest; ++i) EXPECT_EQ(some[i].status, OpStatus::kAborted);
  completions.insert(completions.end(), some.begin(),
                     some.begin() + static_cast<std::ptrdiff_t>(rest));
  EXPECT_EQ(sorted_ids(completions), first_ids(ops.size()));
  source.process().signal(SIGCONT);
}

TEST(TcpSourceFaults, TheSameAddressWithAnotherIncarnationIsStale) {
  auto first = std::make_unique<SourceUnderTest>("tcp", 4096);
  const PathTarget old_target = first->target();
  const std::string port = first->port();
  first->process().kill();
  SourceUnderTest second("tcp", 4096, port);
  ASSERT_EQ(second.port(), port);
  const auto path = try_connect(old_target);
  ASSERT_FALSE(path);
  EXPECT_EQ(path.error().code(), ErrorCode::kStale);
}

TEST(ShmSourceFaults, AMappedRegionIsReadOnThroughAFrozenSource) {
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

TEST(ShmSourceFaults, AFrozenSourceThatMustBeAskedIsSilenceAndAbortDrains) {
  SourceUnderTest source("shm", 8 * kMiB);
  const auto path = connect(source.target());
  source.freeze();
  std::vector<std::byte> local(8 * kMiB);
  const auto ops = slices(source.key(), local, 8);
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

TEST(ShmSourceFaults, TheAddressOfADeadSourceIsUnavailable) {
  auto source = std::make_unique<SourceUnderTest>("shm", 4096);
  const PathTarget target = source->target();
  source->process().kill();
  EXPECT_TRUE(eventually([&] {
    const auto path = try_connect(target);
    return !path && path.error().code() == ErrorCode::kUnavailable;
  }));
}

}  // namespace
}  // namespace rekindle::transport::testing
