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
    if (const Progress progress = handshake(); progress != Progress::kAgain) return progress;
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
    if (tls_) {
      context_.bytes_sent_encrypted.fetch_add(sent.payload, std::memory_order_relaxed);
    }
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
bool ServerStream::receive(std::size_t limit) {
  if (in_begin_ != 0) {
    std::memmove(in_.data(), in_.data() + in_begin_, in_used_ - in_begin_);
    in_used_ -= in_begin_;
    in_begin_ = 0;
  }
  while (true) {
    const auto room = std::span(in_).subspan(in_used_, limit - in_used_);
    const ssize_t n =
        tls_ ? tls_->receive(room) : ::recv(socket_.get(), room.data(), room.size(), MSG_DONTWAIT);
    if (n > 0) {
      in_used_ += static_cast<std::size_t>(n);
      return true;
    }
    if (n < 0 && errno == EINTR) continue;
    closed_ = n == 0 || (errno != EAGAIN && errno != EWOULDBLOCK);
    return false;
  }
}

// Receives no more than the part of the hello that is due: bytes that follow are no part of it.
ServerStream::Progress ServerStream::await(std::size_t bytes) {
  while (in_used_ < bytes) {
    if (!receive(bytes)) return closed_ ? Progress::kClosed : Progress::kIdle;
  }
  in_used_ = 0;
  return Progress::kAgain;
}

ServerStream::Progress ServerStream::handshake() {
  Progress progress = Progress::kAgain;
  while (progress == Progress::kAgain && stage_ != Stage::kRequests) {
    if (stage_ == Stage::kBegin) {
      progress = begin();
    } else if (stage_ == Stage::kTls) {
      progress = shake_tls();
    } else if (stage_ == Stage::kHello) {
      progress = read_hello();
    } else if (stage_ == Stage::kNonce) {
      progress = read_nonce();
    } else {
      progress = read_proof();
    }
  }
  return progress;
}

ServerStream::Progress ServerStream::begin() {
  std::byte first{};
  ssize_t n = 0;
  do {
    n = ::recv(socket_.get(), &first, 1, MSG_PEEK | MSG_DONTWAIT);
  } while (n < 0 && errno == EINTR);
  if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return Progress::kIdle;
  if (n <= 0) return Progress::kClosed;
  stage_ = first == DataTls::kFirstByte ? Stage::kTls : Stage::kHello;
  if (stage_ == Stage::kHello) return Progress::kAgain;
  auto tls = DataTls::accept(socket_.get(), [this](const SessionHandle& handle) {
    return context_.registry.token_of(handle);
  });
  if (!tls) {
    log::warn("tcp.serve.tls", "error", tls.error());
    return Progress::kClosed;
  }
  tls_ = std::move(*tls);
  return Progress::kAgain;
}

ServerStream::Progress ServerStream::shake_tls() {
  switch (tls_->handshake()) {
    case DataTls::Io::kWantsRead:
      return Progress::kIdle;
    case DataTls::Io::kWantsWrite:
      return Progress::kBlocked;
    case DataTls::Io::kBroken:
      log::debug("tcp.serve.tls", "peer", peer_address(socket_.get()).to_string(), "why",
                 tls_->broken_reason());
      return Progress::kClosed;
    case DataTls::Io::kDone:
      break;
  }
  sender_.use_tls(*tls_);
  stage_ = Stage::kHello;
  return Progress::kAgain;
}

