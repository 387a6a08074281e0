// TLS on data streams: who may speak, what the wire shows, and what hostile peers achieve.
#include "transport/tcp/data_tls.h"

#include <algorithm>
#include <array>
#include <csignal>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <gtest/gtest.h>
#include <openssl/evp.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>

#include "src/base/units.h"
#include "tests/transport/test_source.h"
#include "transport/tcp/tcp_transport.h"
#include "transport/tcp/tcp_wire.h"

namespace rekindle::transport::testing {
namespace {

using tcp::DataTls;

UniqueFd dial(std::uint16_t port) {
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

// Serves one connection with `serve` at an address of its own.
class OneConnection {
 public:
  explicit OneConnection(std::function<void(int fd)> serve)
      : listener_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    if (::bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), length) != 0 ||
        ::listen(listener_.get(), 1) != 0 ||
        ::getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&address), &length) != 0) {
      throw std::runtime_error("listen");
    }
    port_ = ntohs(address.sin_port);
    thread_ = std::jthread([this, serve = std::move(serve)] {
      const UniqueFd socket(::accept(listener_.get(), nullptr, nullptr));
      serve(socket.get());
    });
  }
  std::string endpoint() const { return fmt::format("127.0.0.1:{}", port_); }
  void join() { thread_.join(); }

 private:
  UniqueFd listener_;
  std::uint16_t port_ = 0;
  std::jthread thread_;
};

class DataTlsTest : public ::testing::Test, public TestSource<tcp::TcpServer, tcp::ServerOptions> {
 protected:
  DataTlsTest()
      : TestSource(tcp::make_connector({}, tcp::Encryption::kAlways),
                   {.listen_host = "127.0.0.1"}) {
    std::signal(SIGPIPE, SIG_IGN);  // as the rekindle command does
  }
  void expect_service() {
    const auto path = connect(token_);
    ASSERT_NE(path, nullptr);
    std::vector<std::byte> local(segment_.bytes().size());
    EXPECT_EQ(read_one(*path, {.remote = key_, .local = local.data(), .run_bytes = local.size()}),
              OpStatus::kOk);
    EXPECT_TRUE(std::ranges::equal(local, segment_.bytes()));
  }

  const TestSegment segment_{1 * kMiB};
  const RegionKey key_ = add(segment_);
  const SessionToken token_ = admit({key_});
};

TEST_F(DataTlsTest, StatusSaysWhichStreamsAreEncrypted) {
  EXPECT_NE(connect(token_)->describe().find("(encrypted"), std::string::npos);
  EXPECT_EQ(server_->stats().encrypted, 1u);
  const auto plain = tcp::make_connector()->connect(target(token_), test_deadline());
  ASSERT_TRUE(plain) << plain.error().message();
  EXPECT_EQ((*plain)->describe().find("encrypted"), std::string::npos);
  EXPECT_EQ(server_->stats().encrypted, 1u);
}

TEST_F(DataTlsTest, ASourceThatDemandsEncryptionGetsItFromEveryReader) {
  serve({.listen_host = "127.0.0.1", .require_encryption = true});
  auto path = tcp::make_connector()->connect(target(token_), test_deadline());
  ASSERT_TRUE(path) << path.error().message();
  EXPECT_NE((*path)->describe().find("(encrypted"), std::string::npos);
}

