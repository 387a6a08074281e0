#pragma once

#include <chrono>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/generic/stream_protocol.hpp>
#include <boost/asio/steady_timer.hpp>

#include "recovery/rpc/frame_codec.h"
#include "recovery/rpc/rpc.h"

namespace rekindle::rpc {

using Socket = boost::asio::generic::stream_protocol::socket;
class TlsSession;
class Credentials;

// One framed connection, either end. Everything happens on the executor's one thread. One coroutine
// reads at a time. Any number of send() calls write, in their order. Deadlines bound a frame that
// has begun in either direction, the handshake as a whole, and idleness.
class Connection : public std::enable_shared_from_this<Connection> {
 public:
  // Of whole frames that wait to be written. Above it readers of requests pause and callers wait.
  static constexpr std::size_t kHighWaterBytes = 32u << 20;
  // Above it events of streaming calls are dropped.
  static constexpr std::size_t kEventDropBytes = 256u << 10;

  static std::shared_ptr<Connection> create(Socket socket);
  ~Connection();

  // A caller begins TLS. kDenied: the ends do not accept each other. met_plain_peer(): the server
  // speaks without TLS; its refusal may be read.
  async::Task<Result<void>> connect_tls(std::shared_ptr<Credentials> credentials, std::string host);
  bool met_plain_peer() const { return met_plain_peer_; }
  // A server reads the first bytes: does the caller begin TLS?
  async::Task<Result<bool>> sees_tls();
  // After sees_tls() was true. kDenied as above.
  async::Task<Result<void>> accept_tls(std::shared_ptr<Credentials> credentials);
  // Fills in what TLS has proven about the peer. Without TLS nothing.
  Result<void> prove(Peer& peer) const;
  // Ties a signature to this TLS connection; "" without TLS.
  Result<std::string> channel() const;

  // The next frame. kPeerLost: the peer has closed the connection. kTimeout: a deadline has passed;
  // the connection is closed. kInvalid: the bytes are not the protocol; refuse() or close() it.
  async::Task<Result<proto::Frame>> read();
  // Queues the frame. Once the connection is closed it drops the frame; the reader learns why it
  // was closed. kInvalid: too large for a frame.
  Result<void> send(const proto::Frame& frame);
  // Waits until less than the high-water mark is queued; false when the deadline or an end of the
  // connection came first.
  async::Task<bool> wait_for_room(TimePoint deadline);
  // Sends the error to the peer, waits a moment for the peer to close, and closes.
  async::Task<void> refuse(Error error);
  // For connections over the cap: sends the error as far as it fits into the socket's buffer, and
  // closes.
  void refuse_now(const Error& error);
  void close(Error reason);

  // When the whole handshake must have ended. nullopt: it has ended.
  void set_handshake_deadline(std::optional<TimePoint> deadline);
  // Closes the connection after `timeout` without a frame, unless it is busy(). 0: never.
  void set_idle_timeout(std::chrono::milliseconds timeout, std::function<bool()> busy);
  // `check`: see FrameDecoder.
  void raise_frame_cap(FrameDecoder::LargeFrameCheck check = {}) {
    decoder_.set_cap(kMaxFrameBytes);
    decoder_.set_large_frame_check(std::move(check));
  }

  bool is_open() const { return !closed_; }
  const Error& close_reason() const { return close_reason_; }
  std::size_t queued_bytes() const { return queued_bytes_; }
  // Counts what is queued here in `sum`, too, which connections of one peer share.
  void count_queue_in(std::shared_ptr<std::size_t> sum);
  Socket& socket() { return socket_; }
  boost::asio::any_io_executor executor() { return socket_.get_executor(); }

 private:
  explicit Connection(Socket socket);
  // Waits for bytes of the socket; they lie in chunk_. `what`: for the error.
  async::Task<Result<std::string_view>> read_socket(std::string_view what);
  // Brings bytes of the peer to the decoder.
  async::Task<Result<void>> receive();
  // false: TLS needs more bytes of the socket.
  Result<bool> feed_record();
  // `received`: what the peer has sent already.
  async::Task<Result<void>> shake_hands(std::string_view received);
  // Closes the connection when the proof of the peer ends.
  void watch_proof();
  void write_next();
  void on_written(const boost::system::error_code& error);
  void watch_reads();
  void on_read_watch();
  TimePoint read_deadline() const;
  void watch_writes();
  void on_write_watch();
  void wake_waiters();
  void set_queued(std::size_t bytes);
  async::Task<void> sleep_until_woken(TimePoint deadline);
  Failure failed(Error error);

  Socket socket_;
  // nullptr: frames are plain.
  std::unique_ptr<TlsSession> tls_;
  std::shared_ptr<Credentials> credentials_;
  boost::asio::steady_timer proof_watch_;
  // Nothing can be sent on it.
  bool tls_failed_ = false;
  bool met_plain_peer_ = false;
  // The first bytes of a caller that begins TLS, in chunk_.
  std::string_view first_bytes_;
  FrameDecoder decoder_{kMaxHelloFrameBytes};
  std::vector<char> chunk_;
  bool closed_ = false;
  Error close_reason_{ErrorCode::kPeerLost, "connection closed"};

  boost::asio::steady_timer read_watch_;
  bool read_watch_armed_ = false;
  std::optional<TimePoint> handshake_deadline_;
  std::optional<TimePoint> frame_began_;
  TimePoint last_frame_;
  std::chrono::milliseconds idle_timeout_{0};
  std::function<bool()> busy_;

  // The front is being written while `writing_` is set.
  std::deque<std::string> queue_;
  std::size_t queued_bytes_ = 0;
  std::shared_ptr<std::size_t> queued_of_peer_ = std::make_shared<std::size_t>(0);
  // With TLS: how much of the front is encrypted, and the records that are being written.
  std::size_t encrypted_bytes_ = 0;
  std::string records_;
  bool writing_ = false;
  // Of the front of queue_.
  TimePoint write_deadline_;
  boost::asio::steady_timer write_watch_;
  bool write_watch_armed_ = false;
  // Wait for room in the queue; cancel() wakes them.
  std::vector<boost::asio::steady_timer*> waiters_;
};

// Small frames go out at once. The kernel notices within about 25 s that a peer has vanished;
// heartbeats and the deadlines of calls notice earlier where somebody waits.
void set_tcp_options(Socket& socket);

// "connection reset", "connection refused", … as one of our codes.
Error socket_error(const boost::system::error_code& error, std::string_view what);

}  // namespace rekindle::rpc
