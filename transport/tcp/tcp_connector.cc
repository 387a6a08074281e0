#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>

#include <poll.h>
#include <sys/socket.h>

#include "transport/session_hello.h"
#include "transport/tcp/tcp_path.h"
#include "transport/tcp/tcp_socket.h"
#include "transport/tcp/tcp_transport.h"
#include "transport/tcp/tcp_wire.h"

namespace rekindle::transport::tcp {
namespace {

constexpr HelloProtocol kProtocol{"data", kWireVersion,
                                  "the session has as many streams as the peer allows"};

Result<UniqueFd> connect_socket(const SocketAddress& address, TimePoint deadline) {
  UniqueFd socket(
      ::socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket) return fail_errno(errno, "socket");
  tune_stream(socket.get());
  if (::connect(socket.get(), address.get(), address.length) != 0) {
    if (errno != EINPROGRESS) return fail_errno(errno, "connect");
    TRY_VOID(wait_ready(socket.get(), POLLOUT, deadline, "the peer did not accept"));
    int error = 0;
    socklen_t length = sizeof error;
    if (::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &length) != 0) error = errno;
    if (error != 0) return fail_errno(error, "connect");
  }
  return socket;
}

Result<ServerHello> exchange_hello(int fd, const PathTarget& target, TimePoint deadline) {
  std::array<std::byte, kClientHelloBytes> frame;
  encode(ClientHello{target.token, target.incarnation}, frame);
  if (::send(fd, frame.data(), frame.size(), MSG_DONTWAIT | MSG_NOSIGNAL) !=
      static_cast<ssize_t>(frame.size())) {
    return fail_errno(errno, "send the hello");
  }
  std::array<std::byte, kServerHelloBytes> answer;
  std::size_t used = 0;
  while (used < answer.size()) {
    TRY_VOID(wait_ready(fd, POLLIN, deadline, "the peer did not answer the hello"));
    const ssize_t n = ::recv(fd, answer.data() + used, answer.size() - used, MSG_DONTWAIT);
    if (n > 0) {
      used += static_cast<std::size_t>(n);
    } else if (n == 0) {
      return fail(ErrorCode::kPeerLost, "the peer closed the stream before its hello");
    } else if (errno != EAGAIN && errno != EINTR) {
      return fail_errno(errno, "receive the hello");
    }
  }
  return decode_server_hello(answer);
}

Result<std::unique_ptr<Path>> connect_one(const SocketAddress& address, const PathTarget& target,
                                          TimePoint deadline) {
  TRY(UniqueFd socket, connect_socket(address, deadline));
  TRY(const ServerHello hello, exchange_hello(socket.get(), target, deadline));
  TRY_VOID(check_hello({hello.status, hello.version, hello.incarnation}, kProtocol, target));
  return std::make_unique<TcpPath>(std::move(socket));
}

class TcpConnector final : public Connector {
 public:
  std::string_view transport() const override { return "tcp"; }

  Result<std::unique_ptr<Path>> connect(const PathTarget& target, TimePoint deadline) override {
    TRY(const HostPort endpoint, parse_endpoint(target.endpoint));
    TRY(const auto addresses, resolve(endpoint, deadline));
    std::optional<Error> last;
    for (std::size_t i = 0; i < addresses.size(); ++i) {
      // Each address gets its part of the time, so that a silent one does not use it all up.
      const TimePoint now = std::chrono::steady_clock::now();
      const auto parts = static_cast<std::int64_t>(addresses.size() - i);
      auto path = connect_one(addresses[i], target, now + (deadline - now) / parts);
      if (path) return path;
      last =
          std::move(path).error().with_context(fmt::format("connect {}", addresses[i].to_string()));
      // The peer itself has answered: its other addresses would answer the same.
      if (last->code() == ErrorCode::kDenied || last->code() == ErrorCode::kStale) break;
    }
    return fail(std::move(*last));
  }
};

}  // namespace

std::unique_ptr<Connector> make_connector() { return std::make_unique<TcpConnector>(); }

}  // namespace rekindle::transport::tcp
