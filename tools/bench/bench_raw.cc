#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <ctime>
#include <functional>
#include <thread>

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include "tools/bench/bench_run.h"

namespace rekindle::bench {
namespace {

bool verify(const Setup& setup, std::uint64_t slice) {
  return verify_slice(setup.destination.bytes(), slice, setup.slice_bytes, setup.digests);
}

Result<UniqueFd> connect_raw(std::uint16_t port) {
  UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  if (!socket ||
      ::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    return fail_errno(errno, "connect a plain socket");
  }
  const int on = 1;
  (void)::setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  return socket;
}

bool receive_all(int socket, std::byte* to, std::uint64_t size) {
  while (size != 0) {
    const ssize_t n = ::recv(socket, to, std::min<std::uint64_t>(size, 1 << 20), 0);
    if (n <= 0) return false;
    to += n;
    size -= static_cast<std::uint64_t>(n);
  }
  return true;
}

// Runs body(0) … body(count - 1), a thread each, and times them.
Measured time_threads(const Setup& setup, std::size_t count,
                      const std::function<void(std::size_t)>& body) {
  const double cpu_before = cpu_seconds(setup);
  const TimePoint start = std::chrono::steady_clock::now();
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < count; ++i) threads.emplace_back(body, i);
  for (auto& thread : threads) thread.join();
  return {.wall_seconds = seconds(std::chrono::steady_clock::now() - start),
          .cpu_seconds = cpu_seconds(setup) - cpu_before,
          .slice_seconds = {}};
}

// Blocks are dealt to the streams in turn; each stream takes the next one that is left.
class Blocks {
 public:
  explicit Blocks(const Setup& setup)
      : setup_(setup), count_(setup.total_bytes / setup.block_bytes) {}
  bool next(std::uint64_t& offset) {
    const std::uint64_t block = next_.fetch_add(1);
    offset = block * setup_.block_bytes % setup_.source_pool.bytes().size();
    return block < count_;
  }

 private:
  const Setup& setup_;
  const std::uint64_t count_;
  std::atomic<std::uint64_t> next_ = 0;
};

}  // namespace

double cpu_seconds(const Setup& setup) {
  timespec own{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &own);
  double sum = static_cast<double>(own.tv_sec) + static_cast<double>(own.tv_nsec) * 1e-9;
  for (const auto& source : setup.sources) sum += source->cpu_seconds();
  return sum;
}

Result<Measured> measure_sockets(const Setup& setup, bool integrity) {
  std::vector<UniqueFd> sockets;
  for (const auto& source : setup.sources) {
    for (std::size_t i = 0; i < setup.streams; ++i) {
      TRY(UniqueFd socket, connect_raw(source->raw_port()));
      sockets.push_back(std::move(socket));
    }
  }
  Blocks blocks(setup);
  std::atomic<bool> failed = false;
  auto measured = time_threads(setup, sockets.size(), [&](std::size_t stream) {
    const int socket = sockets[stream].get();
    for (std::uint64_t at = 0; blocks.next(at) && !failed;) {
      const RawRequest request{at, setup.block_bytes};
      bool good = ::send(socket, &request, sizeof request, MSG_NOSIGNAL) == sizeof request;
      for (std::uint64_t end = at + setup.block_bytes; good && at < end; at += setup.slice_bytes) {
        good = receive_all(socket, setup.destination.bytes().data() + at, setup.slice_bytes) &&
               (!integrity || verify(setup, at));
      }
      if (!good) failed = true;
    }
  });
  if (failed) return fail(ErrorCode::kPeerLost, "a plain socket failed");
  return measured;
}

Result<Measured> measure_memcpy(const Setup& setup, bool integrity) {
  Blocks blocks(setup);
  std::atomic<bool> failed = false;
  auto measured = time_threads(setup, setup.streams * setup.sources.size(), [&](std::size_t) {
    for (std::uint64_t at = 0; blocks.next(at);) {
      std::memcpy(setup.destination.bytes().data() + at, setup.source_pool.bytes().data() + at,
                  setup.block_bytes);
      if (!integrity) continue;
      for (std::uint64_t end = at + setup.block_bytes; at < end; at += setup.slice_bytes) {
        if (!verify(setup, at)) failed = true;
      }
    }
  });
  if (failed) return fail(ErrorCode::kCorrupt, "memcpy gave wrong bytes");
  return measured;
}

}  // namespace rekindle::bench
