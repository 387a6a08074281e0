#include "recovery/rpc/rpc_connection.h"

#include <algorithm>
#include <array>
#include <utility>

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <boost/asio/as_tuple.hpp>
#include <boost/asio/buffer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/write.hpp>

#include "recovery/rpc/credentials.h"
#include "recovery/rpc/handshake.h"
#include "recovery/rpc/tls.h"
#include "src/base/log.h"

namespace rekindle::rpc {

namespace asio = boost::asio;
using std::chrono::steady_clock;

namespace {

constexpr auto kUseTuple = asio::as_tuple(asio::use_awaitable);
// Idle connections stay small.
constexpr std::size_t kSmallChunkBytes = 4096;
constexpr std::size_t kLargeChunkBytes = 64u << 10;
// What a TLS record carries at most.
constexpr std::size_t kRecordBytes = 16u << 10;
// Small frames share one write.
constexpr std::size_t kJoinWritesBytes = 16u << 10;
constexpr std::chrono::milliseconds kRefusalLinger{1000};
constexpr std::chrono::milliseconds kProofCheck{5000};
// A watch that fires this late slept with its whole process (SIGSTOP, a suspended machine). The
// peer is not to blame, so deadlines move by as much and a little more.
constexpr std::chrono::milliseconds kOwnPause{500};

}  // namespace

void set_tcp_options(Socket& socket) {
  const auto set = [&](int level, int option, int value) {
    (void)::setsockopt(socket.native_handle(), level, option, &value, sizeof value);
  };
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, 10);
  set(IPPROTO_TCP, TCP_KEEPINTVL, 5);
  set(IPPROTO_TCP, TCP_KEEPCNT, 3);
}

Error socket_error(const boost::system::error_code& error, std::string_view what) {
  // TLS ends without a farewell: frames have lengths, so nothing can be cut off unseen.
  if (error == asio::error::eof) {
    return {ErrorCode::kPeerLost, fmt::format("{}: the peer closed the connection", what)};
  }
  if (error == asio::error::operation_aborted) {
    return {ErrorCode::kPeerLost, fmt::format("{}: connection closed", what)};
  }
  return errno_error(error.value(), what);
}

std::shared_ptr<Connection> Connection::create(Socket socket) {
  return std::shared_ptr<Connection>(new Connection(std::move(socket)));
}

Connection::Connection(Socket socket)
    : socket_(std::move(socket)),
      proof_watch_(socket_.get_executor()),
      chunk_(kSmallChunkBytes),
      read_watch_(socket_.get_executor()),
      last_frame_(steady_clock::now()),
      write_watch_(socket_.get_executor()) {}

Connection::~Connection() { set_queued(0); }

Failure Connection::failed(Error error) {
  close(std::move(error));
  return fail(close_reason_);
}

async::Task<Result<std::string_view>> Connection::read_socket(std::string_view what) {
  const auto self = shared_from_this();
  const auto [error, size] = co_await socket_.async_read_some(asio::buffer(chunk_), kUseTuple);
  if (closed_) co_return fail(close_reason_);
  if (error) co_return fail(socket_error(error, what));
  co_return std::string_view(chunk_.data(), size);
}

// One record at a time, so that a peer cannot make the decoder hold more than it has to.
async::Task<Result<void>> Connection::receive() {
  if (tls_ == nullptr) {
    CO_TRY(const std::string_view bytes, co_await read_socket("read"));
    decoder_.feed(bytes);
    co_return Result<void>();
  }
  for (;;) {
    if (tls_->has_bytes()) {
      CO_TRY(const bool fed, feed_record());
      if (fed) co_return Result<void>();
    }
    CO_TRY(const std::string_view bytes, co_await read_socket("read"));
    tls_->take_from_network(bytes);
  }
}

Result<bool> Connection::feed_record() {
  std::array<char, kRecordBytes> plain;
  TRY(const std::size_t size, tls_->read(plain));
  decoder_.feed({plain.data(), size});
  return size > 0;
}

