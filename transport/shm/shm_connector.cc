#include <cassert>
#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "transport/shm/copier.h"
#include "transport/shm/region_client.h"
#include "transport/shm/shm_protocol.h"
#include "transport/shm/shm_transport.h"

namespace rekindle::transport::shm {
namespace {

class ShmPathImpl final : public ShmPath {
 public:
  ShmPathImpl(UniqueFd socket, const UniqueFd& counter, std::shared_ptr<SourceMappings> mappings,
              std::string description)
      : description_(std::move(description)),
        regions_(std::move(socket), counter, std::move(mappings)) {}
  ~ShmPathImpl() override {
    assert(in_flight_ == 0 && "a Path with ops in flight was destroyed: abort() and poll() first");
  }
  Result<void> start() { return copier_.start(); }

  Result<std::size_t> post(std::span<const ReadOp> ops) override {
    if (aborted_) return fail(ErrorCode::kPeerLost, "{}: aborted", description_);
    if (copier_.peer_gone()) {
      return fail(ErrorCode::kPeerLost, "{}: the peer is gone or has dropped the session",
                  description_);
    }
    const std::size_t taken = std::min(ops.size(), Copier::kMaxInFlight - in_flight_);
    copier_.push(ops.first(taken));
    in_flight_ += taken;
    return taken;
  }

  std::size_t poll(std::span<Completion> out) override {
    const std::size_t count = copier_.pop(out);
    in_flight_ -= count;
    return count;
  }

  void abort() override {
    if (std::exchange(aborted_, true)) return;
    copier_.abort();
  }

  std::size_t in_flight() const override { return in_flight_; }
  std::uint64_t bytes_landed() const override { return copier_.bytes_landed(); }
  int wait_fd() const override { return copier_.done_fd(); }
  std::string describe() const override { return description_; }

  Result<std::span<const std::byte>> map(RegionKey key, TimePoint deadline) override {
    const auto found = regions_.find(key, deadline);
    if (found.status != OpStatus::kOk) {
      return fail(to_error_code(found.status), "{}: map region {}.{}: {}", description_, key.region,
                  key.generation, to_string(found.status));
    }
    handed_out_.push_back(found.mapping);
    return found.mapping->bytes();
  }

 private:
  const std::string description_;
  std::size_t in_flight_ = 0;
  bool aborted_ = false;
  std::vector<std::shared_ptr<const Mapping>> handed_out_;
  RegionClient regions_;
  Copier copier_{regions_};
};

constexpr HelloProtocol kProtocol{"shm", kProtocolVersion,
                                  "the peer has as many readers as it allows"};

struct Address {
  sockaddr_un value{};
  socklen_t length = 0;
};

Address abstract_address(std::string_view name) {
  Address address;
  address.value.sun_family = AF_UNIX;
  std::memcpy(address.value.sun_path + 1, name.data(), name.size());
  address.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

Result<UniqueFd> connect_socket(const Endpoint& endpoint) {
  UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket) return fail_errno(errno, "socket");
  const Address address = abstract_address(endpoint.socket_name);
  if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address.value), address.length) !=
      0) {
    if (errno == ECONNREFUSED) {
      return fail(ErrorCode::kUnavailable,
                  "nobody listens: the peer is gone or in another network namespace");
    }
    // EAGAIN: its backlog is full.
    return fail_errno(errno, "connect");
  }
  if (!peer_is_trusted(socket.get())) {
    return fail(ErrorCode::kDenied, "the peer runs as another user: use tcp");
  }
  return socket;
}

Result<ServerHello> exchange_hello(int socket, const PathTarget& target, UniqueFd& counter,
                                   TimePoint deadline) {
  const ClientHello hello{.token = target.token, .incarnation = target.incarnation};
  if (send_message(socket, hello) != Io::kDone) {
    return fail(ErrorCode::kPeerLost, "the peer closed the connection");
  }
  ServerHello answer;
  while (true) {
    switch (receive_message(socket, answer, counter)) {
      case Io::kDone:
        return answer;
      case Io::kClosed:
        return fail(ErrorCode::kPeerLost, "the peer closed the connection before its hello");
      case Io::kAgain:
        break;
    }
    TRY_VOID(wait_ready(socket, POLLIN, deadline, "the peer did not answer the hello"));
  }
}

class ShmConnector final : public Connector {
 public:
  std::string_view transport() const override { return "shm"; }

  Result<std::unique_ptr<Path>> connect(const PathTarget& target, TimePoint deadline) override {
    TRY(const Endpoint endpoint, Endpoint::parse(target.endpoint));
    TRY(const std::string own_boot_id, host_boot_id());
    if (endpoint.boot_id != own_boot_id) {
      return fail(ErrorCode::kUnavailable, "shm: the peer is on another host");
    }
    auto path = connect_here(endpoint, target, deadline);
    if (path) return path;
    return fail(
        std::move(path).error().with_context(fmt::format("connect shm {}", endpoint.socket_name)));
  }

 private:
  Result<std::unique_ptr<Path>> connect_here(const Endpoint& endpoint, const PathTarget& target,
                                             TimePoint deadline) const {
    TRY(UniqueFd socket, connect_socket(endpoint));
    UniqueFd counter;
    TRY(const ServerHello hello, exchange_hello(socket.get(), target, counter, deadline));
    TRY_VOID(check_hello({hello.status, hello.version, hello.incarnation}, kProtocol, target));
    auto path = std::make_unique<ShmPathImpl>(std::move(socket), counter, mappings_,
                                              fmt::format("shm {}", endpoint.socket_name));
    TRY_VOID(path->start());
    return path;
  }

  const std::shared_ptr<SourceMappings> mappings_ = std::make_shared<SourceMappings>();
};

}  // namespace

std::unique_ptr<Connector> make_connector() { return std::make_unique<ShmConnector>(); }

}  // namespace rekindle::transport::shm
