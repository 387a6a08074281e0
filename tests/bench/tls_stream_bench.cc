// Encrypted data streams beside plain ones, over loopback, in turns.
//   tls_stream_bench [MIB] [ROUNDS]
// Source and reader share the processors of this host, so the ratio is that of their CPU time where
// these are busy.
#include <array>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <stdexcept>
#include <vector>

#include <poll.h>

#include "src/base/median.h"
#include "src/base/units.h"
#include "tests/transport/test_source.h"
#include "transport/tcp/tcp_transport.h"

namespace rekindle::transport::testing {
namespace {

constexpr std::uint64_t kReadBytes = 4 * kMiB;
constexpr std::size_t kOpen = 8;

// Reads the whole segment once. Returns the seconds that it took.
double read_all(Path& path, RegionKey key, std::span<std::byte> local) {
  const auto begin = std::chrono::steady_clock::now();
  std::uint64_t posted = 0;
  std::uint64_t done = 0;
  std::array<Completion, kOpen> completions;
  while (done < local.size()) {
    while (posted < local.size() && posted - done < kOpen * kReadBytes) {
      const ReadOp op{.wr_id = posted,
                      .remote = key,
                      .remote_offset = posted,
                      .local = local.data() + posted,
                      .run_bytes = kReadBytes};
      if (path.post({&op, 1}).value_or(0) != 1) throw std::runtime_error("the stream broke");
      posted += kReadBytes;
    }
    const std::size_t count = path.poll(completions);
    for (std::size_t i = 0; i < count; ++i) {
      if (completions[i].status != OpStatus::kOk) throw std::runtime_error("a read failed");
      done += kReadBytes;
    }
    if (count == 0 && path.arm()) {
      const short events = path.wants_write() ? POLLIN | POLLOUT : POLLIN;
      pollfd entry{path.wait_fd(), events, 0};
      (void)::poll(&entry, 1, 1000);
    }
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

int run(std::uint64_t mib, int rounds) {
  std::signal(SIGPIPE, SIG_IGN);
  using Source = TestSource<tcp::TcpServer, tcp::ServerOptions>;
  const std::uint64_t bytes = mib * kMiB / kReadBytes * kReadBytes;
  const TestSegment segment(bytes);
  Source source(tcp::make_connector(), {.listen_host = "127.0.0.1"});
  const RegionKey key = source.add(segment);
  const SessionToken token = source.admit({key});
  const auto encrypting = tcp::make_connector({}, tcp::Encryption::kAlways);
  const auto plain = source.connector_->connect(source.target(token), test_deadline());
  const auto encrypted = encrypting->connect(source.target(token), test_deadline());
  if (!plain || !encrypted) return 1;
  std::vector<std::byte> local(bytes);
  std::vector<double> of_plain;
  std::vector<double> of_encrypted;
  for (int round = -1; round < rounds; ++round) {
    const double first = read_all(**plain, key, local);
    const double second = read_all(**encrypted, key, local);
    if (round < 0) continue;  // faults pages in
    of_plain.push_back(first);
    of_encrypted.push_back(second);
  }
  const double size = static_cast<double>(bytes) / 1e6;
  const bool kernel = source.server_->stats().encrypted_by_kernel != 0;
  fmt::print(
      "{} MiB, one stream, median of {}: plain {:.1f} MB/s, encrypted {:.1f} MB/s (the source "
      "encrypts in {}), ratio {:.3f}\n",
      bytes / kMiB, rounds, size / median(of_plain), size / median(of_encrypted),
      kernel ? "the kernel" : "user space", median(of_plain) / median(of_encrypted));
  return 0;
}

}  // namespace
}  // namespace rekindle::transport::testing

int main(int argc, char** argv) {
  const std::uint64_t mib = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 512;
  return rekindle::transport::testing::run(mib, argc > 2 ? std::atoi(argv[2]) : 7);
}
