// TCP peers that send garbage, stay silent or never read, and sources without descriptors.
#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <thread>
#include <vector>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <gtest/gtest.h>

#include "src/base/units.h"
#include "tests/transport/source_process.h"
#include "tests/transport/test_source.h"
#include "transport/tcp/tcp_socket.h"
#include "transport/tcp/tcp_transport.h"
#include "transport/tcp/tcp_wire.h"

namespace rekindle::transport::testing {
namespace {

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

// False: the peer closes before.
bool receive_bytes(const UniqueFd& socket, std::span<std::byte> into) {
  return ::recv(socket.get(), into.data(), into.size(), MSG_WAITALL) ==
         static_cast<ssize_t>(into.size());
}

// nullopt: the peer closes instead.
std::optional<HelloStatus> status_from(const UniqueFd& socket) {
  std::array<std::byte, tcp::kServerHelloBytes> frame;
  if (!receive_bytes(socket, frame)) return std::nullopt;
  const auto hello = tcp::decode_server_hello(frame);
  return hello ? std::optional(hello->status) : std::nullopt;
}

// Reads until the peer closes. False: it does not.
bool peer_closes(const UniqueFd& socket) {
  std::array<std::byte, 4096> sink;
  while (true) {
    pollfd entry{socket.get(), POLLIN, 0};
    if (::poll(&entry, 1, 20'000) != 1) return false;
    if (::recv(socket.get(), sink.data(), sink.size(), 0) <= 0) return true;
  }
}

class TcpHostility : public ::testing::Test, public TestSource<tcp::TcpServer, tcp::ServerOptions> {
 protected:
  TcpHostility() : TestSource(tcp::make_connector(), {.listen_host = "127.0.0.1"}) {}
  std::array<std::byte, tcp::kClientHelloBytes> hello() const {
    std::array<std::byte, tcp::kClientHelloBytes> frame;
    tcp::encode(tcp::ClientHello{.session = handle_of(token_).bytes, .incarnation = incarnation_},
                frame);
    return frame;
  }
  std::array<std::byte, tcp::kClientHelloBytes> hello_of_earlier_releases() const {
    std::array<std::byte, tcp::kClientHelloBytes> frame;
    tcp::encode(tcp::ClientHello{tcp::kTokenWireVersion, token_.bytes, incarnation_}, frame);
    return frame;
  }
  // The whole hello of a reader that knows the token. Returns the bytes that it has sent.
  std::vector<std::byte> enter(const UniqueFd& socket) const {
    HelloExchange exchange{incarnation_, HelloExchange::fresh_nonce(), {}};
    std::vector<std::byte> sent;
    const auto send = [&](std::span<const std::byte> bytes) {
      send_bytes(socket, bytes);
      sent.insert(sent.end(), bytes.begin(), bytes.end());
    };
    send(hello());
    send(std::as_bytes(std::span(exchange.reader_nonce)));
    EXPECT_EQ(status_from(socket), HelloStatus::kOk);
    std::array<std::byte, tcp::kChallengeBytes> frame;
    EXPECT_TRUE(receive_bytes(socket, frame));
    const auto challenge = tcp::decode_challenge(frame);
    exchange.source_nonce = challenge.nonce;
    EXPECT_TRUE(exchange.proves(token_, HelloExchange::Side::kSource, challenge.proof));
    const auto proof = exchange.prove(token_, HelloExchange::Side::kReader);
    send(std::as_bytes(std::span(proof)));
    EXPECT_EQ(status_from(socket), HelloStatus::kOk);
    return sent;
  }
  void expect_service() {
    const auto path = connect(token_);
    ASSERT_TRUE(path);
    std::vector<std::byte> local(segment_.bytes().size());
    EXPECT_EQ(read_one(*path, {.remote = key_, .local = local.data(), .run_bytes = local.size()}),
              OpStatus::kOk);
    EXPECT_EQ(std::memcmp(local.data(), segment_.bytes().data(), local.size()), 0);
  }

  const TestSegment segment_{256 * kKiB};
  const RegionKey key_ = add(segment_);
  const SessionToken token_ = admit({key_});
};

TEST(TcpShedding, ASourceWithoutDescriptorsShedsNewStreamsServesOldOnesAndRecovers) {
  SourceUnderTest source("tcp", 1 * kMiB, {}, {{RLIMIT_NOFILE, {32, 32}}});
  const auto connector = tcp::make_connector();
  const auto path = connector->connect(source.target(), test_deadline()).value();
  const auto port = static_cast<std::uint16_t>(std::stoi(source.port()));
  std::vector<UniqueFd> crowd;
  for (int i = 0; i < 100; ++i) crowd.push_back(raw_socket(port));
  std::vector<std::byte> local(1 * kMiB);
  const ReadOp op{.remote = source.key(), .local = local.data(), .run_bytes = local.size()};
  EXPECT_EQ(read_one(*path, op), OpStatus::kOk);
  EXPECT_TRUE(peer_closes(crowd.back())) << "the last one found no descriptor";
  crowd.clear();
  EXPECT_TRUE(eventually([&] {
    auto fresh = connector->connect(source.target(), test_deadline());
    return fresh && read_one(**fresh, op) == OpStatus::kOk;
  }));
}

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
    enter(socket);
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
      // A part of a request has no answer.
      const timeval patience{.tv_sec = 0, .tv_usec = 50'000};
      ::setsockopt(socket.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
      std::array<std::byte, 8192> sink;
      ::recv(socket.get(), sink.data(), sink.size(), 0);
    }
  }
  expect_service();
  EXPECT_TRUE(eventually([&] { return server_->stats().connections == 0; }));
  EXPECT_EQ(registry_.reader_count(key_), 0u);
}

TEST_F(TcpHostility, WhoeverReadsAStreamCanOpenNoneOfItsOwn) {
  const UniqueFd socket = raw_socket(server_->port());
  const auto sent = enter(socket);
  const auto token = std::as_bytes(std::span(token_.bytes));
  EXPECT_TRUE(std::ranges::search(sent, token).empty());
  const UniqueFd replay = raw_socket(server_->port());
  send_bytes(replay, sent);
  EXPECT_EQ(status_from(replay), HelloStatus::kOk) << "the handle is known";
  std::array<std::byte, tcp::kChallengeBytes> challenge;
  ASSERT_TRUE(receive_bytes(replay, challenge));
  EXPECT_EQ(status_from(replay), HelloStatus::kDenied) << "the proof is for another nonce";
  EXPECT_TRUE(peer_closes(replay));
}

TEST_F(TcpHostility, TheSourcesOwnProofDoesNotServeAReader) {
  const UniqueFd socket = raw_socket(server_->port());
  send_bytes(socket, hello());
  std::array<std::byte, tcp::kNonceBytes> nonce{};
  send_bytes(socket, nonce);
  ASSERT_EQ(status_from(socket), HelloStatus::kOk);
  std::array<std::byte, tcp::kChallengeBytes> challenge;
  ASSERT_TRUE(receive_bytes(socket, challenge));
  send_bytes(socket, std::span(challenge).last(tcp::kProofBytes));
  EXPECT_EQ(status_from(socket), HelloStatus::kDenied);
}

TEST_F(TcpHostility, ATokenThatLeaksOpensNoStreamInTheOldWay) {
  const UniqueFd socket = raw_socket(server_->port());
  send_bytes(socket, hello_of_earlier_releases());
  EXPECT_EQ(status_from(socket), HelloStatus::kDenied);
}

TEST_F(TcpHostility, ASessionOfAnEarlierReleaseSendsItsToken) {
  registry_.admit({.token = token_, .puller = "old", .regions = {key_}, .sends_token = true});
  auto old = target(token_);
  EXPECT_EQ(connector_->connect(old, test_deadline()).error().code(), ErrorCode::kDenied);
  old.sends_token = true;
  const auto path = connector_->connect(old, test_deadline());
  ASSERT_TRUE(path) << path.error().message();
  std::vector<std::byte> local(4096);
  EXPECT_EQ(read_one(**path, {.remote = key_, .local = local.data(), .run_bytes = local.size()}),
            OpStatus::kOk);
}

TEST_F(TcpHostility, S13ATokenOpensNoStreamFromAnAddressThatIsNotThePullers) {
  const SessionToken elsewhere = SessionToken::random();
  registry_.admit(
      {.token = elsewhere, .puller = "p", .regions = {key_}, .stream_hosts = {"10.9.9.9", "::1"}});
  EXPECT_EQ(connector_->connect(target(elsewhere), test_deadline()).error().code(),
            ErrorCode::kDenied);
  const SessionToken here = SessionToken::random();
  registry_.admit(
      {.token = here, .puller = "p", .regions = {key_}, .stream_hosts = {"10.9.9.9", "127.0.0.1"}});
  const auto path = connector_->connect(target(here), test_deadline());
  EXPECT_TRUE(path) << path.error().message();
}

// It sits at the address of a source that has ended, and repeats all that sources say in public.
TEST_F(TcpHostility, AReaderTurnsAwayASourceThatDoesNotKnowTheSession) {
  UniqueFd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  ASSERT_EQ(::bind(listener.get(), reinterpret_cast<sockaddr*>(&address), length), 0);
  ASSERT_EQ(::listen(listener.get(), 1), 0);
  ASSERT_EQ(::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &length), 0);
  auto misled = target(token_);
  misled.endpoint = fmt::format("127.0.0.1:{}", ntohs(address.sin_port));
  std::array<std::byte, tcp::kServerHelloBytes> welcome;
  tcp::encode(tcp::ServerHello{.incarnation = incarnation_}, welcome);
  std::array<std::byte, tcp::kChallengeBytes> challenge{};
  std::vector<std::byte> heard(tcp::kClientHelloBytes + tcp::kNonceBytes + tcp::kProofBytes);
  std::jthread impostor([&] {
    const UniqueFd socket(::accept(listener.get(), nullptr, nullptr));
    send_bytes(socket, welcome);
    send_bytes(socket, challenge);
    send_bytes(socket, welcome);
    const ssize_t n = ::recv(socket.get(), heard.data(), heard.size(), MSG_WAITALL);
    heard.resize(n > 0 ? static_cast<std::size_t>(n) : 0);
  });
  EXPECT_EQ(connector_->connect(misled, test_deadline()).error().code(), ErrorCode::kDenied);
  impostor.join();
  EXPECT_EQ(heard.size(), tcp::kClientHelloBytes + tcp::kNonceBytes) << "it hears no proof";
}

TEST_F(TcpHostility, ASessionThatEndsDuringAHelloAdmitsNobody) {
  const UniqueFd socket = raw_socket(server_->port());
  HelloExchange exchange{incarnation_, HelloExchange::fresh_nonce(), {}};
  send_bytes(socket, hello());
  send_bytes(socket, std::as_bytes(std::span(exchange.reader_nonce)));
  ASSERT_EQ(status_from(socket), HelloStatus::kOk);
  std::array<std::byte, tcp::kChallengeBytes> frame;
  ASSERT_TRUE(receive_bytes(socket, frame));
  registry_.revoke(token_);
  server_->drop_session(token_);
  exchange.source_nonce = tcp::decode_challenge(frame).nonce;
  const auto proof = exchange.prove(token_, HelloExchange::Side::kReader);
  send_bytes(socket, std::as_bytes(std::span(proof)));
  EXPECT_EQ(status_from(socket), HelloStatus::kDenied);
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
  enter(socket);
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