async::Task<Result<void>> Connection::connect_tls(std::shared_ptr<Credentials> credentials,
                                                  std::string host) {
  credentials_ = std::move(credentials);
  CO_TRY(tls_, TlsSession::create(credentials_->context(), Side::kCaller, std::move(host)));
  auto shaking = shake_hands({});
  auto shaken = co_await std::move(shaking);
  const std::string plain = shaken ? std::string() : tls_->plain_bytes();
  if (!plain.empty() && !closed_) {
    met_plain_peer_ = true;
    tls_.reset();
    decoder_.feed(plain);
  }
  co_return shaken;
}

async::Task<Result<bool>> Connection::sees_tls() {
  auto bytes = co_await read_socket("read");
  if (!bytes) co_return failed(std::move(bytes).error());
  if (bytes->starts_with(kTlsFirstByte)) {
    first_bytes_ = *bytes;
    co_return true;
  }
  decoder_.feed(*bytes);
  co_return false;
}

async::Task<Result<void>> Connection::accept_tls(std::shared_ptr<Credentials> credentials) {
  credentials_ = std::move(credentials);
  CO_TRY(tls_, TlsSession::create(credentials_->context(), Side::kServer, ""));
  auto shaking = shake_hands(first_bytes_);
  co_return co_await std::move(shaking);
}

// The watch of the handshake's deadline closes the socket, which ends this. What our end says last
// in a handshake that succeeds goes out with the first frame.
async::Task<Result<void>> Connection::shake_hands(std::string_view received) {
  const auto self = shared_from_this();
  for (;;) {
    tls_->take_from_network(received);
    const auto done = tls_->shake_hands();
    if (done && *done) {
      watch_proof();
      co_return Result<void>();
    }
    tls_failed_ = !done;
    tls_->give_to_network(records_);
    // After an error here, the reason of the peer may still be there to read.
    (void)co_await asio::async_write(socket_, asio::buffer(records_), kUseTuple);
    if (closed_) co_return fail(close_reason_);
    if (!done) co_return fail(done.error());
    auto more = co_await read_socket("TLS handshake");
    tls_failed_ = !more;
    if (!more) co_return fail(std::move(more).error());
    received = *more;
  }
}

void Connection::watch_proof() {
  proof_watch_.expires_after(kProofCheck);
  proof_watch_.async_wait([self = shared_from_this()](const boost::system::error_code& error) {
    if (error || self->closed_) return;
    const auto still = self->tls_->check_again(self->credentials_->context());
    if (still) return self->watch_proof();
    log::warn("rpc.proof_over", "why", still.error());
    self->close(still.error());
  });
}

Result<void> Connection::prove(Peer& peer) const {
  return tls_ == nullptr ? Result<void>() : tls_->prove(peer);
}

Result<std::string> Connection::channel() const {
  return tls_ == nullptr ? std::string() : tls_->channel_binding();
}

async::Task<Result<proto::Frame>> Connection::read() {
  const auto self = shared_from_this();
  for (;;) {
    if (closed_) co_return fail(close_reason_);
    auto body = decoder_.next();
    if (!body) co_return fail(std::move(body).error());
    if (*body) {
      frame_began_.reset();
      last_frame_ = steady_clock::now();
      co_return decode_frame(**body);
    }
    if (decoder_.mid_frame() && !frame_began_) frame_began_ = steady_clock::now();
    // TLS may still have to read what lies in the chunk.
    const bool chunk_is_free = tls_ == nullptr || !tls_->has_bytes();
    if (chunk_is_free && decoder_.buffered_bytes() > kSmallChunkBytes &&
        chunk_.size() < kLargeChunkBytes) {
      chunk_.resize(kLargeChunkBytes);
    }
    watch_reads();
    const auto received = co_await receive();
    if (closed_) co_return fail(close_reason_);
    if (!received) co_return failed(received.error());
  }
}

Result<void> Connection::send(const proto::Frame& frame) {
  TRY(std::string bytes, encode_frame(frame));
  if (closed_) return {};
  set_queued(queued_bytes_ + bytes.size());
  // The front is being written; the frames behind it may still be joined.
  if (queue_.size() > 1 && queue_.back().size() + bytes.size() <= kJoinWritesBytes) {
    queue_.back() += bytes;
  } else {
    queue_.push_back(std::move(bytes));
  }
  if (!writing_) write_next();
  return {};
}