ServerStream::Progress ServerStream::read_hello() {
  if (const Progress progress = await(kClientHelloBytes); progress != Progress::kAgain) {
    return progress;
  }
  const auto hello = decode_client_hello(std::span(in_).first<kClientHelloBytes>());
  if (!hello) {
    log::debug("tcp.serve.hello", "peer", peer_address(socket_.get()).to_string(), "why",
               hello.error());
    return Progress::kClosed;
  }
  const bool sends_token = hello->version == kTokenWireVersion;
  if (!sends_token && hello->version != kWireVersion) return refuse(HelloStatus::kVersion);
  if (hello->incarnation != context_.incarnation) return refuse(HelloStatus::kStale);
  if (!tls_ && context_.options.require_encryption) return refuse(HelloStatus::kNotEncrypted);
  const auto token = sends_token ? SessionToken{hello->session}
                                 : context_.registry.token_of(SessionHandle{hello->session});
  const auto session = token ? context_.registry.find_session(*token) : std::nullopt;
  // A token that was read elsewhere opens no stream of a puller that sends none.
  if (!session || session->sends_token != sends_token) return refuse(HelloStatus::kDenied);
  if (tls_ && tls_->token() != *token) return refuse(HelloStatus::kDenied);
  const std::string host = peer_address(socket_.get()).host();
  if (!session->stream_hosts.empty() &&
      std::ranges::find(session->stream_hosts, host) == session->stream_hosts.end()) {
    log::warn("tcp.serve.hello", "peer", host, "puller", session->puller, "why",
              "the stream comes from an address that is not the puller's");
    return refuse(HelloStatus::kDenied);
  }
  token_ = *token;
  if (sends_token) return admit(session->max_bytes_per_second);
  stage_ = Stage::kNonce;
  return Progress::kAgain;
}

ServerStream::Progress ServerStream::read_nonce() {
  if (const Progress progress = await(kNonceBytes); progress != Progress::kAgain) return progress;
  exchange_.incarnation = context_.incarnation;
  exchange_.source_nonce = HelloExchange::fresh_nonce();
  std::memcpy(exchange_.reader_nonce.data(), in_.data(), kNonceBytes);
  const auto proof = exchange_.prove(token_, HelloExchange::Side::kSource);
  std::array<std::byte, kChallengeBytes> frame;
  encode(Challenge{exchange_.source_nonce, proof}, frame);
  if (!reply(HelloStatus::kOk) || !send_whole(frame)) return Progress::kClosed;
  stage_ = Stage::kProof;
  return Progress::kAgain;
}

ServerStream::Progress ServerStream::read_proof() {
  if (const Progress progress = await(kProofBytes); progress != Progress::kAgain) return progress;
  HelloExchange::Proof proof;
  std::memcpy(proof.data(), in_.data(), proof.size());
  if (!exchange_.proves(token_, HelloExchange::Side::kReader, proof)) {
    log::debug("tcp.serve.hello", "peer", peer_address(socket_.get()).to_string(), "why",
               "the reader does not know the token of the session that it names");
    return refuse(HelloStatus::kDenied);
  }
  // The session may have ended since the hello.
  const auto rate = context_.registry.session_rate(token_);
  return rate ? admit(*rate) : refuse(HelloStatus::kDenied);
}

ServerStream::Progress ServerStream::admit(std::uint64_t bytes_per_second) {
  auto share = context_.sessions.open_stream(token_, bytes_per_second);
  if (!share) return refuse(HelloStatus::kBusy);
  share_ = std::move(share);
  stage_ = Stage::kRequests;
  if (tls_) context_.encrypted.fetch_add(1, std::memory_order_relaxed);
  if (tls_ && tls_->kernel_sends()) {
    context_.encrypted_by_kernel.fetch_add(1, std::memory_order_relaxed);
  }
  return reply(HelloStatus::kOk) ? Progress::kAgain : Progress::kClosed;
}

bool ServerStream::reply(HelloStatus status) {
  std::array<std::byte, kServerHelloBytes> frame;
  encode(ServerHello{.status = status, .incarnation = context_.incarnation}, frame);
  return send_whole(frame);
}

// The first bytes always fit a fresh socket, unless it is broken.
bool ServerStream::send_whole(std::span<const std::byte> bytes) {
  const ssize_t sent =
      tls_ ? tls_->send(bytes)
           : ::send(socket_.get(), bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  return sent == static_cast<ssize_t>(bytes.size());
}

ServerStream::Progress ServerStream::refuse(HelloStatus status) {
  if (reply(status)) socket_.reset();  // an orderly close, so that the answer arrives
  return Progress::kClosed;
}

bool ServerStream::start_next_request() {
  while (!request_waiting()) {
    if (!receive(in_.size())) return false;
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
