#include <algorithm>
#include <cerrno>
#include <unordered_map>
#include <utility>

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/as_tuple.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/this_coro.hpp>
#include <boost/asio/use_awaitable.hpp>

#include "recovery/rpc/address.h"
#include "recovery/rpc/convert.h"
#include "recovery/rpc/credentials.h"
#include "recovery/rpc/handshake.h"
#include "recovery/rpc/rpc.h"
#include "recovery/rpc/rpc_connection.h"
#include "recovery/rpc/tls.h"
#include "src/base/log.h"
#include "src/base/unique_fd.h"

namespace rekindle::rpc {

namespace asio = boost::asio;
using std::chrono::steady_clock;

namespace {

constexpr auto kConnectTuple = asio::as_tuple(asio::use_awaitable);
constexpr std::size_t kMaxOpenCalls = 1024;

// One call that waits for its response.
struct OpenCall {
  explicit OpenCall(const asio::any_io_executor& executor, TimePoint deadline)
      : timer(executor, deadline) {}
  // Cancelled when `result` is there.
  asio::steady_timer timer;
  std::optional<Result<std::string>> result;
  std::function<void(std::string)> on_event;
};

// The reader and the open calls share it. It outlives the RpcClient until they have ended.
class ClientCore : public std::enable_shared_from_this<ClientCore> {
 public:
  ClientCore(std::shared_ptr<Connection> connection, Peer peer, std::string name)
      : connection_(std::move(connection)), peer_(std::move(peer)), name_(std::move(name)) {}

  void start() {
    asio::co_spawn(connection_->executor(), read_loop(shared_from_this()), asio::detached);
  }
  async::Task<Result<std::string>> call(proto::Method method, std::string body,
                                        std::chrono::milliseconds timeout,
                                        std::function<void(std::string)> on_event,
                                        trace::Context parent);
  void close(Error reason);
  const Peer& peer() const { return peer_; }
  bool connected() const { return connection_->is_open(); }

 private:
  static async::Task<void> read_loop(std::shared_ptr<ClientCore> self);
  void on_frame(proto::Frame frame);
  void finish(std::uint64_t call_id, Result<std::string> result);
  void send_cancel(std::uint64_t call_id);
  Error lost() const;

