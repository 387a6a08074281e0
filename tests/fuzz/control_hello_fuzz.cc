#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include <sys/socket.h>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/io_context.hpp>

#include "proto/frame.pb.h"
#include "recovery/rpc/credentials.h"
#include "recovery/rpc/rpc_server_connection.h"
#include "src/base/log.h"
#include "src/base/unique_fd.h"
#include "tests/fuzz/fuzz_check.h"

// All that a stranger sends on a control connection: plain or TLS, the hello, and what follows. The
// first byte chooses the server. One that demands a secret accepts nobody and runs no call; one
// that trusts the network may.
namespace {

using namespace rekindle;
namespace asio = boost::asio;

constexpr const char* kSecret = "a secret that no input has";

std::shared_ptr<rpc::Credentials> credentials_of(std::uint8_t kind) {
  static const auto secret = rpc::Credentials::of_secret(kSecret);
  return kind % 2 == 0 ? secret : nullptr;
}

int serve(std::uint8_t kind, std::string_view bytes, bool& greeted) {
  int calls = 0;
  asio::io_context io(1);
  auto shared = std::make_shared<rpc::ServerShared>(
      io.get_executor(), rpc::make_identity(proto::ROLE_AGENT, "fuzz", credentials_of(kind)),
      rpc::ServerLimits{});
  shared->methods[static_cast<std::uint32_t>(proto::AGENT_STATUS)].at_once =
      [&](const rpc::Peer&, const std::string&) {
        ++calls;
        return Result<std::string>("answer");
      };
  shared->on_peer_closed = [&](const rpc::Peer&) { greeted = true; };
  int ends[2];
  FUZZ_CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0);
  const UniqueFd peer(ends[0]);
  rpc::Socket socket(io);
  socket.assign(rpc::Socket::protocol_type(AF_UNIX, 0), ends[1]);
  const ssize_t sent = ::send(peer.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
  FUZZ_CHECK(sent == static_cast<ssize_t>(bytes.size()));
  ::shutdown(peer.get(), SHUT_WR);
  bool ended = false;
  {
    auto connection =
        std::make_shared<rpc::ServerConnection>(shared, std::move(socket), "192.0.2.1:1", "");
    auto serving = rpc::ServerConnection::serve(connection, [] {});
    asio::co_spawn(io, std::move(serving), [&](const std::exception_ptr&) { ended = true; });
  }
  // Far below the deadline of a handshake: the end of the input ends the connection.
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(5);
  std::array<char, 4096> sink;
  while (!ended) {
    FUZZ_CHECK(std::chrono::steady_clock::now() < give_up);
    io.run_one_for(std::chrono::milliseconds(20));
    while (::recv(peer.get(), sink.data(), sink.size(), MSG_DONTWAIT) > 0) {
    }
  }
  return calls;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  bool greeted = false;
  const std::size_t used = std::min<std::size_t>(size - 1, 64u << 10);
  const int calls = serve(data[0], {reinterpret_cast<const char*>(data) + 1, used}, greeted);
  FUZZ_CHECK(greeted || calls == 0);
  FUZZ_CHECK(!greeted || credentials_of(data[0]) == nullptr);
  return 0;
}
