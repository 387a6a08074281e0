#include "recovery/rpc/rpc_server_connection.h"

#include <utility>

#include <unistd.h>

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/as_tuple.hpp>
#include <boost/asio/bind_cancellation_slot.hpp>
#include <boost/asio/cancellation_signal.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>

#include "recovery/metrics/metrics.h"
#include "recovery/rpc/address.h"
#include "recovery/rpc/convert.h"
#include "recovery/rpc/credentials.h"
#include "recovery/rpc/handshake.h"
#include "recovery/rpc/rpc_connection.h"
#include "recovery/rpc/tls.h"
#include "src/base/log.h"
#include "src/base/units.h"

namespace rekindle::rpc {

namespace asio = boost::asio;
using std::chrono::steady_clock;

// One call that is being served. Its id stays taken until the handler has ended, also when the
// deadline has passed or the caller has gone.
struct ServerConnection::Call {
  Call(const asio::any_io_executor& executor, std::uint64_t call_id)
      : id(call_id), timer(executor) {}
  void cancel() {
    cancelled = true;
    signal.emit(asio::cancellation_type::terminal);
  }
  std::uint64_t id;
  std::uint32_t method = 0;
  TimePoint began = steady_clock::now();
  std::string what;
  CallObject object;
  // Of its body.
  LargeFrames::Share share;
  trace::RunningSpan span;
  // Of the handler.
  asio::cancellation_signal signal;
  asio::steady_timer timer;
  bool answered = false;
  bool cancelled = false;
};

class ServerConnection::Events final : public EventSink {
 public:
  Events(std::shared_ptr<Connection> connection, std::shared_ptr<Call> call)
      : connection_(std::move(connection)), call_(std::move(call)) {}

  void send(const google::protobuf::MessageLite& body) override {
    if (cancelled() || connection_->queued_bytes() > Connection::kEventDropBytes) return;
    proto::Frame frame;
    frame.mutable_event()->set_call_id(call_->id);
    body.SerializeToString(frame.mutable_event()->mutable_body());
    // An event that does not fit a frame is dropped.
    (void)connection_->send(frame);
  }
  bool cancelled() const override {
    return call_->cancelled || call_->answered || !connection_->is_open();
  }

