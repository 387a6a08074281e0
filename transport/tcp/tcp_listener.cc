#include "transport/tcp/tcp_listener.h"

#include <cerrno>
#include <cstring>
#include <utility>

#include <fcntl.h>
#include <netdb.h>
#include <sys/socket.h>

namespace rekindle::transport::tcp {
namespace {

constexpr int kBacklog = 1024;
constexpr int kAcceptsPerTurn = 64;

UniqueFd open_spare() { return UniqueFd(::open("/dev/null", O_RDONLY | O_CLOEXEC)); }

SocketAddress any_address(int family, std::uint16_t port) {
  SocketAddress address;
  if (family == AF_INET6) {
    auto* v6 = reinterpret_cast<sockaddr_in6*>(&address.storage);
    v6->sin6_family = AF_INET6;
    v6->sin6_addr = in6addr_any;
    v6->sin6_port = htons(port);
    address.length = sizeof *v6;
  } else {
    auto* v4 = reinterpret_cast<sockaddr_in*>(&address.storage);
    v4->sin_family = AF_INET;
    v4->sin_port = htons(port);
    address.length = sizeof *v4;
  }
  return address;
}

Result<UniqueFd> listen_on(const SocketAddress& address) {
  const std::string what = fmt::format("listen on {}", address.to_string());
  UniqueFd socket(
      ::socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket) return fail_errno(errno, what);
  const int on = 1;
  const int off = 0;
  (void)::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (address.storage.ss_family == AF_INET6) {
    (void)::setsockopt(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
  }
  if (::bind(socket.get(), address.get(), address.length) != 0 ||
      ::listen(socket.get(), kBacklog) != 0) {
    if (errno == EADDRINUSE) {
      return fail(ErrorCode::kUnavailable,
                  "{}: the port is in use: choose another one, or 0 for any free one", what);
    }
    return fail_errno(errno, what);
  }
  return socket;
}

Result<UniqueFd> listen_anywhere(std::uint16_t port) {
  const UniqueFd probe(::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (probe) {
    auto socket = listen_on(any_address(AF_INET6, port));
    if (socket || socket.error().code() == ErrorCode::kUnavailable) return socket;
  }
  return listen_on(any_address(AF_INET, port));
}

}  // namespace

Listener::Listener(UniqueFd socket, std::uint16_t port)
    : socket_(std::move(socket)), port_(port), spare_(open_spare()) {}

Result<Listener> Listener::bind(const std::string& host, std::uint16_t port) {
  if (host.empty()) {
    TRY(UniqueFd socket, listen_anywhere(port));
    const std::uint16_t chosen = local_address(socket.get()).port();
    return Listener(std::move(socket), chosen);
  }
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(2);
  TRY(const auto addresses, resolve(HostPort{host, port}, deadline));
  TRY(UniqueFd socket, listen_on(addresses.front()));
  const std::uint16_t chosen = local_address(socket.get()).port();
  return Listener(std::move(socket), chosen);
}

bool Listener::shed_one() {
  if (!spare_) spare_ = open_spare();
  if (!spare_) return false;
  spare_.reset();
  UniqueFd waiting(::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC));
  const bool closed = static_cast<bool>(waiting);
  reset_and_close(waiting);
  spare_ = open_spare();
  return closed;
}

Listener::Outcome Listener::accept_some(const std::function<void(UniqueFd)>& take,
                                        std::uint64_t& shed) {
  for (int i = 0; i < kAcceptsPerTurn; ++i) {
    UniqueFd accepted(::accept4(socket_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (accepted) {
      tune_stream(accepted.get());
      take(std::move(accepted));
      continue;
    }
    switch (errno) {
      case EAGAIN:
        return Outcome::kDrained;
      case EMFILE:
      case ENFILE:
        if (!shed_one()) return Outcome::kExhausted;
        ++shed;
        break;
      case ENOBUFS:
      case ENOMEM:
        return Outcome::kExhausted;
      default:
        break;  // an error of this one connection, such as ECONNABORTED
    }
  }
  return Outcome::kMore;
}

}  // namespace rekindle::transport::tcp