void Connection::write_next() {
  if (encrypted_bytes_ == 0) write_deadline_ = steady_clock::now() + kFrameDeadline;
  asio::const_buffer bytes = asio::buffer(queue_.front());
  if (tls_ != nullptr) {
    const auto piece = std::string_view(queue_.front()).substr(encrypted_bytes_, kRecordBytes);
    if (const auto written = tls_->write(piece); !written) return close(written.error());
    encrypted_bytes_ += piece.size();
    tls_->give_to_network(records_);
    bytes = asio::buffer(records_);
  }
  writing_ = true;
  watch_writes();
  auto on_end = [self = shared_from_this()](const boost::system::error_code& error, std::size_t) {
    self->on_written(error);
  };
  asio::async_write(socket_, bytes, std::move(on_end));
}

void Connection::on_written(const boost::system::error_code& error) {
  writing_ = false;
  if (closed_) {
    // Kept until now, because the write used the front.
    queue_.clear();
    return;
  }
  if (error) {
    // In a handshake the peer may have sent the reason before it closed. The reader finds the
    // reason or the end.
    if (!handshake_deadline_) close(socket_error(error, "write"));
    return;
  }
  if (tls_ != nullptr && encrypted_bytes_ < queue_.front().size()) return write_next();
  encrypted_bytes_ = 0;
  set_queued(queued_bytes_ - queue_.front().size());
  queue_.pop_front();
  if (queued_bytes_ < kHighWaterBytes) wake_waiters();
  if (!queue_.empty()) write_next();
}

void Connection::set_queued(std::size_t bytes) {
  *queued_of_peer_ += bytes;
  *queued_of_peer_ -= queued_bytes_;
  queued_bytes_ = bytes;
}

void Connection::count_queue_in(std::shared_ptr<std::size_t> sum) {
  *sum += queued_bytes_;
  *queued_of_peer_ -= queued_bytes_;
  queued_of_peer_ = std::move(sum);
}

void Connection::wake_waiters() {
  for (auto* waiter : waiters_) waiter->cancel();
}

async::Task<void> Connection::sleep_until_woken(TimePoint deadline) {
  const auto self = shared_from_this();
  asio::steady_timer timer(socket_.get_executor(), deadline);
  waiters_.push_back(&timer);
  struct Leave {
    Connection* connection;
    asio::steady_timer* timer;
    ~Leave() { std::erase(connection->waiters_, timer); }
  } leave{this, &timer};
  co_await timer.async_wait(kUseTuple);
}

async::Task<bool> Connection::wait_for_room(TimePoint deadline) {
  const auto self = shared_from_this();
  while (!closed_ && queued_bytes_ >= kHighWaterBytes) {
    if (steady_clock::now() >= deadline) co_return false;
    co_await sleep_until_woken(deadline);
  }
  co_return !closed_;
}

async::Task<void> Connection::refuse(Error error) {
  const auto self = shared_from_this();
  if (!tls_failed_) (void)send(refusal_frame(error));
  const TimePoint deadline = steady_clock::now() + kRefusalLinger;
  set_handshake_deadline(deadline);
  while (!closed_ && !queue_.empty()) co_await sleep_until_woken(deadline);
  boost::system::error_code ignored;
  if (!closed_) socket_.shutdown(Socket::shutdown_send, ignored);
  // Closing with unread bytes would reset the connection under the refusal.
  while (!closed_) {
    const auto [failure, size] = co_await socket_.async_read_some(asio::buffer(chunk_), kUseTuple);
    if (failure) break;
  }
  close(std::move(error));
}

void Connection::refuse_now(const Error& error) {
  // A caller that begins TLS reads a plain refusal, too. Within TLS nothing can be sent at once.
  if (tls_ != nullptr) return close(error);
  if (const auto bytes = encode_frame(refusal_frame(error))) {
    boost::system::error_code ignored;
    socket_.non_blocking(true, ignored);
    socket_.send(asio::buffer(*bytes), 0, ignored);
    socket_.shutdown(Socket::shutdown_send, ignored);
  }
  close(error);
}

