// Both ways of sending give the same bytes and notice a truncated file. The congestion control
// chooses between them.
#include "transport/tcp/sender.h"

#include <cstring>
#include <numeric>

#include <sys/mman.h>
#include <sys/socket.h>

#include <gtest/gtest.h>

#include "src/base/unique_fd.h"
#include "src/base/units.h"
#include "transport/tcp/tcp_socket.h"
#include "transport/tcp/tcp_transport.h"

namespace rekindle::transport::tcp {
namespace {

constexpr std::uint64_t kBytes = 512 * kKiB;

class SenderTest : public ::testing::TestWithParam<Sender::From> {
 protected:
  void SetUp() override {
    file_.reset(::memfd_create("sender-test", MFD_CLOEXEC));
    ASSERT_EQ(::ftruncate(file_.get(), kBytes), 0);
    void* const data = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file_.get(), 0);
    ASSERT_NE(data, MAP_FAILED);
    bytes_ = {static_cast<std::byte*>(data), kBytes};
    for (std::size_t i = 0; i < kBytes; ++i) bytes_[i] = static_cast<std::byte>(i * 131 + i / 4096);
    region_ = std::make_shared<Region>();
    region_->bytes = bytes_;
    region_->fd = file_.get();
    int sockets[2];
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, sockets), 0);
    near_.reset(sockets[0]);
    far_.reset(sockets[1]);
  }
  void TearDown() override { ::munmap(bytes_.data(), kBytes); }

  std::vector<std::byte> take() {
    std::vector<std::byte> all(64 * kKiB);
    const ssize_t n = ::recv(far_.get(), all.data(), all.size(), MSG_DONTWAIT);
    all.resize(n > 0 ? static_cast<std::size_t>(n) : 0);
    return all;
  }
  // Sends the answer while a reader takes it away; ends with it or when the stream breaks.
  Sender::Outcome send_all(Sender& sender, std::vector<std::byte>& received) {
    for (;;) {
      const auto sent = sender.send(near_.get(), kBytes, false);
      for (auto part = take(); !part.empty(); part = take()) {
        received.insert(received.end(), part.begin(), part.end());
      }
      if (sent.outcome != Sender::Outcome::kBlocked) return sent.outcome;
    }
  }

  UniqueFd file_;
  std::span<std::byte> bytes_;
  std::shared_ptr<Region> region_;
  UniqueFd near_;
  UniqueFd far_;
};

TEST_P(SenderTest, OnePieceAndRowsArriveAsTheyLie) {
  const StridedRange ranges[] = {
      {.offset = 4097, .run_bytes = 300 * kKiB, .count = 1, .stride = 0},
      {.offset = 8, .run_bytes = 4000, .count = 50, .stride = 8192},
      {.offset = 0, .run_bytes = 40 * kKiB, .count = 7, .stride = 64 * kKiB}};
  for (const StridedRange& range : ranges) {
    Sender sender(GetParam());
    sender.start({.wr_id = 7, .region = {}, .range = range}, region_);
    std::vector<std::byte> received;
    ASSERT_EQ(send_all(sender, received), Sender::Outcome::kDone);
    ASSERT_EQ(received.size(), kResponseBytes + range.run_bytes * range.count);
    for (std::uint64_t run = 0; run < range.count; ++run) {
      ASSERT_EQ(std::memcmp(received.data() + kResponseBytes + run * range.run_bytes,
                            bytes_.data() + range.offset + run * range.stride, range.run_bytes),
                0);
    }
  }
}

TEST_P(SenderTest, AFileThatIsTruncatedMeanwhileBreaksTheStream) {
  Sender sender(GetParam());
  sender.start({.wr_id = 7,
                .region = {},
                .range = {.offset = 0, .run_bytes = kBytes, .count = 1, .stride = 0}},
               region_);
  ASSERT_EQ(sender.send(near_.get(), 64 * kKiB, false).payload, 64 * kKiB);
  ASSERT_EQ(::ftruncate(file_.get(), 64 * kKiB), 0);
  std::vector<std::byte> received;
  EXPECT_EQ(send_all(sender, received), Sender::Outcome::kBroken);
  EXPECT_FALSE(sender.broken_reason().empty());
  EXPECT_LE(received.size(), kResponseBytes + 64 * kKiB);
}

INSTANTIATE_TEST_SUITE_P(Ways, SenderTest,
                         ::testing::Values(Sender::From::kFile, Sender::From::kMapping),
                         [](const auto& way) {
                           return way.param == Sender::From::kFile ? "File" : "Mapping";
                         });

// Every kernel has reno.
TEST(CongestionControl, ConnectionsHaveThatOfTheirListener) {
  auto listener = Listener::bind("127.0.0.1", 0, "reno");
  ASSERT_TRUE(listener) << listener.error().message();
  const UniqueFd client(::socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(listener->port());
  ASSERT_EQ(::connect(client.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  std::string accepted;
  std::uint64_t shed = 0;
  listener->accept_some([&](UniqueFd socket) { accepted = congestion_control(socket.get()); },
                        shed);
  EXPECT_EQ(accepted, "reno");
}

TEST(CongestionControl, OneThatTheKernelLacksIsRefusedWithWhatThereIs) {
  const auto refused = Listener::bind("127.0.0.1", 0, "carrier-pigeon");
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), ErrorCode::kInvalid);
  EXPECT_NE(refused.error().message().find("reno"), std::string::npos) << refused.error().message();
  EXPECT_FALSE(check_congestion_control("a-name-that-is-longer-than-any"));
  EXPECT_TRUE(check_congestion_control(""));
  EXPECT_FALSE(host_congestion_control().empty());
}

TEST(CongestionControl, OnlyBbrIsPaced) {
  EXPECT_TRUE(is_paced("bbr"));
  EXPECT_TRUE(is_paced("bbr3"));
  EXPECT_FALSE(is_paced("cubic"));
  EXPECT_FALSE(is_paced(""));
}

}  // namespace
}  // namespace rekindle::transport::tcp
