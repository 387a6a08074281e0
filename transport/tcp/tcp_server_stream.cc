#include "transport/tcp/tcp_server_stream.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include <sys/socket.h>

#include "src/base/log.h"
#include "transport/tcp/tcp_socket.h"

namespace rekindle::transport::tcp {
namespace {

constexpr std::uint64_t kServeTurnBytes = 1 << 20;
constexpr int kTurnOps = 64;

OpStatus status_of(const Error& error) {
  return error.code() == ErrorCode::kStale ? OpStatus::kStale : OpStatus::kDenied;
}

}  // namespace

std::shared_ptr<SessionShare> SessionTable::open_stream(const SessionToken& token,
                                                        std::uint64_t bytes_per_second) {
  const std::lock_guard lock(mutex_);
  auto& share = shares_[token];
  if (!share) share = std::make_shared<SessionShare>(bytes_per_second);
  if (share->streams >= max_streams_) return nullptr;
  share->limiter.set_rate(bytes_per_second);
  ++share->streams;
  return share;
}

void SessionTable::close_stream(const SessionToken& token) {
  const std::lock_guard lock(mutex_);
  const auto found = shares_.find(token);
  if (found != shares_.end() && --found->second->streams == 0) shares_.erase(found);
}

ServerStream::ServerStream(UniqueFd socket, ServerContext& context, TimePoint now)
    : socket_(std::move(socket)),
      context_(context),
      opened_at_(now),
      last_progress_(now),
      sender_(is_paced(congestion_control(socket_.get())) ? Sender::From::kMapping
                                                          : Sender::From::kFile) {
  context_.connections.fetch_add(1, std::memory_order_relaxed);
}

ServerStream::~ServerStream() {
  reset_and_close(socket_);
  if (share_) context_.sessions.close_stream(token_);
  context_.connections.fetch_sub(1, std::memory_order_relaxed);
}

bool ServerStream::stalled(TimePoint now) const {
  return sender_.active() && now - last_progress_ > context_.options.stall_timeout;
}

bool ServerStream::refresh_session() {
  if (!share_) return true;
  const auto rate = context_.registry.session_rate(token_);
  if (rate) share_->limiter.set_rate(*rate);
  return rate.has_value();
}

ServerStream::Progress ServerStream::step(TimePoint now) {
  if (!share_) {
    if (const Progress progress = read_hello(); progress != Progress::kAgain) return progress;
  }
  std::uint64_t budget = kServeTurnBytes;
  for (int op = 0; op < kTurnOps && budget != 0;) {
    if (!sender_.active()) {
      if (!start_next_request()) return closed_ ? Progress::kClosed : Progress::kIdle;
      last_progress_ = now;
      ++op;
    }
    const std::uint64_t wanted = std::min(sender_.payload_left(), budget);
    const std::uint64_t allowed = share_->limiter.take(wanted, now);
    if (wanted != 0 && allowed == 0) {
      resume_at_ = share_->limiter.ready_at(now);
      // The stream waits for this server, not for the peer.
      last_progress_ = now;
      return Progress::kThrottled;
    }
    const auto sent = sender_.send(socket_.get(), allowed, request_waiting());
    share_->limiter.give_back(allowed - sent.payload);
    context_.bytes_sent.fetch_add(sent.payload, std::memory_order_relaxed);
    budget -= sent.payload;
    if (sent.payload != 0) last_progress_ = now;
    if (sent.outcome == Sender::Outcome::kBlocked) return Progress::kBlocked;
    if (sent.outcome == Sender::Outcome::kBroken) {
      log::debug("tcp.serve.broken", "peer", peer_address(socket_.get()).to_string(), "why",
                 sender_.broken_reason());
      return Progress::kClosed;
    }
  }
  return Progress::kAgain;
}

// Fills `in_` with the bytes that have arrived. False: nothing came; closed_ tells why.
bool ServerStream::receive() {
  if (in_begin_ != 0) {
    std::memmove(in_.data(), in_.data() + in_begin_, in_used_ - in_begin_);
    in_used_ -= in_begin_;
    in_begin_ = 0;
  }
  // Before the hello, receive no more than its bytes: those that follow are no part of it.
  const std::size_t limit = share_ ? in_.size() : kClientHelloBytes;
  while (true) {
    const ssize_t n = ::recv(socket_.get(), in_.data() + in_used_, limit - in_used_, MSG_DONTWAIT);
    if (n > 0) {
      in_used_ += static_cast<std::size_t>(n);
      return true;
    }
    if (n < 0 && errno == EINTR) continue;
    closed_ = n == 0 || (errno != EAGAIN && errno != EWOULDBLOCK);
    return false;
  }
}

ServerStream::Progress ServerStream::read_hello() {
  while (in_used_ < kClientHelloBytes) {
    if (!receive()) return closed_ ? Progress::kClosed : Progress::kIdle;
  }
  std::uint16_t version = 0;
  const auto hello = decode_client_hello(
      std::span<const std::byte, kClientHelloBytes>(in_.data(), kClientHelloBytes), version);
  in_used_ = 0;
  if (!hello) {
    log::debug("tcp.serve.hello", "peer", peer_address(socket_.get()).to_string(), "why",
               hello.error());
    return Progress::kClosed;
  }
  if (version != kWireVersion) return refuse(HelloStatus::kVersion);
  if (hello->incarnation != context_.incarnation) return refuse(HelloStatus::kStale);
  const auto rate = context_.registry.session_rate(hello->token);
  if (!rate) return refuse(HelloStatus::kDenied);
  auto share = context_.sessions.open_stream(hello->token, *rate);
  if (!share) return refuse(HelloStatus::kBusy);
  token_ = hello->token;
  share_ = std::move(share);
  return reply(HelloStatus::kOk) ? Progress::kAgain : Progress::kClosed;
}

bool ServerStream::reply(HelloStatus status) {
  std::array<std::byte, kServerHelloBytes> frame;
  encode(ServerHello{.status = status, .incarnation = context_.incarnation}, frame);
  // The first bytes always fit a fresh socket, unless it is broken.
  return ::send(socket_.get(), frame.data(), frame.size(), MSG_DONTWAIT | MSG_NOSIGNAL) ==
         static_cast<ssize_t>(frame.size());
}

ServerStream::Progress ServerStream::refuse(HelloStatus status) {
  if (reply(status)) socket_.reset();  // an orderly close, so that the answer arrives
  return Progress::kClosed;
}

bool ServerStream::start_next_request() {
  while (!request_waiting()) {
    if (!receive()) return false;
  }
  const auto request = decode_request(
      std::span<const std::byte, kRequestBytes>(in_.data() + in_begin_, kRequestBytes));
  in_begin_ += kRequestBytes;
  if (!request) {
    log::debug("tcp.serve.request", "peer", peer_address(socket_.get()).to_string(), "why",
               request.error());
    closed_ = true;
    return false;
  }
  context_.ops.fetch_add(1, std::memory_order_relaxed);
  auto region = context_.registry.lookup(token_, request->region);
  if (region) {
    sender_.start(*request, std::move(*region));
  } else {
    sender_.start_error(request->wr_id, status_of(region.error()));
  }
  return true;
}

}  // namespace rekindle::transport::tcp