  std::shared_ptr<Connection> connection_;
  Peer peer_;
  // For messages: "agent a at 10.0.0.3:7400".
  std::string name_;
  std::uint64_t next_call_id_ = 1;
  std::unordered_map<std::uint64_t, std::shared_ptr<OpenCall>> calls_;
};

Error ClientCore::lost() const {
  return connection_->close_reason().with_context(fmt::format("connection to {} is lost", name_));
}

async::Task<void> ClientCore::read_loop(std::shared_ptr<ClientCore> self) {
  for (;;) {
    auto frame = co_await self->connection_->read();
    if (!frame) {
      self->close(frame.error());
      co_return;
    }
    self->on_frame(std::move(*frame));
  }
}

void ClientCore::on_frame(proto::Frame frame) {
  switch (frame.kind_case()) {
    case proto::Frame::kResponse: {
      auto& response = *frame.mutable_response();
      if (auto status = from_status(response.status()); !status) {
        finish(response.call_id(), fail(std::move(status).error()));
      } else {
        finish(response.call_id(), std::move(*response.mutable_body()));
      }
      return;
    }
    case proto::Frame::kEvent: {
      const auto found = calls_.find(frame.event().call_id());
      if (found == calls_.end() || !found->second->on_event) return;
      // A copy, because the callback may end the call.
      const auto call = found->second;
      call->on_event(std::move(*frame.mutable_event()->mutable_body()));
      return;
    }
    // The server says why it is about to close.
    case proto::Frame::kProof:
      if (auto status = from_status(frame.proof().refusal()); !status) {
        connection_->close(std::move(status).error());
        return;
      }
      [[fallthrough]];
    default:
      connection_->close({ErrorCode::kInvalid, "the peer sent a frame that only callers send"});
  }
}

void ClientCore::finish(std::uint64_t call_id, Result<std::string> result) {
  const auto found = calls_.find(call_id);
  // The call timed out before the response came.
  if (found == calls_.end()) return;
  found->second->result = std::move(result);
  found->second->timer.cancel();
  calls_.erase(found);
}

void ClientCore::close(Error reason) {
  connection_->close(std::move(reason));
  const auto calls = std::exchange(calls_, {});
  for (const auto& [id, call] : calls) {
    call->result = fail(Error(ErrorCode::kPeerLost, lost().message()));
    call->timer.cancel();
  }
}

void ClientCore::send_cancel(std::uint64_t call_id) {
  proto::Frame frame;
  frame.mutable_cancel()->set_call_id(call_id);
  (void)connection_->send(frame);
}

async::Task<Result<std::string>> ClientCore::call(proto::Method method, std::string body,
                                                  std::chrono::milliseconds timeout,
                                                  std::function<void(std::string)> on_event,
                                                  trace::Context parent) {
  const auto self = shared_from_this();
  const std::string what = fmt::format("{} to {}", proto::Method_Name(method), name_);
  timeout = std::clamp<std::chrono::milliseconds>(timeout, std::chrono::milliseconds(1),
                                                  std::chrono::hours(24 * 30));
  const TimePoint deadline = steady_clock::now() + timeout;
  if (calls_.size() >= kMaxOpenCalls) {
    co_return fail(ErrorCode::kExhausted, "{}: {} calls are open already", what, kMaxOpenCalls);
  }
  // The server would close the connection.
  CO_TRY_VOID(check_body_size(static_cast<std::uint32_t>(method), body.size()));
  const bool has_room = co_await connection_->wait_for_room(deadline);
  if (!connected()) co_return fail(ErrorCode::kPeerLost, "{}: {}", what, lost().message());
  if (!has_room) {
    co_return fail(ErrorCode::kTimeout, "{}: the peer does not read its requests", what);
  }
  const std::uint64_t call_id = next_call_id_++;
  proto::Frame frame;
  frame.mutable_request()->set_call_id(call_id);
  frame.mutable_request()->set_method(static_cast<std::uint32_t>(method));
  frame.mutable_request()->set_body(std::move(body));
  frame.mutable_request()->set_deadline_ms(static_cast<std::uint32_t>(timeout.count()));
  if (parent.valid()) frame.mutable_request()->set_trace(parent.to_bytes());
  if (auto sent = connection_->send(frame); !sent) {
    co_return fail(std::move(sent).error().with_context(what));
  }
  const auto call = std::make_shared<OpenCall>(connection_->executor(), deadline);
  call->on_event = std::move(on_event);
  calls_.emplace(call_id, call);
  // Also when this coroutine is cancelled or destroyed while it waits.
  struct Leave {
    std::shared_ptr<ClientCore> core;
    std::uint64_t call_id;
    ~Leave() { core->calls_.erase(call_id); }
  } leave{self, call_id};
  while (!call->result) {
    const auto [error] = co_await call->timer.async_wait(kConnectTuple);
    if (call->result) break;
    send_cancel(call_id);
    if (error) co_return fail(ErrorCode::kUnavailable, "{}: cancelled", what);
    co_return fail(ErrorCode::kTimeout, "{}: no answer within {} ms", what, timeout.count());
  }
  if (!*call->result) co_return fail(std::move(*call->result).error());
  co_return std::move(**call->result);
}

class Client final : public RpcClient {
 public:
  explicit Client(std::shared_ptr<ClientCore> core) : core_(std::move(core)) {}
  ~Client() override { close(); }

  const Peer& peer() const override { return core_->peer(); }
  bool connected() const override { return core_->connected(); }
  async::Task<Result<std::string>> call_raw(proto::Method method, std::string body,
                                            std::chrono::milliseconds deadline,
                                            std::function<void(std::string)> on_event,
                                            trace::Context parent) override {
    return core_->call(method, std::move(body), deadline, std::move(on_event), parent);
  }
  void close() override { core_->close({ErrorCode::kPeerLost, "closed by this side"}); }

