#include "transport/tcp/tcp_socket.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <condition_variable>
#include <cstring>
#include <fstream>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include "transport/tcp/tcp_transport.h"

namespace rekindle::transport::tcp {
namespace {

constexpr int kUserTimeoutMs = 30'000;
constexpr int kKeepaliveIdleSeconds = 10;
constexpr int kKeepaliveIntervalSeconds = 5;
constexpr int kKeepaliveProbes = 3;
constexpr std::size_t kAlgorithmName = 16;  // the kernel's TCP_CA_NAME_MAX

void set_option(int fd, int level, int name, int value) {
  // Backstops and tuning: a kernel without one of them still works.
  (void)::setsockopt(fd, level, name, &value, sizeof value);
}

struct Lookup {
  int rc = 0;
  std::vector<SocketAddress> addresses;
};

Lookup look_up(const std::string& host, std::uint16_t port, int flags) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* list = nullptr;
  Lookup result;
  result.rc = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &list);
  for (const addrinfo* item = list; item != nullptr; item = item->ai_next) {
    SocketAddress address;
    if (item->ai_addrlen > sizeof address.storage) continue;
    std::memcpy(&address.storage, item->ai_addr, item->ai_addrlen);
    address.length = item->ai_addrlen;
    result.addresses.push_back(address);
  }
  if (list != nullptr) ::freeaddrinfo(list);
  return result;
}

struct PendingLookup {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  Lookup result;
};

}  // namespace

std::uint16_t SocketAddress::port() const {
  if (storage.ss_family == AF_INET) {
    return ntohs(reinterpret_cast<const sockaddr_in*>(&storage)->sin_port);
  }
  return ntohs(reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_port);
}

std::string SocketAddress::host() const {
  char text[INET6_ADDRSTRLEN] = "?";
  if (storage.ss_family == AF_INET) {
    const auto* v4 = reinterpret_cast<const sockaddr_in*>(&storage);
    ::inet_ntop(AF_INET, &v4->sin_addr, text, sizeof text);
  } else if (storage.ss_family == AF_INET6) {
    const auto* v6 = reinterpret_cast<const sockaddr_in6*>(&storage);
    if (IN6_IS_ADDR_V4MAPPED(&v6->sin6_addr)) {
      ::inet_ntop(AF_INET, &v6->sin6_addr.s6_addr[12], text, sizeof text);
    } else {
      ::inet_ntop(AF_INET6, &v6->sin6_addr, text, sizeof text);
    }
  }
  return text;
}

std::string SocketAddress::to_string() const { return format_endpoint(host(), port()); }

std::string format_endpoint(std::string_view host, std::uint16_t port) {
  const bool bare_v6 = host.find(':') != std::string_view::npos && !host.starts_with('[');
  return bare_v6 ? fmt::format("[{}]:{}", host, port) : fmt::format("{}:{}", host, port);
}

Result<HostPort> parse_endpoint(std::string_view endpoint) {
  const auto colon = endpoint.rfind(':');
  if (colon == std::string_view::npos || colon == 0 || endpoint.size() > 300) {
    return fail(ErrorCode::kInvalid, "data endpoint '{}' is not HOST:PORT", endpoint.substr(0, 80));
  }
  std::string_view host = endpoint.substr(0, colon);
  const std::string_view digits = endpoint.substr(colon + 1);
  std::uint16_t port = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), port);
  if (error != std::errc{} || end != digits.data() + digits.size() || port == 0) {
    return fail(ErrorCode::kInvalid, "data endpoint '{}' has no valid port", endpoint);
  }
  if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
  if (host.empty()) return fail(ErrorCode::kInvalid, "data endpoint '{}' names no host", endpoint);
  return HostPort{std::string(host), port};
}

