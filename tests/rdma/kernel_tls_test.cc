// Encrypted data streams of a kernel that has TLS itself, which the emulated machine's has.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <vector>

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "src/base/unique_fd.h"
#include "src/base/units.h"
#include "tests/transport/test_source.h"
#include "transport/tcp/tcp_transport.h"

namespace {

std::atomic<std::uint64_t> g_sendfile_bytes = 0;

ssize_t counted_sendfile(int out, int in, off_t* offset, std::size_t count) {
  const ssize_t sent = ::syscall(SYS_sendfile, out, in, offset, count);
  if (sent > 0) g_sendfile_bytes += static_cast<std::uint64_t>(sent);
  return sent;
}

}  // namespace

// Instead of the C library's.
extern "C" ssize_t sendfile(int out, int in, off_t* offset, std::size_t count) noexcept {
  return counted_sendfile(out, in, offset, count);
}
extern "C" ssize_t sendfile64(int out, int in, off64_t* offset, std::size_t count) noexcept {
  return counted_sendfile(out, in, offset, count);
}

namespace rekindle::transport::testing {
namespace {

using ::testing::HasSubstr;

constexpr std::uint64_t kSegmentBytes = 2 * kMiB;

class KernelTls : public ::testing::Test, public TestSource<tcp::TcpServer, tcp::ServerOptions> {
 protected:
  // Under reno, files are sent by sendfile().
  KernelTls()
      : TestSource(tcp::make_connector("reno", tcp::Encryption::kAlways),
                   {.listen_host = "127.0.0.1",
                    .congestion = "reno",
                    // The kernel may load its ciphers meanwhile.
                    .hello_timeout = std::chrono::seconds(60)}) {
    std::signal(SIGPIPE, SIG_IGN);  // as the rekindle command does
  }
  void SetUp() override {
    const UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(server_->port());
    ASSERT_EQ(::connect(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    if (::setsockopt(socket.get(), SOL_TCP, TCP_ULP, "tls", 3) != 0) {
      GTEST_SKIP() << "the kernel of this host has no TLS (modprobe tls)";
    }
  }
  void expect_read(const ReadOp& op, std::uint64_t offset) {
    const auto path = connect(token_);
    ASSERT_NE(path, nullptr);
    EXPECT_THAT(path->describe(), HasSubstr("(encrypted"));
    ASSERT_EQ(read_one(*path, op), OpStatus::kOk);
    EXPECT_TRUE(std::ranges::equal(std::span(op.local, op.run_bytes),
                                   segment_.bytes().subspan(offset, op.run_bytes)));
    EXPECT_EQ(server_->stats().encrypted_by_kernel, server_->stats().encrypted);
  }

  const TestSegment segment_{kSegmentBytes};
  const RegionKey key_ = add(segment_);
  const SessionToken token_ = admit({key_});
};

TEST_F(KernelTls, TheKernelEncryptsWhatSendfileSends) {
  g_sendfile_bytes = 0;
  std::vector<std::byte> local(kSegmentBytes);
  expect_read({.remote = key_, .local = local.data(), .run_bytes = local.size()}, 0);
  EXPECT_EQ(server_->stats().encrypted_by_kernel, 1u);
  EXPECT_EQ(g_sendfile_bytes, kSegmentBytes);
  EXPECT_EQ(server_->stats().bytes_sent_encrypted, kSegmentBytes);
}

// The kernel holds a record back while more is announced. Nothing must wait in it for ever.
TEST_F(KernelTls, ReadsOfEverySizeArriveWithoutAnotherOneBehindThem) {
  std::vector<std::byte> local(kSegmentBytes);
  for (const std::uint64_t bytes : {1ul, 24ul, 4095ul, 16384ul, 16385ul, 32768ul, 65537ul}) {
    SCOPED_TRACE(bytes);
    expect_read({.remote = key_, .remote_offset = 3, .local = local.data(), .run_bytes = bytes}, 3);
  }
}

}  // namespace
}  // namespace rekindle::transport::testing