 private:
  std::shared_ptr<ClientCore> core_;
};

// Runs `step` of the handshake: a frame of the wanted kind, or the peer's refusal as an error.
async::Task<Result<proto::Frame>> read_handshake(std::shared_ptr<Connection> connection,
                                                 proto::Frame::KindCase wanted) {
  CO_TRY(proto::Frame frame, co_await connection->read());
  if (frame.kind_case() == proto::Frame::kProof && frame.proof().has_refusal() &&
      frame.proof().refusal().code() != proto::STATUS_OK) {
    CO_TRY_VOID(from_status(frame.proof().refusal()));
  }
  if (frame.kind_case() != wanted) {
    co_return fail(ErrorCode::kInvalid, "the peer sent another frame than its hello or proof");
  }
  co_return frame;
}

// What a caller says on a new connection.
struct Greeting {
  Identity identity;
  bool is_unix = false;
  // Empty unless the connection is of protocol 2.
  crypto::Secret secret;
  std::optional<Incarnation> expected;
  proto::Role wanted = proto::ROLE_UNKNOWN;
};

// A proof that the server sends after its hello, and ours.
async::Task<Result<void>> exchange_signatures(std::shared_ptr<Connection> connection,
                                              std::shared_ptr<const crypto::SigningKey> key,
                                              proto::Hello own, proto::Hello theirs) {
  CO_TRY(const std::string channel, connection->channel());
  CO_TRY(const proto::Frame proof, co_await read_handshake(connection, proto::Frame::kProof));
  CO_TRY_VOID(check_signature(proof.proof(), Side::kServer, channel, theirs, own));
  proto::Frame answer;
  answer.mutable_proof()->set_signature(sign_hello(*key, Side::kCaller, channel, own, theirs));
  co_return connection->send(answer);
}

async::Task<Result<void>> exchange_macs(std::shared_ptr<Connection> connection,
                                        crypto::Secret secret, proto::Hello own,
                                        proto::Hello theirs) {
  proto::Frame proof;
  proof.mutable_proof()->set_mac(make_proof(secret.reveal(), Side::kCaller, own, theirs));
  CO_TRY_VOID(connection->send(proof));
  CO_TRY(const proto::Frame answer, co_await read_handshake(connection, proto::Frame::kProof));
  co_return check_proof(answer.proof(), secret.reveal(), Side::kServer, theirs, own);
}

async::Task<Result<Peer>> greet(std::shared_ptr<Connection> connection, Greeting greeting) {
  const Identity& identity = greeting.identity;
  Peer proven;
  CO_TRY_VOID(connection->prove(proven));
  proto::Frame own;
  *own.mutable_hello() = make_hello(identity, greeting.secret.reveal(), greeting.expected);
  CO_TRY_VOID(connection->send(own));
  CO_TRY(const proto::Frame answer, co_await read_handshake(connection, proto::Frame::kHello));
  CO_TRY(Peer peer, check_hello(own.hello(), answer.hello()));
  CO_TRY_VOID(check_expected(greeting.expected, peer));
  peer.proof = proven.proof;
  peer.principals = std::move(proven.principals);
  peer.encrypted = proven.encrypted;
  CO_TRY_VOID(check_certified_name(peer, greeting.wanted));
  CO_TRY_VOID(check_signs(own.hello(), answer.hello(), peer.encrypted));
  if (both_sign(own.hello(), answer.hello())) {
    auto signing = exchange_signatures(connection, identity.key, own.hello(), answer.hello());
    CO_TRY_VOID(co_await std::move(signing));
  } else if (!greeting.secret.empty()) {
    auto proving = exchange_macs(connection, greeting.secret, own.hello(), answer.hello());
    CO_TRY_VOID(co_await std::move(proving));
    peer.proof = Proof::kSecret;
    peer.principals = {"secret:" + SharedKey(greeting.secret.reveal()).id};
  }
  if (greeting.is_unix) {
    peer.local_user = true;
    peer.proof = Proof::kLocalUser;
    peer.principals = {fmt::format("uid:{}", ::geteuid())};
  }
  tell_epoch(identity, peer);
  co_return peer;
}

async::Task<Result<Socket>> connect_one(Endpoint endpoint, TimePoint deadline) {
  const auto executor = co_await asio::this_coro::executor;
  const auto socket = std::make_shared<Socket>(executor);
  // Not open(): another thread may start a process, which must not inherit the connection.
  const auto protocol = endpoint.protocol();
  UniqueFd descriptor(
      ::socket(protocol.family(), protocol.type() | SOCK_CLOEXEC, protocol.protocol()));
  if (!descriptor) co_return fail_errno(errno, "open a socket");
  boost::system::error_code error;
  socket->assign(protocol, descriptor.get(), error);
  if (error) co_return fail(socket_error(error, "open a socket"));
  (void)descriptor.release();
  asio::steady_timer timer(executor, deadline);
  const auto timed_out = std::make_shared<bool>(false);
  timer.async_wait([socket, timed_out](const boost::system::error_code& cancelled) {
    if (cancelled) return;
    *timed_out = true;
    socket->close();
  });
  const auto [failure] = co_await socket->async_connect(endpoint, kConnectTuple);
  timer.cancel();
  if (*timed_out) co_return fail(ErrorCode::kTimeout, "no answer in time");
  if (failure == asio::error::connection_refused || failure == asio::error::connection_reset) {
    co_return fail(ErrorCode::kPeerLost, "connection refused; is it running there?");
  }
  if (failure) co_return fail(socket_error(failure, "connect"));
  co_return std::move(*socket);
}

// Each address gets an equal part of the remaining time.
async::Task<Result<Socket>> connect_any(std::vector<Endpoint> endpoints, TimePoint deadline) {
  Error last(ErrorCode::kInternal, "no address");
  for (std::size_t i = 0; i < endpoints.size(); ++i) {
    const TimePoint now = steady_clock::now();
    const auto part = (deadline - now) / static_cast<long>(endpoints.size() - i);
    auto socket = co_await connect_one(endpoints[i], now + part);
    if (socket) co_return std::move(*socket);
    last = std::move(socket).error();
  }
  co_return fail(std::move(last));
}

async::Task<Result<Socket>> open_socket(std::string address, TimePoint deadline) {
  if (address.starts_with(kUnixPrefix)) {
    const std::string path = address.substr(kUnixPrefix.size());
    CO_TRY(const Endpoint endpoint, unix_endpoint(path));
    CO_TRY_VOID(check_unix_path(path));
    CO_TRY(Socket socket, co_await connect_one(endpoint, deadline));
    CO_TRY_VOID(check_peer_uid(socket.native_handle(), path));
    co_return socket;
  }
  CO_TRY(const HostPort parsed, HostPort::parse(address));
  CO_TRY(std::vector<Endpoint> endpoints, co_await resolve(parsed, deadline));
  CO_TRY(Socket socket, co_await connect_any(std::move(endpoints), deadline));
  set_tcp_options(socket);
  co_return socket;
}

struct Greeted {
  std::shared_ptr<Connection> connection;
  Peer peer;
};

// `met_plain_peer` becomes true when this end wants TLS and the server does not speak it.
async::Task<Result<Greeted>> connect_once(std::string address, Greeting greeting, bool tls,
                                          TimePoint until, bool& met_plain_peer) {
  CO_TRY(Socket socket, co_await open_socket(address, until));
  auto connection = Connection::create(std::move(socket));
  connection->set_handshake_deadline(until);
  if (tls) {
    CO_TRY(const HostPort target, HostPort::parse(address));
    auto connecting = connection->connect_tls(greeting.identity.credentials, target.host);
    if (const auto secured = co_await std::move(connecting); !secured) {
      Error reason = secured.error();
      met_plain_peer = connection->met_plain_peer();
      if (met_plain_peer) {
        // A server that has no room says so in plain.
        auto reading = read_handshake(connection, proto::Frame::kHello);
        const auto frame = co_await std::move(reading);
        if (!frame && frame.error().code() == ErrorCode::kExhausted) {
          met_plain_peer = false;
          reason = frame.error();
        }
      }
      connection->close(reason);
      co_return fail(std::move(reason));
    }
  }
  auto greeted = greet(connection, std::move(greeting));
  auto peer = co_await std::move(greeted);
  if (!peer) {
    connection->close(peer.error());
    co_return fail(std::move(peer).error());
  }
  connection->set_handshake_deadline(std::nullopt);
  connection->raise_frame_cap();
  co_return Greeted{std::move(connection), std::move(*peer)};
}

// A server of a release before TLS, or one without a proof, is called in plain if the options allow
// it.
async::Task<Result<Greeted>> connect_allowed(std::string address, Greeting greeting,
                                             TimePoint until) {
  const auto credentials = greeting.is_unix ? nullptr : greeting.identity.credentials;
  bool met_plain_peer = false;
  auto first = connect_once(address, greeting, credentials != nullptr, until, met_plain_peer);
  auto greeted = co_await std::move(first);
  if (greeted || !met_plain_peer) co_return greeted;
  if (credentials->admits_protocol_2()) {
    greeting.secret = credentials->secret();
  } else if (!credentials->admits_strangers()) {
    co_return greeted;
  }
  auto second = connect_once(address, greeting, false, until, met_plain_peer);
  co_return co_await std::move(second);
}

}  // namespace

async::Task<Result<std::shared_ptr<RpcClient>>> RpcClient::connect(
    std::string address, Identity identity, std::chrono::milliseconds deadline,
    std::optional<Incarnation> expected, proto::Role wanted) {
  const bool is_unix = address.starts_with(kUnixPrefix);
  const TimePoint until = steady_clock::now() + deadline;
  Greeting greeting{std::move(identity), is_unix, {}, expected, wanted};
  auto connecting = connect_allowed(address, std::move(greeting), until);
  auto greeted = co_await std::move(connecting);
  if (!greeted) {
    co_return fail(std::move(greeted).error().with_context(fmt::format("connect {}", address)));
  }
  Peer& peer = greeted->peer;
  peer.address = is_unix ? "unix" : address;
  std::string name =
      peer.node_id.empty() ? address : fmt::format("{} at {}", peer.node_id, address);
  auto core = std::make_shared<ClientCore>(std::move(greeted->connection), std::move(peer),
                                           std::move(name));
  core->start();
  co_return std::make_shared<Client>(std::move(core));
}

}  // namespace rekindle::rpc