Result<std::vector<SocketAddress>> resolve(const HostPort& target, TimePoint deadline) {
  Lookup numeric = look_up(target.host, target.port, AI_NUMERICHOST);
  if (numeric.rc == 0 && !numeric.addresses.empty()) return std::move(numeric.addresses);

  auto pending = std::make_shared<PendingLookup>();
  std::thread([pending, target] {
    Lookup result = look_up(target.host, target.port, 0);
    const std::lock_guard lock(pending->mutex);
    pending->result = std::move(result);
    pending->done = true;
    pending->changed.notify_all();
  }).detach();
  std::unique_lock lock(pending->mutex);
  if (!pending->changed.wait_until(lock, deadline, [&] { return pending->done; })) {
    return fail(ErrorCode::kTimeout, "look up {}: no answer from the name service in time",
                target.host);
  }
  if (pending->result.rc != 0 || pending->result.addresses.empty()) {
    return fail(ErrorCode::kNotFound, "look up {}: {}", target.host,
                ::gai_strerror(pending->result.rc));
  }
  return std::move(pending->result.addresses);
}

SocketAddress local_address(int fd) {
  SocketAddress address;
  address.length = sizeof address.storage;
  if (::getsockname(fd, address.get(), &address.length) != 0) return {};
  return address;
}

SocketAddress peer_address(int fd) {
  SocketAddress address;
  address.length = sizeof address.storage;
  if (::getpeername(fd, address.get(), &address.length) != 0) return {};
  return address;
}

std::string congestion_control(int fd) {
  std::array<char, kAlgorithmName> name{};
  socklen_t length = name.size();
  if (::getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name.data(), &length) != 0) return {};
  return {name.data(), ::strnlen(name.data(), length)};
}

Result<void> set_congestion_control(int fd, const std::string& name) {
  if (name.empty()) return {};
  if (name.size() < kAlgorithmName && ::setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name.data(),
                                                   static_cast<socklen_t>(name.size())) == 0) {
    return {};
  }
  std::string allowed;
  std::ifstream file("/proc/sys/net/ipv4/tcp_allowed_congestion_control");
  std::getline(file, allowed);
  return fail(
      ErrorCode::kInvalid,
      "TCP congestion control '{}' cannot be used here; these can: {}. Others want "
      "`modprobe tcp_NAME`, and net.ipv4.tcp_allowed_congestion_control for users other than root",
      name.substr(0, kAlgorithmName), allowed);
}

Result<void> check_congestion_control(const std::string& name) {
  const UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!socket) return fail_errno(errno, "socket");
  return set_congestion_control(socket.get(), name);
}

std::string host_congestion_control() {
  const UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  return socket ? congestion_control(socket.get()) : std::string();
}

bool is_paced(std::string_view congestion_control) { return congestion_control.starts_with("bbr"); }

void tune_stream(int fd) {
  set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  set_option(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, kUserTimeoutMs);
  set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, kKeepaliveIdleSeconds);
  set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, kKeepaliveIntervalSeconds);
  set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, kKeepaliveProbes);
}

void reset_and_close(UniqueFd& fd) {
  if (!fd) return;
  const linger reset{.l_onoff = 1, .l_linger = 0};
  (void)::setsockopt(fd.get(), SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
  fd.reset();
}

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

Result<UniqueFd> listen_on(const SocketAddress& address, const std::string& congestion) {
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
  TRY_VOID(set_congestion_control(socket.get(), congestion));
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

Result<UniqueFd> listen_anywhere(std::uint16_t port, const std::string& congestion) {
  const UniqueFd probe(::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (probe) {
    auto socket = listen_on(any_address(AF_INET6, port), congestion);
    if (socket || socket.error().code() == ErrorCode::kUnavailable) return socket;
  }
  return listen_on(any_address(AF_INET, port), congestion);
}

}  // namespace

Listener::Listener(UniqueFd socket, std::uint16_t port)
    : socket_(std::move(socket)), port_(port), spare_(open_spare()) {}

Result<Listener> Listener::bind(const std::string& host, std::uint16_t port,
                                const std::string& congestion) {
  if (host.empty()) {
    TRY(UniqueFd socket, listen_anywhere(port, congestion));
    const std::uint16_t chosen = local_address(socket.get()).port();
    return Listener(std::move(socket), chosen);
  }
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(2);
  TRY(const auto addresses, resolve(HostPort{host, port}, deadline));
  TRY(UniqueFd socket, listen_on(addresses.front(), congestion));
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
