#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>

#include <sys/socket.h>

#include "tests/fuzz/fuzz_check.h"
#include "transport/tcp/tcp_server_stream.h"

// All that a stranger sends on a data stream. The sessions are known to it, one token is not: the
// stranger opens no stream of that session, and whatever parses says the same again.
namespace {

using namespace rekindle;
using namespace rekindle::transport;
using namespace rekindle::transport::tcp;

constexpr Incarnation kSource{{1, 2, 3}};
constexpr SessionToken kSecret{{4, 5, 6}};
constexpr SessionToken kOfAnEarlierRelease{{7, 8, 9}};

void parse(std::span<const std::byte> bytes) {
  if (bytes.size() >= kClientHelloBytes) {
    if (const auto hello = decode_client_hello(bytes.first<kClientHelloBytes>())) {
      std::array<std::byte, kClientHelloBytes> again;
      encode(*hello, again);
      const bool known = hello->version == kWireVersion || hello->version == kTokenWireVersion;
      FUZZ_CHECK(!known || std::ranges::equal(again, bytes.first<kClientHelloBytes>()));
    }
  }
  if (bytes.size() >= kServerHelloBytes)
    (void)decode_server_hello(bytes.first<kServerHelloBytes>());
}

void serve(std::span<const std::byte> bytes) {
  SegmentRegistry registry;
  registry.admit({.token = kSecret, .puller = "present"});
  registry.admit({.token = kOfAnEarlierRelease, .puller = "earlier", .sends_token = true});
  ServerContext context({}, registry, kSource);
  int ends[2];
  FUZZ_CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0);
  const UniqueFd peer(ends[0]);
  ServerStream stream(UniqueFd(ends[1]), context, {});
  const std::size_t sent = std::min<std::size_t>(bytes.size(), 64 << 10);
  FUZZ_CHECK(::send(peer.get(), bytes.data(), sent, MSG_NOSIGNAL) == static_cast<ssize_t>(sent));
  const TimePoint now = std::chrono::steady_clock::now();
  for (int turn = 0; turn < 2000; ++turn) {
    if (stream.step(now) != ServerStream::Progress::kAgain) break;
  }
  FUZZ_CHECK(!stream.admitted() || stream.token() == kOfAnEarlierRelease);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto bytes = std::as_bytes(std::span(data, size));
  parse(bytes);
  if (!bytes.empty()) serve(bytes);
  return 0;
}
