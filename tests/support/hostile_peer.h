#pragma once

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>

#include "recovery/rpc/address.h"
#include "recovery/rpc/convert.h"
#include "recovery/rpc/frame_codec.h"
#include "recovery/rpc/handshake.h"
#include "recovery/rpc/rpc.h"
#include "src/base/unique_fd.h"

// Attackers: processes that know the protocol and keep to it only as far as they like. A test that
// attacks begins with an honest hello, and then sends what it wants.
namespace rekindle::rpc::testing {

// An attacker waits at most this long for anything.
inline constexpr std::chrono::seconds kHostilePatience{30};

inline Identity hostile_identity(proto::Role role, std::string node_id) {
  Identity identity;
  identity.role = role;
  identity.node_id = std::move(node_id);
  identity.incarnation = Incarnation::random();
  return identity;
}

// A server on a thread of its own: the victim of an attack, or an agent whose handlers lie.
class ServerThread {
 public:
  template <typename Setup>
  ServerThread(Identity identity, ServerLimits limits, Setup setup) {
    server_ = RpcServer::create(io_.get_executor(), std::move(identity), limits);
    setup(*server_);
    address_ = server_->listen("127.0.0.1:0").value();
    thread_ = std::thread([this] { io_.run(); });
  }
  ~ServerThread() {
    boost::asio::co_spawn(io_, server_->close(std::chrono::seconds(5)),
                          [this](std::exception_ptr) { work_.reset(); });
    thread_.join();
  }
  const std::string& address() const { return address_; }
  std::size_t connections() {
    std::promise<std::size_t> count;
    boost::asio::post(io_, [&] { count.set_value(server_->connection_count()); });
    return count.get_future().get();
  }

 private:
  boost::asio::io_context io_;
  boost::asio::executor_work_guard<boost::asio::io_context::executor_type> work_{
      io_.get_executor()};
  std::unique_ptr<RpcServer> server_;
  std::string address_;
  std::thread thread_;
};

// A peer that sends whatever bytes it likes. Reads give up after kHostilePatience.
class HostilePeer {
 public:
  // `from`: the local address, such as "127.0.0.2"; "" for any.
  explicit HostilePeer(const std::string& address, const std::string& from = "") {
    const auto parsed = HostPort::parse(address).value();
    sockaddr_in name{};
    name.sin_family = AF_INET;
    name.sin_port = htons(parsed.port);
    ::inet_pton(AF_INET, parsed.host.c_str(), &name.sin_addr);
    fd_.reset(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const timeval patience{kHostilePatience.count(), 0};
    (void)::setsockopt(fd_.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    if (!from.empty()) {
      sockaddr_in local{};
      local.sin_family = AF_INET;
      ::inet_pton(AF_INET, from.c_str(), &local.sin_addr);
      (void)::bind(fd_.get(), reinterpret_cast<const sockaddr*>(&local), sizeof local);
    }
    connected_ = ::connect(fd_.get(), reinterpret_cast<const sockaddr*>(&name), sizeof name) == 0;
  }
  bool connected() const { return connected_; }
  int fd() const { return fd_.get(); }

  bool send(std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t sent = ::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent <= 0) return false;
      bytes.remove_prefix(static_cast<std::size_t>(sent));
    }
    return true;
  }
  bool send(const proto::Frame& frame) { return send(encode_frame(frame).value()); }
  // nullopt: the peer closed.
  std::optional<proto::Frame> read() {
    for (;;) {
      auto body = decoder_.next();
      if (!body) return std::nullopt;
      if (*body) return decode_frame(**body).value();
      char chunk[4096];
      const ssize_t got = ::recv(fd_.get(), chunk, sizeof chunk, 0);
      if (got <= 0) {
        timed_out_ = got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
        return std::nullopt;
      }
      decoder_.feed({chunk, static_cast<std::size_t>(got)});
    }
  }
  // Reads until the peer closes; false when it did not by the deadline.
  bool closed_by_peer() {
    while (read()) {
    }
    return !timed_out_;
  }
  // The honest hello of `identity`. False: it was refused; refusal() has the words.
  bool greet(const Identity& identity = hostile_identity(proto::ROLE_PULLER, "raw")) {
    proto::Frame frame;
    *frame.mutable_hello() = make_hello(identity, "", {});
    if (!send(frame)) return false;
    const auto answer = read();
    if (answer && answer->has_proof()) refusal_ = answer->proof().refusal().message();
    return answer && answer->has_hello();
  }
  const std::string& refusal() const { return refusal_; }
  // The next response or refusal, as a status and a body.
  Result<std::string> answer() {
    const auto frame = read();
    if (!frame) return fail(ErrorCode::kPeerLost, "the server has closed the connection");
    if (frame->has_proof()) TRY_VOID(from_status(frame->proof().refusal()));
    TRY_VOID(from_status(frame->response().status()));
    return frame->response().body();
  }

 private:
  UniqueFd fd_;
  bool connected_ = false;
  bool timed_out_ = false;
  std::string refusal_;
  FrameDecoder decoder_{kMaxFrameBytes};
};

inline proto::Frame request(std::uint64_t id, proto::Method method, std::uint32_t deadline_ms,
                            std::string body = "") {
  proto::Frame frame;
  frame.mutable_request()->set_call_id(id);
  frame.mutable_request()->set_method(static_cast<std::uint32_t>(method));
  frame.mutable_request()->set_deadline_ms(deadline_ms);
  frame.mutable_request()->set_body(std::move(body));
  return frame;
}

// Both ends of a thousand connections live in this process.
inline void allow_many_descriptors() {
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

}  // namespace rekindle::rpc::testing
