// Reads over real sockets: placement, strides, validation, keys, sessions.
#include <algorithm>
#include <csignal>
#include <cstring>

#include <gtest/gtest.h>

#include "src/base/units.h"
#include "tests/transport/test_source.h"
#include "transport/tcp/tcp_transport.h"

namespace rekindle::transport::testing {
namespace {

class TcpPathTest : public ::testing::TestWithParam<tcp::Encryption>,
                    public TestSource<tcp::TcpServer, tcp::ServerOptions> {
 protected:
  TcpPathTest() : TestSource(tcp::make_connector({}, GetParam()), {.listen_host = "127.0.0.1"}) {
    std::signal(SIGPIPE, SIG_IGN);  // as the rekindle command does
  }
};

TEST_P(TcpPathTest, APathTakesAPrefixWhenFullAndTheRestLater) {
  const TestSegment segment(1 * kMiB);
  const RegionKey key = add(segment);
  const auto path = connect(admit({key}));
  std::vector<std::byte> local(5000 * 8);
  std::vector<ReadOp> ops;
  for (std::size_t i = 0; i < 5000; ++i) {
    ops.push_back({.wr_id = i,
                   .remote = key,
                   .remote_offset = i * 16,
                   .local = local.data() + i * 8,
                   .run_bytes = 8});
  }
  const auto taken = path->post(ops);
  ASSERT_TRUE(taken);
  EXPECT_GT(*taken, 0u);
  EXPECT_LT(*taken, ops.size());
  EXPECT_EQ(path->in_flight(), *taken);
  auto completions = drain(*path);
  const auto rest = read_all(*path, {ops.begin() + static_cast<std::ptrdiff_t>(*taken), ops.end()});
  completions.insert(completions.end(), rest.begin(), rest.end());
  EXPECT_EQ(sorted_ids(completions), first_ids(5000));
  for (std::size_t i = 0; i < 5000; ++i) {
    ASSERT_EQ(std::memcmp(local.data() + i * 8, segment.bytes().data() + i * 16, 8), 0) << i;
  }
}

TEST_P(TcpPathTest, AStaleOrForeignRegionFailsItsOpOnly) {
  const TestSegment segment(64 * kKiB);
  const RegionKey good = add(segment);
  const RegionKey gone = add(segment);
  const RegionKey foreign = add(segment);
  const auto path = connect(admit({good, gone}));
  registry_.remove(gone);
  const RegionKey successor = add(segment);
  ASSERT_EQ(successor.region, gone.region);
  std::vector<std::byte> local(4096);
  const auto read = [&](RegionKey key) {
    return read_one(*path, {.remote = key, .local = local.data(), .run_bytes = 4096});
  };
  EXPECT_EQ(read(gone), OpStatus::kStale);
  EXPECT_EQ(read(successor), OpStatus::kDenied);
  EXPECT_EQ(read(foreign), OpStatus::kDenied);
  EXPECT_EQ(read({99, 1}), OpStatus::kStale);
  EXPECT_EQ(read(good), OpStatus::kOk);
}

TEST_P(TcpPathTest, AnotherIncarnationIsStaleAndAnUnknownTokenIsDenied) {
  const TestSegment segment(4096);
  const SessionToken token = admit({add(segment)});
  PathTarget wrong = target(token);
  wrong.incarnation = Incarnation::random();
  EXPECT_EQ(connector_->connect(wrong, test_deadline()).error().code(), ErrorCode::kStale);
  EXPECT_EQ(try_connect(SessionToken::random()).error().code(), ErrorCode::kDenied);
}

TEST_P(TcpPathTest, Row48ATruncatedFileFailsTheOpAndTheStreamGoesOn) {
  TestSegment segment(8 * kMiB);
  const RegionKey key = add(segment);
  const auto path = connect(admit({key}));
  segment.truncate(1 * kMiB);
  std::vector<std::byte> local(8 * kMiB);
  EXPECT_EQ(read_one(*path, {.remote = key,
                             .remote_offset = 512 * kKiB,
                             .local = local.data(),
                             .run_bytes = 1 * kMiB}),
            OpStatus::kFault);
  EXPECT_EQ(read_one(*path, {.remote = key,
                             .remote_offset = 0,
                             .local = local.data(),
                             .run_bytes = 100,
                             .count = 8000,
                             .remote_stride = 1000,
                             .local_stride = 100}),
            OpStatus::kFault);
  EXPECT_EQ(read_one(*path, {.remote = key, .local = local.data(), .run_bytes = 1 * kMiB}),
            OpStatus::kOk);
}

TEST_P(TcpPathTest, AMappingTruncatedUnseenBreaksTheStreamAndNotTheServer) {
  TestSegment segment(8 * kMiB);
  const RegionKey hidden = add(segment, false);  // the server cannot check the file's size
  const RegionKey good = add(segment);
  const SessionToken token = admit({hidden, good});
  auto path = connect(token);
  segment.truncate(1 * kMiB);
  std::vector<std::byte> local(8 * kMiB);
  EXPECT_EQ(read_one(*path, {.remote = hidden, .local = local.data(), .run_bytes = 8 * kMiB}),
            OpStatus::kPeerLost);
  path = connect(token);
  EXPECT_EQ(read_one(*path, {.remote = good, .local = local.data(), .run_bytes = 1 * kMiB}),
            OpStatus::kOk);
}

TEST_P(TcpPathTest, AbortDrainsAtOnceAndReportsEveryOp) {
  const TestSegment segment(16 * kMiB);
  const RegionKey key = add(segment);
  const auto path = connect(admit({key}));
  std::vector<std::byte> local(16 * kMiB);
  std::vector<ReadOp> ops;
  for (std::size_t i = 0; i < 16; ++i) {
    ops.push_back({.wr_id = i,
                   .remote = key,
                   .remote_offset = i * kMiB,
                   .local = local.data() + i * kMiB,
                   .run_bytes = kMiB});
  }
  ASSERT_EQ(path->post(ops).value(), ops.size());
  std::vector<Completion> seen(1);
  ASSERT_TRUE(eventually([&] { return path->poll(seen) == 1; }));
  path->abort();
  path->abort();
  std::fill(local.begin() + static_cast<std::ptrdiff_t>(path->bytes_landed()), local.end(),
            std::byte{0x11});
  const auto guard = local;
  std::vector<Completion> completions(64);
  const std::size_t count = path->poll(completions);  // one poll, no waiting
  completions.resize(count);
  EXPECT_EQ(path->in_flight(), 0u);
  completions.push_back(seen[0]);
  EXPECT_EQ(sorted_ids(completions), first_ids(16));
  EXPECT_EQ(local, guard) << "bytes landed after abort()";
  EXPECT_EQ(path->post(ops).error().code(), ErrorCode::kPeerLost);
  server_.reset();  // before the segment, from which it may still be sending
}

TEST_P(TcpPathTest, ARevokedSessionEndsMidReadAndCannotComeBack) {
  const TestSegment segment(16 * kMiB);
  const RegionKey key = add(segment);
  const SessionToken revoked = admit({key});
  const SessionToken other = admit({key});
  const auto victim = connect(revoked);
  const auto bystander = connect(other);
  std::vector<std::byte> local(16 * kMiB);
  std::vector<ReadOp> ops;
  for (std::size_t i = 0; i < 100; ++i) {
    ops.push_back({.wr_id = i, .remote = key, .local = local.data(), .run_bytes = local.size()});
  }
  ASSERT_EQ(victim->post(ops).value(), ops.size());
  std::vector<Completion> early(1);
  ASSERT_TRUE(eventually([&] { return victim->poll(early) == 1; }));
  registry_.revoke(revoked);
  server_->drop_session(revoked);
  EXPECT_EQ(registry_.reader_count(key), 0u);
  auto completions = drain(*victim);
  completions.insert(completions.begin(), early[0]);
  EXPECT_EQ(sorted_ids(completions), first_ids(100));
  EXPECT_EQ(completions.back().status, OpStatus::kPeerLost);
  EXPECT_EQ(try_connect(revoked).error().code(), ErrorCode::kDenied);
  EXPECT_EQ(read_one(*bystander, {.remote = key, .local = local.data(), .run_bytes = kMiB}),
            OpStatus::kOk);
}

TEST_P(TcpPathTest, ARemovedRegionStaysMappedUntilItsReaderIsDone) {
  auto segment = std::make_shared<TestSegment>(64 * kMiB);
  const std::weak_ptr<TestSegment> alive = segment;
  const RegionKey key = registry_.add(segment->bytes(), segment->fd(), 0, {}, segment);
  const auto path = connect(admit({key}));
  std::vector<std::byte> local(64 * kMiB);
  const ReadOp op{.wr_id = 0, .remote = key, .local = local.data(), .run_bytes = local.size()};
  ASSERT_EQ(path->post({&op, 1}).value(), 1u);
  ASSERT_TRUE(eventually([&] { return registry_.reader_count(key) == 1; }));
  const auto expected = segment->bytes();
  registry_.remove(key);
  segment.reset();
  EXPECT_FALSE(alive.expired());
  const auto completions = drain(*path);
  ASSERT_EQ(completions.size(), 1u);
  EXPECT_EQ(completions[0].status, OpStatus::kOk);
  (void)expected;
  EXPECT_TRUE(eventually([&] { return alive.expired(); }));
}

TEST_P(TcpPathTest, TheSessionsRateCapHoldsOverAllItsStreams) {
  const TestSegment segment(4 * kMiB);
  const RegionKey key = add(segment);
  constexpr std::uint64_t kRate = 40 * kMiB;
  const SessionToken token = admit({key}, kRate);
  std::vector<std::unique_ptr<Path>> paths;
  for (int i = 0; i < 3; ++i) paths.push_back(connect(token));
  std::vector<std::byte> local(4 * kMiB);
  const TimePoint start = std::chrono::steady_clock::now();
  for (auto& path : paths) {
    const ReadOp op{.remote = key, .local = local.data(), .run_bytes = local.size()};
    ASSERT_EQ(path->post({&op, 1}).value(), 1u);
  }
  for (auto& path : paths) ASSERT_EQ(drain(*path).size(), 1u);
  const double took = seconds(std::chrono::steady_clock::now() - start);
  // A lower bound of the time bounds the rate, not the machine's speed.
  EXPECT_GE(took, (12.0 * kMiB - kRate / 50.0) / kRate);
  // Lifting the cap takes effect on open streams.
  registry_.admit({.token = token, .puller = "test", .regions = {key}});
  EXPECT_EQ(read_one(*paths[0], {.remote = key, .local = local.data(), .run_bytes = local.size()}),
            OpStatus::kOk);
}

TEST_P(TcpPathTest, BothAddressFamiliesReachAServerOnEveryAddress) {
  serve({});
  const TestSegment segment(4096);
  const RegionKey key = add(segment);
  const SessionToken token = admit({key});
  std::vector<std::byte> local(4096);
  for (const char* host : {"127.0.0.1", "::1", "localhost"}) {
    auto path = connector_->connect(target(token, host), test_deadline());
    ASSERT_TRUE(path) << host << ": " << path.error().message();
    EXPECT_EQ(read_one(**path, {.remote = key, .local = local.data(), .run_bytes = 4096}),
              OpStatus::kOk);
  }
}

TEST_P(TcpPathTest, APortInUseIsNamed) {
  const auto second = tcp::TcpServer::create({.listen_host = "127.0.0.1", .port = server_->port()},
                                             registry_, incarnation_);
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().code(), ErrorCode::kUnavailable);
  EXPECT_NE(second.error().message().find(std::to_string(server_->port())), std::string::npos);
}

TEST_P(TcpPathTest, BadEndpointsAreRefusedWithTheirName) {
  const SessionToken token = SessionToken::random();
  for (const char* endpoint : {"", "127.0.0.1", "127.0.0.1:", ":80", "127.0.0.1:70000", "[::1]",
                               "127.0.0.1:80x", "127.0.0.1:-1", "127.0.0.1:0"}) {
    const auto path = connector_->connect({"tcp", endpoint, token, incarnation_}, test_deadline());
    ASSERT_FALSE(path) << endpoint;
    EXPECT_EQ(path.error().code(), ErrorCode::kInvalid) << path.error().message();
  }
  const auto nobody = connector_->connect({"tcp", "no-such-host.invalid:80", token, incarnation_},
                                          std::chrono::steady_clock::now() + 2s);
  ASSERT_FALSE(nobody);
  EXPECT_NE(nobody.error().message().find("no-such-host.invalid"), std::string::npos);
}

TEST_P(TcpPathTest, ASessionHasALimitedNumberOfStreams) {
  serve({.listen_host = "127.0.0.1", .max_streams_per_session = 2});
  const TestSegment segment(4096);
  const SessionToken token = admit({add(segment)});
  auto first = connect(token);
  auto second = connect(token);
  EXPECT_EQ(try_connect(token).error().code(), ErrorCode::kUnavailable);
  first.reset();
  EXPECT_TRUE(eventually([&] { return try_connect(token).has_value(); }));
}

TEST_P(TcpPathTest, AServerThatEndsLeavesEveryOpReported) {
  const TestSegment segment(16 * kMiB);
  const RegionKey key = add(segment);
  const auto path = connect(admit({key}));
  std::vector<std::byte> local(16 * kMiB);
  std::vector<ReadOp> ops;
  for (std::size_t i = 0; i < 200; ++i) {
    ops.push_back({.wr_id = i, .remote = key, .local = local.data(), .run_bytes = local.size()});
  }
  ASSERT_EQ(path->post(ops).value(), ops.size());
  server_.reset();
  const auto completions = drain(*path);
  EXPECT_EQ(sorted_ids(completions), first_ids(200));
  EXPECT_EQ(completions.back().status, OpStatus::kPeerLost);
}

INSTANTIATE_TEST_SUITE_P(Streams, TcpPathTest,
                         ::testing::Values(tcp::Encryption::kWhereDemanded,
                                           tcp::Encryption::kAlways),
                         [](const auto& parameter) {
                           const bool plain = parameter.param == tcp::Encryption::kWhereDemanded;
                           return plain ? "Plain" : "Encrypted";
                         });

}  // namespace
}  // namespace rekindle::transport::testing
