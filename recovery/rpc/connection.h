#pragma once

#include <chrono>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/generic/stream_protocol.hpp>
#include <boost/asio/steady_timer.hpp>

#include "recovery/rpc/frame_codec.h"
#include "recovery/rpc/rpc.h"

namespace rekindle::rpc {

using Socket = boost::asio::generic::stream_protocol::socket;

// One framed connection, either end. Everything happens on the executor's one thread. Reading: one
// coroutine at a time. Writing: any number of send() calls, written in order. Deadlines: a frame
// that has begun (either direction), the handshake as a whole, idleness.
class Connection : public std::enable_shared_from_this<Connection> {
 public:
  // Whole frames that wait to be written; above it, readers of requests pause and callers wait.
  static constexpr std::size_t kHighWaterBytes = 32u << 20;
  // Above it events of streaming calls are dropped.
  static constexpr std::size_t kEventDropBytes = 256u << 10;

  static std::shared_ptr<Connection> create(Socket socket);
  ~Connection();

  // The next frame. kPeerLost when the peer closed, kTimeout when a deadline passed: the connection
  // is closed then. kInvalid for bytes that are not the protocol: refuse() or close() it.
  async::Task<Result<proto::Frame>> read();
  // Queues; drops silently once closed (the reader learns why). kInvalid: too large for a frame.
  Result<void> send(const proto::Frame& frame);
  // Waits until less than the high-water mark is queued; false when the deadline or an end of the
  // connection came first.
  async::Task<bool> wait_for_room(TimePoint deadline);
  // Tells the peer why, lets the bytes go out, waits a moment for its end, closes.
  async::Task<void> refuse(Error error);
  // Sends what fits the socket buffer at once, then closes: for connections over the cap.
  void refuse_now(const Error& error);
  void close(Error reason);

  // The whole handshake must end by then; nullopt: it has.
  void set_handshake_deadline(std::optional<TimePoint> deadline);
  // Without a frame for `timeout` and not busy() the connection is closed; 0 = never.
  void set_idle_timeout(std::chrono::milliseconds timeout, std::function<bool()> busy);
  void raise_frame_cap() { decoder_.set_cap(kMaxFrameBytes); }

  bool is_open() const { return !closed_; }
  const Error& close_reason() const { return close_reason_; }
  std::size_t queued_bytes() const { return queued_bytes_; }
  Socket& socket() { return socket_; }
  boost::asio::any_io_executor executor() { return socket_.get_executor(); }

 private:
  explicit Connection(Socket socket);
  void write_next();
  void on_written(const boost::system::error_code& error);
  void watch_reads();
  void on_read_watch();
  TimePoint read_deadline() const;
  void watch_writes();
  void on_write_watch();
  void wake_waiters();
  async::Task<void> sleep_until_woken(TimePoint deadline);
  Failure failed(Error error);

  Socket socket_;
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

  std::deque<std::string> queue_;  // front: being written when writing_
  std::size_t queued_bytes_ = 0;
  bool writing_ = false;
  TimePoint write_deadline_;  // of the front of queue_
  boost::asio::steady_timer write_watch_;
  bool write_watch_armed_ = false;
  std::vector<boost::asio::steady_timer*> waiters_;  // for room in the queue; woken by cancel()
};

// "connection reset", "connection refused", … as one of our codes.
Error socket_error(const boost::system::error_code& error, std::string_view what);

}  // namespace rekindle::rpc