 private:
  std::shared_ptr<Connection> connection_;
  std::shared_ptr<Call> call_;
};

std::shared_ptr<std::size_t> ServerShared::unread_of(const std::string& budget_key) {
  std::erase_if(unread, [](const auto& entry) { return entry.second.expired(); });
  std::weak_ptr<std::size_t>& entry = unread[budget_key];
  auto sum = entry.lock();
  if (sum == nullptr) entry = sum = std::make_shared<std::size_t>(0);
  return sum;
}

ServerConnection::ServerConnection(std::shared_ptr<ServerShared> shared, Socket socket,
                                   std::string address, std::string unix_path)
    : shared_(std::move(shared)),
      connection_(Connection::create(std::move(socket))),
      unix_path_(std::move(unix_path)),
      host_(host_of_address(address)) {
  peer_.address = std::move(address);
}

namespace {

constexpr std::chrono::milliseconds kRefusalLogInterval{100};
// Of answers to one peer. Above it a large one becomes a refusal: the queues are memory.
constexpr std::size_t kMostUnreadBytes = 128u << 20;

Failure handler_failed(const std::string& call, const std::string& why, bool quiet = false) {
  if (!quiet) log::error("rpc.handler_failed", "call", call, "error", why);
  return fail(ErrorCode::kInternal, "{} failed: {}", call, why);
}

void log_refusal(ServerShared& shared, const std::string& address, const Error& error) {
  const TimePoint now = steady_clock::now();
  if (now < shared.next_refusal_log) {
    ++shared.unlogged_refusals;
    return;
  }
  shared.next_refusal_log = now + kRefusalLogInterval;
  log::warn("rpc.refused", "peer", address, "error", error, "unlogged",
            std::exchange(shared.unlogged_refusals, 0));
}

}  // namespace

async::Task<Result<void>> ServerConnection::secure() {
  const auto& credentials = shared_->identity.credentials;
  CO_TRY(uses_tls_, co_await connection_->sees_tls());
  const std::string_view self = role_name(shared_->identity.role);
  if (!uses_tls_) {
    if (credentials == nullptr || credentials->admits_strangers() ||
        credentials->admits_protocol_2()) {
      co_return Result<void>();
    }
    co_return fail(ErrorCode::kDenied,
                   "this {} talks to peers with its cluster secret or a certificate only; give the "
                   "caller --secret-file, or --tls-cert, --tls-key and --tls-ca (a release before "
                   "protocol {}: see --admit-protocol-2)",
                   self, kProtocolOfKeys);
  }
  if (credentials == nullptr) {
    uses_tls_ = false;
    co_return fail(ErrorCode::kDenied,
                   "this {} has neither a secret nor a certificate, but the caller has; give it "
                   "the same --secret-file, or certificates",
                   self);
  }
  auto accepting = connection_->accept_tls(credentials);
  CO_TRY_VOID(co_await std::move(accepting));
  co_return connection_->prove(peer_);
}

Result<crypto::Secret> ServerConnection::plain_secret(const proto::Hello& theirs) const {
  const auto& credentials = shared_->identity.credentials;
  if (uses_tls_ || !unix_path_.empty() || credentials == nullptr) return crypto::Secret();
  if (credentials->admits_protocol_2() && theirs.authenticated()) return credentials->secret();
  if (credentials->admits_strangers()) return crypto::Secret();
  return fail(ErrorCode::kDenied,
              "peers of protocol 2 must prove the cluster secret; give the caller --secret-file");
}

async::Task<Result<void>> ServerConnection::exchange_proofs(crypto::Secret secret, proto::Frame own,
                                                            proto::Frame theirs) {
  const bool signs = both_sign(own.hello(), theirs.hello());
  CO_TRY_VOID(connection_->send(own));
  if (!signs && secret.empty()) co_return Result<void>();
  CO_TRY(const std::string channel, connection_->channel());
  proto::Frame answer;
  if (signs) {
    answer.mutable_proof()->set_signature(
        sign_hello(*shared_->identity.key, Side::kServer, channel, own.hello(), theirs.hello()));
    CO_TRY_VOID(connection_->send(answer));
  }
  CO_TRY(const proto::Frame proof, co_await connection_->read());
  if (proof.kind_case() != proto::Frame::kProof) {
    co_return fail(ErrorCode::kInvalid, "the caller's proof must follow the hello");
  }
  if (signs) {
    co_return check_signature(proof.proof(), Side::kCaller, channel, theirs.hello(), own.hello());
  }
  CO_TRY_VOID(
      check_proof(proof.proof(), secret.reveal(), Side::kCaller, theirs.hello(), own.hello()));
  answer.mutable_proof()->set_mac(
      make_proof(secret.reveal(), Side::kServer, own.hello(), theirs.hello()));
  co_return connection_->send(answer);
}

async::Task<Result<void>> ServerConnection::greet() {
  const bool is_unix = this->is_unix();
  if (is_unix) {
    CO_TRY_VOID(check_peer_uid(connection_->socket().native_handle(), unix_path_));
    peer_.local_user = true;
    peer_.proof = Proof::kLocalUser;
    peer_.principals = {fmt::format("uid:{}", ::geteuid())};
  } else {
    CO_TRY_VOID(co_await secure());
  }
  CO_TRY(const proto::Frame theirs, co_await connection_->read());
  if (theirs.kind_case() != proto::Frame::kHello) {
    co_return fail(ErrorCode::kInvalid, "a connection must begin with a hello");
  }
  CO_TRY(const crypto::Secret secret, plain_secret(theirs.hello()));
  proto::Frame own;
  *own.mutable_hello() = make_hello(shared_->identity, secret.reveal(), std::nullopt);
  CO_TRY(Peer peer, check_hello(own.hello(), theirs.hello()));
  peer.address = peer_.address;
  peer.local_user = peer_.local_user;
  peer.proof = peer_.proof;
  peer.principals = peer_.principals;
  peer.encrypted = peer_.encrypted;
  CO_TRY_VOID(check_certified_name(peer, proto::ROLE_UNKNOWN));
  CO_TRY_VOID(check_signs(own.hello(), theirs.hello(), peer.encrypted));
  budget_key_ = rpc::budget_key(peer);
  if (shared_->admit) {
    CO_TRY(place_, shared_->admit(peer));
    // From here on it counts for its certificate.
    if (has_own_name(peer)) host_place_.reset();
  }
  auto proving = exchange_proofs(secret, own, theirs);
  CO_TRY_VOID(co_await std::move(proving));
  if (!secret.empty()) {
    peer.proof = Proof::kSecret;
    peer.principals = {"secret:" + SharedKey(secret.reveal()).id};
  }
  peer_ = std::move(peer);
  tell_epoch(shared_->identity, peer_);
  co_return Result<void>();
}

async::Task<void> ServerConnection::serve(std::shared_ptr<ServerConnection> self,
                                          std::function<void()> on_end) {
  struct AtEnd {
    ServerConnection* connection;
    std::function<void()> on_end;
    ~AtEnd() {
      connection->end();
      on_end();
    }
  } at_end{self.get(), std::move(on_end)};
  auto& connection = *self->connection_;
  if (self->unix_path_.empty()) set_tcp_options(connection.socket());
  connection.set_handshake_deadline(steady_clock::now() + kFrameDeadline);
  if (auto greeted = co_await self->greet(); !greeted) {
    if (connection.is_open()) {
      log_refusal(*self->shared_, self->peer_.address, greeted.error());
      if (self->shared_->guard != nullptr) {
        self->shared_->guard->refused(self->peer_.address, greeted.error());
      }
      co_await connection.refuse(std::move(greeted).error());
    }
    co_return;
  }
  self->greeted_ = true;
  if (!self->budget_key_.empty()) {
    self->unread_ = self->shared_->unread_of(self->budget_key_);
    connection.count_queue_in(self->unread_);
  }
  connection.set_handshake_deadline(std::nullopt);
  connection.set_idle_timeout(self->shared_->limits.idle_timeout,
                              [raw = self.get()] { return !raw->calls_.empty(); });
  connection.raise_frame_cap([raw = self.get()](std::string_view head, std::uint32_t frame_bytes) {
    return raw->on_large_frame(head, frame_bytes);
  });
  for (;;) {
    // A peer that does not read its responses gets no new work; the write deadline ends it.
    if (!co_await connection.wait_for_room(TimePoint::max())) co_return;
    auto frame = co_await connection.read();
    if (!frame) {
      if (connection.is_open()) co_await connection.refuse(std::move(frame).error());
      co_return;
    }
    LargeFrames::Share share = std::move(self->receiving_);
    self->receiving_ = nullptr;
    if (frame->kind_case() == proto::Frame::kRequest) {
      self->on_request(std::move(*frame->mutable_request()), std::move(share));
    } else if (frame->kind_case() == proto::Frame::kCancel) {
      const auto found = self->calls_.find(frame->cancel().call_id());
      if (found != self->calls_.end()) {
        // Nobody waits for it.
        found->second->answered = true;
        found->second->cancel();
      }
    } else {
      co_await connection.refuse({ErrorCode::kInvalid, "only calls may follow the hello"});
      co_return;
    }
  }
}

void ServerConnection::end() {
  connection_->close({ErrorCode::kPeerLost, "connection closed"});
  cancel_calls();
  place_.reset();
  host_place_.reset();
  if (std::exchange(greeted_, false) && shared_->on_peer_closed) shared_->on_peer_closed(peer_);
}

void ServerConnection::make_way(const Error& error) {
  place_.reset();
  host_place_.reset();
  refuse_now(error);
}

void ServerConnection::cancel_calls() {
  // A handler may end inside cancel().
  const auto calls = calls_;
  for (const auto& [id, call] : calls) call->cancel();
}

Result<void> ServerConnection::on_large_frame(std::string_view head, std::uint32_t frame_bytes) {
  TRY_VOID(check_large_frame(head, frame_bytes));
  TRY(receiving_, shared_->large_frames.take(budget_key_, frame_bytes));
  return {};
}

void ServerConnection::on_request(proto::Request request, LargeFrames::Share share) {
  const std::uint64_t id = request.call_id();
  last_request_ = steady_now();
  const auto found = shared_->methods.find(request.method());
  if (calls_.contains(id)) {
    return connection_->close({ErrorCode::kInvalid, fmt::format("call id {} is in use", id)});
  }
  if (found == shared_->methods.end()) {
    const std::string name = proto::Method_Name(static_cast<proto::Method>(request.method()));
    return respond(id,
                   fail(ErrorCode::kInvalid,
                        "{} does not serve {}: is this the right address, and the same version?",
                        role_name(shared_->identity.role),
                        name.empty() ? fmt::format("method {}", request.method()) : name));
  }
  if (found->second.local_only && !peer_.local_user) {
    return respond(id, fail(ErrorCode::kDenied,
                            "this call is served on the unix socket only, to the same user"));
  }
  if (request.deadline_ms() == 0) {
    return respond(id, fail(ErrorCode::kInvalid, "a call needs a deadline"));
  }
  if (auto within = check_budget(request); !within) {
    return respond(id, fail(std::move(within).error()));
  }
  auto object = admit(request);
  if (!object) return respond(id, fail(std::move(object).error()));
  if (found->second.at_once) {
    const TimePoint began = steady_clock::now();
    auto answer = answer_at_once(found->second, request);
    tell_guard(static_cast<proto::Method>(request.method()), *object, answer);
    count(request.method(), !answer, began);
    return respond(id, std::move(answer));
  }
  if (calls_.size() >= shared_->limits.max_calls_per_connection) {
    return respond(id, fail(ErrorCode::kExhausted, "{} calls are open on this connection; wait",
                            calls_.size()));
  }
  const auto call = std::make_shared<Call>(connection_->executor(), id);
  call->method = request.method();
  call->object = *std::move(object);
  call->what = proto::Method_Name(static_cast<proto::Method>(request.method()));
  call->share = std::move(share);
  call->span = begin_span(request);
  calls_.emplace(id, call);
  call->timer.expires_after(std::chrono::milliseconds(request.deadline_ms()));
  call->timer.async_wait([self = shared_from_this(), call](const boost::system::error_code& error) {
    if (!error) self->on_call_deadline(call);
  });
  shared_->tasks.spawn("rpc.call", run_call(shared_from_this(), call, found->second,
                                            std::move(*request.mutable_body())));
}

Result<CallObject> ServerConnection::admit(const proto::Request& request) const {
  const auto method = static_cast<proto::Method>(request.method());
  const MethodRule* const rule = rule_of(method);
  const auto judge = [&]() -> Result<CallObject> {
    if (rule == nullptr) {
      return fail(ErrorCode::kDenied, "{} has no rule here, so nobody may call it",
                  proto::Method_Name(method));
    }
    TRY_VOID(check_role(peer_, *rule));
    const bool guarded = rule->verb != Verb::kNone || rule->audited;
    if (shared_->guard == nullptr || !guarded) return CallObject{};
    TRY(CallObject object, object_of(method, request.body()));
    TRY_VOID(shared_->guard->admit(peer_, *rule, object));
    return object;
  };
  auto object = judge();
  if (!object && shared_->guard != nullptr) {
    shared_->guard->denied(peer_, method, {}, object.error());
  }
  return object;
}

void ServerConnection::tell_guard(proto::Method method, const CallObject& object,
                                  const Result<std::string>& result) const {
  const MethodRule* const rule = rule_of(method);
  if (shared_->guard == nullptr || rule == nullptr) return;
  if (rule->audited) {
    shared_->guard->ended(peer_, method, object,
                          result ? Result<void>() : fail(Error(result.error())));
  } else if (!result && result.error().code() == ErrorCode::kDenied) {
    shared_->guard->denied(peer_, method, object, result.error());
  }
}

bool ServerConnection::settles(proto::Method method) const {
  const MethodRule* const rule = rule_of(method);
  return shared_->guard != nullptr && rule != nullptr && rule->audited;
}

Result<void> ServerConnection::check_budget(const proto::Request& request) {
  TRY_VOID(check_body_size(request.method(), request.body().size()));
  const MethodLimits limits = limits_of(request.method());
  if (limits.calls_per_second <= 0) return {};
  return shared_->rates.take(budget_key_,
                             proto::Method_Name(static_cast<proto::Method>(request.method())), 1,
                             limits.calls_per_second, limits.burst, steady_clock::now());
}

trace::RunningSpan ServerConnection::begin_span(const proto::Request& request) const {
  // Most calls have none, such as heartbeats.
  const auto parent = trace::Context::from_bytes(request.trace());
  if (!parent || shared_->tracer == nullptr) return {};
  const auto method = static_cast<proto::Method>(request.method());
  return {shared_->tracer, metrics::label_of(proto::Method_Name(method)), *parent};
}

Peer ServerConnection::caller_of(const trace::RunningSpan& span) const {
  Peer caller = peer_;
  caller.trace = span.context();
  return caller;
}

Result<std::string> ServerConnection::answer_at_once(const ServerShared::Method& method,
                                                     const proto::Request& request) const {
  std::string why = "unknown exception";
  trace::RunningSpan span = begin_span(request);
  try {
    if (!span.context().valid()) return method.at_once(peer_, request.body());
    auto answer = method.at_once(caller_of(span), request.body());
    span.end(answer);
    return answer;
  } catch (const std::exception& error) {
    why = error.what();
    // Only the text of the exception is wanted.
  } catch (...) {
  }
  return handler_failed(proto::Method_Name(static_cast<proto::Method>(request.method())), why);
}

void ServerConnection::on_call_deadline(const std::shared_ptr<Call>& call) {
  respond_once(*call,
               fail(ErrorCode::kTimeout, "{}: not done by the caller's deadline", call->what));
  call->cancel();
}

async::Task<Result<std::string>> ServerConnection::invoke(std::shared_ptr<ServerConnection> self,
                                                          std::shared_ptr<Call> call,
                                                          const ServerShared::Method& method,
                                                          std::string body) {
  auto events = std::make_shared<Events>(self->connection_, call);
  const Peer caller = self->caller_of(call->span);
  co_return co_await method.handler(caller, std::move(body), std::move(events));
}

async::Task<void> ServerConnection::run_call(std::shared_ptr<ServerConnection> self,
                                             std::shared_ptr<Call> call,
                                             const ServerShared::Method& method, std::string body) {
  // The handler has its own cancellation: it may be told to stop while this waits for its end.
  auto [exception, result] = co_await asio::co_spawn(
      self->connection_->executor(), invoke(self, call, method, std::move(body)),
      asio::bind_cancellation_slot(call->signal.slot(), asio::as_tuple(asio::use_awaitable)));
  if (exception) {
    std::string why = "unknown exception";
    try {
      std::rethrow_exception(exception);
    } catch (const std::exception& error) {
      why = error.what();
      // Only the text of the exception is wanted.
    } catch (...) {
    }
    result = handler_failed(call->what, why, /*quiet=*/call->cancelled);
  }
  self->count(call->method, !result, call->began);
  const auto method_id = static_cast<proto::Method>(call->method);
  self->tell_guard(method_id, call->object, result);
  if (result && self->settles(method_id)) {
    auto settling = self->shared_->guard->settle();
    const Result<void> settled = co_await std::move(settling);
    if (!settled) result = fail(settled.error());
  }
  call->timer.cancel();
  self->calls_.erase(call->id);
  call->span.end(result);
  self->respond_once(*call, std::move(result));
}

void ServerConnection::count(std::uint32_t method, bool failed, TimePoint began) const {
  if (!shared_->on_call_ended) return;
  shared_->on_call_ended(static_cast<proto::Method>(method), failed, steady_clock::now() - began);
}

void ServerConnection::respond_once(Call& call, Result<std::string> result) {
  if (!std::exchange(call.answered, true)) respond(call.id, std::move(result));
}

void ServerConnection::respond(std::uint64_t call_id, Result<std::string> result) {
  const bool is_large = result && result->size() > kSmallFrameBytes;
  if (is_large && unread_ != nullptr && *unread_ >= kMostUnreadBytes) {
    result = fail(ErrorCode::kExhausted, "{} has {} of answers to read: read them, and call again",
                  budget_key_, format_bytes(*unread_));
  }
  proto::Frame frame;
  auto& response = *frame.mutable_response();
  response.set_call_id(call_id);
  if (result) {
    *response.mutable_status() = ok_status();
    response.set_body(std::move(*result));
  } else {
    *response.mutable_status() = to_status(result.error());
  }
  if (const auto sent = connection_->send(frame); !sent) {
    response.clear_body();
    *response.mutable_status() =
        to_status(Error(ErrorCode::kInternal,
                        fmt::format("the response is too large: {}", sent.error().message())));
    (void)connection_->send(frame);
  }
}

}  // namespace rekindle::rpc
