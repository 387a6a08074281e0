// Sources that freeze, die, come back as somebody else or run out of descriptors; peers that send
// garbage, stay silent or never read.
#include <algorithm>
#include <array>
#include <csignal>
#include <cstring>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <gtest/gtest.h>

#include "src/base/units.h"
#include "tests/transport/source_process.h"
#include "tests/transport/transport_fixture.h"
#include "transport/tcp/tcp_transport.h"
#include "transport/tcp/wire.h"

namespace rekindle::transport::testing {
namespace {

std::unique_ptr<Path> connect(const PathTarget& target) {
  auto path = tcp::make_connector()->connect(target, test_deadline());
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

// A blocking socket to 127.0.0.1:port, without a hello.
UniqueFd raw_socket(std::uint16_t port) {
  UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    ADD_FAILURE() << "connect: " << std::strerror(errno);
  }
  return socket;
}

void send_bytes(const UniqueFd& socket, std::span<const std::byte> bytes) {
  (void)!::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
}

// Reads until the peer closes; false when it does not.
bool peer_closes(const UniqueFd& socket) {
  std::array<std::byte, 4096> sink;
  while (true) {
    pollfd entry{socket.get(), POLLIN, 0};
    if (::poll(&entry, 1, 20'000) != 1) return false;
    if (::recv(socket.get(), sink.data(), sink.size(), 0) <= 0) return true;
  }
}

TEST(TcpFaults, AFrozenSourceIsSilenceAndAbortDrainsAtOnce) {
  SourceUnderTest source("tcp", 64 * kMiB);
  const auto path = connect(source.target());
  std::vector<std::byte> local(64 * kMiB);
  const auto ops = slices(source.key(), local, 16);
  std::vector<Completion> completions;
  std::vector<Completion> some(64);
  source.freeze();
  ASSERT_EQ(path->post(ops).value(), ops.size());
  // Whatever the kernel still delivers lands; then there is silence, and no error.
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

TEST(TcpFaults, ConnectingToAFrozenSourceEndsAtTheDeadline) {
  SourceUnderTest source("tcp", 4096);
  source.freeze();
  const auto path =
      tcp::make_connector()->connect(source.target(), std::chrono::steady_clock::now() + 200ms);
  ASSERT_FALSE(path);
  EXPECT_EQ(path.error().code(), ErrorCode::kTimeout) << path.error().message();
}

TEST(TcpFaults, ASourceKilledMidReadReportsEveryOpOnceAndOkMeansTheBytesAreThere) {
  for (int round = 0; round < 5; ++round) {
    SourceUnderTest source("tcp", 64 * kMiB);
    const TestSegment expected(64 * kMiB);
    const auto path = connect(source.target());
    std::vector<std::byte> local(64 * kMiB);
    const auto ops = slices(source.key(), local, 64);
    ASSERT_EQ(path->post(ops).value(), ops.size());
    std::vector<Completion> completions(1);
    ASSERT_TRUE(eventually([&] { return path->poll(completions) == 1; }));
    source.process().signal(SIGKILL);
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
    EXPECT_EQ(path->post(ops).error().code(), ErrorCode::kPeerLost);
  }
}

TEST(TcpFaults, TheSameAddressWithAnotherIncarnationIsStale) {
  auto first = std::make_unique<SourceUnderTest>("tcp", 4096);
  const PathTarget old_target = first->target();
  const std::string port = first->port();
  first->process().kill();
  SourceUnderTest second("tcp", 4096, port);
  ASSERT_EQ(second.port(), port);
  const auto path = tcp::make_connector()->connect(old_target, test_deadline());
  ASSERT_FALSE(path);
  EXPECT_EQ(path.error().code(), ErrorCode::kStale);
}

TEST(TcpFaults, ASourceWithoutDescriptorsShedsNewStreamsServesOldOnesAndRecovers) {
  SourceUnderTest source("tcp", 1 * kMiB, {}, {{RLIMIT_NOFILE, {32, 32}}});
  const auto path = connect(source.target());
  const auto port = static_cast<std::uint16_t>(std::stoi(source.port()));
  std::vector<UniqueFd> crowd;
  for (int i = 0; i < 100; ++i) crowd.push_back(raw_socket(port));
  std::vector<std::byte> local(1 * kMiB);
  const ReadOp op{.remote = source.key(), .local = local.data(), .run_bytes = local.size()};
  EXPECT_EQ(read_one(*path, op), OpStatus::kOk);
  EXPECT_TRUE(peer_closes(crowd.back())) << "the last one found no descriptor";
  crowd.clear();
  EXPECT_TRUE(eventually([&] {
    auto fresh = tcp::make_connector()->connect(source.target(), test_deadline());
    return fresh && read_one(**fresh, op) == OpStatus::kOk;
  }));
}

class TcpHostility : public ::testing::Test {
 protected:
  void SetUp() override { serve({.listen_host = "127.0.0.1"}); }
  void serve(const tcp::ServerOptions& options) {
    server_.reset();
    auto server = tcp::TcpServer::create(options, registry_, incarnation_);
    ASSERT_TRUE(server) << server.error().message();
    server_ = std::move(*server);
  }
  PathTarget target() { return {"tcp", server_->endpoint("127.0.0.1"), token_, incarnation_}; }
  std::array<std::byte, tcp::kClientHelloBytes> hello() const {
    std::array<std::byte, tcp::kClientHelloBytes> frame;
    tcp::encode(tcp::ClientHello{token_, incarnation_}, frame);
    return frame;
  }
  void expect_service() {
    const auto path = connect(target());
    ASSERT_TRUE(path);
    std::vector<std::byte> local(segment_.bytes().size());
    EXPECT_EQ(read_one(*path, {.remote = key_, .local = local.data(), .run_bytes = local.size()}),
              OpStatus::kOk);
    EXPECT_EQ(std::memcmp(local.data(), segment_.bytes().data(), local.size()), 0);
  }

  const TestSegment segment_{256 * kKiB};
  SegmentRegistry registry_;
  const RegionKey key_ = registry_.add(segment_.bytes(), segment_.fd(), 0, {}, nullptr);
  const SessionToken token_ = [this] {
    const SessionToken token = SessionToken::random();
    registry_.admit({.token = token, .puller = "test", .regions = {key_}});
    return token;
  }();
  const Incarnation incarnation_ = Incarnation::random();
  std::unique_ptr<tcp::TcpServer> server_;
};

TEST_F(TcpHostility, GarbageInsteadOfAHelloEndsTheConnectionOnly) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  for (int round = 0; round < 200; ++round) {
    const UniqueFd socket = raw_socket(server_->port());
    std::vector<std::byte> bytes(48 + random() % 200);
    for (auto& byte : bytes) byte = static_cast<std::byte>(random());
    if (round % 2 == 0) {  // a real hello with a few wrong bytes
      const auto good = hello();
      std::copy(good.begin(), good.end(), bytes.begin());
      for (int i = 0; i < 3; ++i)
        bytes[random() % 48] ^= static_cast<std::byte>(1 + random() % 255);
    }
    send_bytes(socket, bytes);
    EXPECT_TRUE(peer_closes(socket)) << "round " << round;
  }
  expect_service();
}

TEST_F(TcpHostility, GarbageAndHostileRequestsAfterTheHelloNeverHurtOthers) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  const auto value = [&]() -> std::uint64_t {
    switch (random() % 6) {
      case 0:
        return random();
      case 1:
        return ~std::uint64_t{0} - random() % 4096;
      case 2:
        return segment_.bytes().size() - random() % 4096;
      case 3:
        return std::uint64_t{1} << random() % 64;
      default:
        return random() % 4096;
    }
  };
  for (int round = 0; round < 300; ++round) {
    const UniqueFd socket = raw_socket(server_->port());
    send_bytes(socket, hello());
    std::vector<std::byte> bytes;
    for (int i = 0; i < 40; ++i) {
      std::array<std::byte, tcp::kRequestBytes> frame;
      RegionKey key = key_;
      if (random() % 8 == 0) key = {static_cast<std::uint32_t>(value()), key.generation};
      tcp::encode(
          tcp::Request{
              .wr_id = value(), .region = key, .range = {value(), value(), value(), value()}},
          frame);
      if (random() % 30 == 0) frame[random() % 8] ^= std::byte{1};
      bytes.insert(bytes.end(), frame.begin(), frame.end());
    }
    if (round % 3 == 0) bytes.resize(random() % bytes.size());
    send_bytes(socket, bytes);
    if (round % 4 == 0) {  // reads some of the answers before it leaves
      std::array<std::byte, 8192> sink;
      ::recv(socket.get(), sink.data(), sink.size(), 0);
    }
  }
  expect_service();
  EXPECT_TRUE(eventually([&] { return server_->stats().connections == 0; }));
  EXPECT_EQ(registry_.reader_count(key_), 0u);
}

TEST_F(TcpHostility, AThousandSilentSocketsCostAThousandSocketsAndNothingElse) {
  serve({.listen_host = "127.0.0.1", .max_pending_hellos = 100, .hello_timeout = 500ms});
  std::vector<UniqueFd> idle;
  for (int i = 0; i < 1000; ++i) {
    idle.push_back(raw_socket(server_->port()));
    if (i % 250 == 0) expect_service();
  }
  expect_service();
  EXPECT_LE(server_->stats().connections, 110u);
  EXPECT_TRUE(eventually([&] { return server_->stats().connections == 0; }));
  for (const UniqueFd& socket : idle) ASSERT_TRUE(peer_closes(socket));
  EXPECT_EQ(server_->stats().shed, 1000u);
}

TEST_F(TcpHostility, ConnectionsBeyondTheCapAreClosedAtOnce) {
  serve({.listen_host = "127.0.0.1", .max_connections = 8, .hello_timeout = 60s});
  std::vector<UniqueFd> crowd;
  for (int i = 0; i < 8; ++i) crowd.push_back(raw_socket(server_->port()));
  ASSERT_TRUE(eventually([&] { return server_->stats().connections == 8; }));
  const UniqueFd extra = raw_socket(server_->port());
  EXPECT_TRUE(peer_closes(extra));
  crowd.clear();
  ASSERT_TRUE(eventually([&] { return server_->stats().connections == 0; }));
  expect_service();
}

TEST_F(TcpHostility, AHelloThatTricklesInIsCutOffAtTheDeadline) {
  serve({.listen_host = "127.0.0.1", .hello_timeout = 300ms});
  const UniqueFd socket = raw_socket(server_->port());
  const auto frame = hello();
  for (std::size_t i = 0; i + 1 < frame.size(); ++i) {
    send_bytes(socket, std::span(frame).subspan(i, 1));
    ::usleep(20'000);
  }
  EXPECT_TRUE(peer_closes(socket));
}

TEST_F(TcpHostility, APeerThatNeverReadsLosesItsStreamAndLetsTheRegionGo) {
  serve({.listen_host = "127.0.0.1", .stall_timeout = 200ms});
  const TestSegment large(32 * kMiB);
  const RegionKey key = registry_.add(large.bytes(), large.fd(), 0, {}, nullptr);
  registry_.admit({.token = token_, .puller = "test", .regions = {key_, key}});
  const UniqueFd socket = raw_socket(server_->port());
  send_bytes(socket, hello());
  std::array<std::byte, tcp::kRequestBytes> frame;
  tcp::encode(tcp::Request{.region = key, .range = {0, large.bytes().size(), 1, 0}}, frame);
  send_bytes(socket, frame);
  send_bytes(socket, frame);
  EXPECT_TRUE(eventually([&] { return registry_.reader_count(key) == 1; }));
  expect_service();
  EXPECT_TRUE(eventually([&] { return registry_.reader_count(key) == 0; }));
  EXPECT_EQ(server_->stats().connections, 0u);
}

}  // namespace
}  // namespace rekindle::transport::testing