void Connection::close(Error reason) {
  if (closed_) return;
  closed_ = true;
  close_reason_ = std::move(reason);
  boost::system::error_code ignored;
  socket_.close(ignored);
  read_watch_.cancel();
  write_watch_.cancel();
  proof_watch_.cancel();
  if (!writing_) queue_.clear();
  set_queued(0);
  // It may own the owner of this connection.
  busy_ = {};
  wake_waiters();
}

void Connection::set_handshake_deadline(std::optional<TimePoint> deadline) {
  handshake_deadline_ = deadline;
  // The watch reads the new deadlines and arms itself again.
  if (read_watch_armed_) read_watch_.cancel();
  watch_reads();
}

void Connection::set_idle_timeout(std::chrono::milliseconds timeout, std::function<bool()> busy) {
  idle_timeout_ = timeout;
  busy_ = std::move(busy);
}

TimePoint Connection::read_deadline() const {
  TimePoint deadline = TimePoint::max();
  if (handshake_deadline_) deadline = std::min(deadline, *handshake_deadline_);
  if (frame_began_) deadline = std::min(deadline, *frame_began_ + kFrameDeadline);
  if (idle_timeout_.count() > 0) deadline = std::min(deadline, last_frame_ + idle_timeout_);
  return deadline;
}

// The timer is armed for the earliest known deadline and checks again when it fires. Most deadlines
// only move later, so frames do not touch the timer.
void Connection::watch_reads() {
  if (closed_) return;
  const TimePoint deadline = read_deadline();
  if (deadline == TimePoint::max()) return;
  if (read_watch_armed_) {
    if (read_watch_.expiry() > deadline) read_watch_.cancel();
    return;
  }
  read_watch_armed_ = true;
  read_watch_.expires_at(deadline);
  read_watch_.async_wait([self = shared_from_this()](const boost::system::error_code&) {
    self->read_watch_armed_ = false;
    self->on_read_watch();
  });
}

void Connection::on_read_watch() {
  if (closed_) return;
  const TimePoint now = steady_clock::now();
  const TimePoint deadline = read_deadline();
  if (now < deadline) return watch_reads();
  if (const auto late = now - deadline; late > kOwnPause) {
    const auto moved = late + kOwnPause;
    if (handshake_deadline_) *handshake_deadline_ += moved;
    if (frame_began_) *frame_began_ += moved;
    last_frame_ += moved;
    return watch_reads();
  }
  if (handshake_deadline_ && now >= *handshake_deadline_) {
    return close({ErrorCode::kTimeout, "the peer did not finish its hello in time"});
  }
  if (frame_began_ && now >= *frame_began_ + kFrameDeadline) {
    return close({ErrorCode::kTimeout, fmt::format("the peer did not finish a frame within {} ms",
                                                   kFrameDeadline.count())});
  }
  if (busy_ && busy_()) {
    last_frame_ = now;
    return watch_reads();
  }
  close({ErrorCode::kTimeout, fmt::format("idle for {} ms", idle_timeout_.count())});
}

void Connection::watch_writes() {
  if (closed_ || write_watch_armed_) return;
  write_watch_armed_ = true;
  write_watch_.expires_at(write_deadline_);
  write_watch_.async_wait([self = shared_from_this()](const boost::system::error_code&) {
    self->write_watch_armed_ = false;
    self->on_write_watch();
  });
}

void Connection::on_write_watch() {
  if (closed_ || !writing_) return;
  const TimePoint now = steady_clock::now();
  if (now < write_deadline_) return watch_writes();
  if (const auto late = now - write_deadline_; late > kOwnPause) {
    write_deadline_ += late + kOwnPause;
    return watch_writes();
  }
  close({ErrorCode::kTimeout,
         fmt::format("the peer did not read a frame within {} ms", kFrameDeadline.count())});
}

}  // namespace rekindle::rpc
