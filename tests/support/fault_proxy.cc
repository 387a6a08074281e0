#include "tests/support/fault_proxy.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <stdexcept>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

namespace rekindle::testing {

namespace {

constexpr int kPollMs = 20;
constexpr std::size_t kBufferBytes = 256 << 10;

sockaddr_in loopback(std::uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

void reset_on_close(int fd) {
  const linger hard{1, 0};
  setsockopt(fd, SOL_SOCKET, SO_LINGER, &hard, sizeof hard);
}

}  // namespace

struct FaultProxy::Link {
  UniqueFd client;
  UniqueFd server;
  std::atomic<bool> cut = false;
  std::thread thread;
};

FaultProxy::FaultProxy(std::uint16_t server_port)
    : listener_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)), server_port_(server_port) {
  auto address = loopback(0);
  socklen_t length = sizeof address;
  if (bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      listen(listener_.get(), 64) != 0 ||
      getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&address), &length) != 0) {
    throw std::runtime_error("fault proxy: cannot listen");
  }
  port_ = ntohs(address.sin_port);
  accepter_ = std::thread([this] { accept_loop(); });
}

FaultProxy::~FaultProxy() {
  stopping_ = true;
  accepter_.join();
  for (auto& link : links_) link->thread.join();
}

std::string FaultProxy::address() const { return "127.0.0.1:" + std::to_string(port_); }

void FaultProxy::flip_bits(int count, std::uint64_t every_bytes) {
  flip_every_ = every_bytes;
  next_flip_ = bytes_passed_ + every_bytes;
  flips_left_ = count;
}

void FaultProxy::cut() {
  const std::lock_guard lock(mutex_);
  for (auto& link : links_) link->cut = true;
}

void FaultProxy::accept_loop() {
  while (!stopping_) {
    pollfd waiting{listener_.get(), POLLIN, 0};
    if (poll(&waiting, 1, kPollMs) <= 0) continue;
    auto link = std::make_unique<Link>();
    link->client.reset(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    link->server.reset(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const auto address = loopback(server_port_);
    if (!link->client || !link->server ||
        connect(link->server.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) !=
            0) {
      continue;
    }
    Link& started = *link;
    started.thread = std::thread([this, &started] { run_link(started); });
    const std::lock_guard lock(mutex_);
    links_.push_back(std::move(link));
  }
}

void FaultProxy::run_link(Link& link) {
  bool open = true;
  while (open && !stopping_ && !link.cut) {
    pollfd waiting[2] = {{link.client.get(), POLLIN, 0}, {link.server.get(), POLLIN, 0}};
    const bool to_server = !requests_stalled_;
    const bool to_client = !stalled_;
    if (!to_server) waiting[0].events = 0;
    if (!to_client) waiting[1].events = 0;
    if (poll(waiting, 2, kPollMs) <= 0) continue;
    if (to_server && waiting[0].revents != 0) {
      open = forward(link.client.get(), link.server.get(), false);
    }
    if (open && to_client && waiting[1].revents != 0) {
      open = forward(link.server.get(), link.client.get(), true);
    }
    // An end that hung up stays readable: no turn of the loop without a pause.
    const int ended = POLLERR | POLLHUP;
    if ((!to_server && (waiting[0].revents & ended) != 0) ||
        (!to_client && (waiting[1].revents & ended) != 0)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(kPollMs));
    }
  }
  if (link.cut) {
    reset_on_close(link.client.get());
    reset_on_close(link.server.get());
  }
  link.client.reset();
  link.server.reset();
}

bool FaultProxy::forward(int from, int to, bool to_client) {
  thread_local std::vector<char> buffer(kBufferBytes);
  const std::uint64_t limit = to_client ? bytes_per_second_.load() : 0;
  const std::size_t want =
      limit == 0 ? buffer.size()
                 : std::min<std::size_t>(buffer.size(), std::max<std::uint64_t>(1, limit / 50));
  const ssize_t got = recv(from, buffer.data(), want, 0);
  if (got <= 0) return false;
  auto size = static_cast<std::size_t>(got);
  if (to_client) corrupt(buffer, size);
  std::size_t sent = 0;
  while (sent < size && !stopping_) {
    pollfd ready{to, POLLOUT, 0};
    if (poll(&ready, 1, kPollMs) <= 0) continue;
    const ssize_t put = send(to, buffer.data() + sent, size - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (put < 0 && errno == EAGAIN) continue;
    if (put <= 0) return false;
    sent += static_cast<std::size_t>(put);
  }
  if (limit != 0) {
    std::this_thread::sleep_for(
        std::chrono::duration<double>(static_cast<double>(size) / static_cast<double>(limit)));
  }
  return true;
}

void FaultProxy::corrupt(std::vector<char>& buffer, std::size_t size) {
  const std::uint64_t before = bytes_passed_.fetch_add(size);
  if (flips_left_ <= 0) return;
  const std::uint64_t at = next_flip_;
  if (at < before || at >= before + size) {
    if (at < before) next_flip_ = before + size + 1;
    return;
  }
  buffer[at - before] = static_cast<char>(buffer[at - before] ^ 0x10);
  ++flipped_;
  --flips_left_;
  next_flip_ = at + flip_every_;
}

}  // namespace rekindle::testing