TEST_F(DataTlsTest, APlainReaderOfASourceThatDemandsEncryptionIsTold) {
  serve({.listen_host = "127.0.0.1", .require_encryption = true});
  const UniqueFd socket = dial(server_->port());
  std::array<std::byte, tcp::kClientHelloBytes> hello;
  tcp::encode(tcp::ClientHello{.session = handle_of(token_).bytes, .incarnation = incarnation_},
              hello);
  ASSERT_EQ(::send(socket.get(), hello.data(), hello.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(hello.size()));
  std::array<std::byte, tcp::kServerHelloBytes> answer;
  ASSERT_EQ(::recv(socket.get(), answer.data(), answer.size(), MSG_WAITALL),
            static_cast<ssize_t>(answer.size()));
  EXPECT_EQ(tcp::decode_server_hello(answer)->status, HelloStatus::kNotEncrypted);
}

TEST_F(DataTlsTest, TheWireShowsNeitherBytesNorTheToken) {
  std::vector<std::byte> seen;
  OneConnection wire([&](int reader) {
    const UniqueFd source = dial(server_->port());
    std::array<std::byte, 64 << 10> buffer;
    while (true) {
      std::array<pollfd, 2> entries{pollfd{reader, POLLIN, 0}, pollfd{source.get(), POLLIN, 0}};
      if (::poll(entries.data(), 2, 20'000) <= 0) return;
      for (std::size_t i = 0; i < 2; ++i) {
        if (entries[i].revents == 0) continue;
        const ssize_t n = ::recv(entries[i].fd, buffer.data(), buffer.size(), 0);
        if (n <= 0) return;
        const auto bytes = std::span(buffer).first(static_cast<std::size_t>(n));
        seen.insert(seen.end(), bytes.begin(), bytes.end());
        (void)!::send(entries[1 - i].fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      }
    }
  });
  auto tapped = target(token_);
  tapped.endpoint = wire.endpoint();
  {
    auto path = connector_->connect(tapped, test_deadline());
    ASSERT_TRUE(path) << path.error().message();
    std::vector<std::byte> local(256 * kKiB);
    EXPECT_EQ(read_one(**path, {.remote = key_, .local = local.data(), .run_bytes = local.size()}),
              OpStatus::kOk);
  }
  wire.join();
  EXPECT_GT(seen.size(), 256 * kKiB);
  for (std::size_t at = 0; at < 256 * kKiB; at += 64 * kKiB) {
    EXPECT_TRUE(std::ranges::search(seen, segment_.bytes().subspan(at, 16)).empty());
  }
  EXPECT_TRUE(std::ranges::search(seen, std::as_bytes(std::span(token_.bytes))).empty());
}

TEST_F(DataTlsTest, WithoutTheTokenThereIsNoTls) {
  EXPECT_EQ(try_connect(SessionToken::random()).error().code(), ErrorCode::kDenied);
  registry_.revoke(token_);
  EXPECT_EQ(try_connect(token_).error().code(), ErrorCode::kDenied);
}

TEST_F(DataTlsTest, ASessionOfAnotherPullerDoesNotServeThisOne) {
  const SessionToken other = admit({key_});
  const UniqueFd socket = dial(server_->port());
  auto tls = DataTls::connect(socket.get(), other);
  ASSERT_TRUE(tls);
  ASSERT_EQ((*tls)->handshake(), DataTls::Io::kDone);
  std::array<std::byte, tcp::kClientHelloBytes> hello;
  tcp::encode(tcp::ClientHello{.session = handle_of(token_).bytes, .incarnation = incarnation_},
              hello);
  ASSERT_EQ((*tls)->send(hello), static_cast<ssize_t>(hello.size()));
  std::array<std::byte, tcp::kServerHelloBytes> answer;
  ASSERT_EQ((*tls)->receive(answer), static_cast<ssize_t>(answer.size()));
  EXPECT_EQ(tcp::decode_server_hello(answer)->status, HelloStatus::kDenied);
}

// A certificate proves nothing here.
TEST_F(DataTlsTest, AReaderTurnsAwayASourceWithACertificate) {
  OneConnection impostor([](int fd) {
    EVP_PKEY* const key = EVP_EC_gen("P-256");
    X509* const certificate = X509_new();
    ASN1_INTEGER_set(X509_get_serialNumber(certificate), 1);
    X509_gmtime_adj(X509_getm_notBefore(certificate), 0);
    X509_gmtime_adj(X509_getm_notAfter(certificate), 3600);
    X509_set_pubkey(certificate, key);
    X509_sign(certificate, key, EVP_sha256());
    SSL_CTX* const context = SSL_CTX_new(TLS_server_method());
    SSL_CTX_use_certificate(context, certificate);
    SSL_CTX_use_PrivateKey(context, key);
    SSL* const ssl = SSL_new(context);
    SSL_set_fd(ssl, fd);
    EXPECT_NE(SSL_accept(ssl), 1);
    SSL_free(ssl);
    SSL_CTX_free(context);
    X509_free(certificate);
    EVP_PKEY_free(key);
  });
  auto misled = target(token_);
  misled.endpoint = impostor.endpoint();
  const auto path = connector_->connect(misled, test_deadline());
  ASSERT_FALSE(path);
  EXPECT_EQ(path.error().code(), ErrorCode::kDenied) << path.error().message();
  impostor.join();
}

TEST_F(DataTlsTest, GarbageThatBeginsLikeTlsEndsTheConnectionOnly) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  for (int round = 0; round < 100; ++round) {
    const UniqueFd socket = dial(server_->port());
    std::vector<std::byte> bytes(20'000);
    for (auto& byte : bytes) byte = static_cast<std::byte>(random());
    const std::array<std::uint8_t, 5> head{22, 3, 1, 0, static_cast<std::uint8_t>(round)};
    std::memcpy(bytes.data(), head.data(), round % 2 == 0 ? 1 : head.size());
    (void)!::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    std::array<std::byte, 4096> sink;
    while (::recv(socket.get(), sink.data(), sink.size(), 0) > 0) continue;
  }
  expect_service();
}

TEST_F(DataTlsTest, ASilentHandshakeIsCutOffAtTheDeadline) {
  serve({.listen_host = "127.0.0.1", .hello_timeout = 300ms});
  const UniqueFd socket = dial(server_->port());
  const std::array<std::uint8_t, 5> head{22, 3, 1, 2, 0};
  ASSERT_EQ(::send(socket.get(), head.data(), head.size(), MSG_NOSIGNAL), 5);
  std::array<std::byte, 64> sink;
  EXPECT_LE(::recv(socket.get(), sink.data(), sink.size(), 0), 0);
  expect_service();
}

TEST_F(DataTlsTest, ABitThatFlipsOnTheWayBreaksTheStreamAndIsNeverTakenForData) {
  OneConnection wire([&](int reader) {
    const UniqueFd source = dial(server_->port());
    std::array<std::byte, 64 << 10> buffer;
    std::size_t passed = 0;
    while (true) {
      std::array<pollfd, 2> entries{pollfd{reader, POLLIN, 0}, pollfd{source.get(), POLLIN, 0}};
      if (::poll(entries.data(), 2, 20'000) <= 0) return;
      for (std::size_t i = 0; i < 2; ++i) {
        if (entries[i].revents == 0) continue;
        const ssize_t n = ::recv(entries[i].fd, buffer.data(), buffer.size(), 0);
        if (n <= 0) return;
        const auto size = static_cast<std::size_t>(n);
        if (i == 1 && passed < 300'000 && passed + size >= 300'000) buffer[0] ^= std::byte{1};
        if (i == 1) passed += size;
        (void)!::send(entries[1 - i].fd, buffer.data(), size, MSG_NOSIGNAL);
      }
    }
  });
  auto tapped = target(token_);
  tapped.endpoint = wire.endpoint();
  {
    auto path = connector_->connect(tapped, test_deadline());
    ASSERT_TRUE(path) << path.error().message();
    std::vector<std::byte> local(1 * kMiB);
    EXPECT_EQ(read_one(**path, {.remote = key_, .local = local.data(), .run_bytes = local.size()}),
              OpStatus::kPeerLost);
    const std::uint64_t landed = (*path)->bytes_landed();
    EXPECT_TRUE(std::ranges::equal(std::span(local).first(landed), segment_.bytes().first(landed)));
  }
  wire.join();
  expect_service();
}

}  // namespace
}  // namespace rekindle::transport::testing
