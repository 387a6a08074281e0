#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>

#include "src/async/task.h"
#include "src/ipc/channel.h"

namespace rekindle::ipc {

struct FramedSocketOptions {
  // A socket whose other end leaves more than this unread is closed with `not_reading`.
  std::size_t max_queued_bytes = 8u << 20;
  // Why run() returns when the other end closes the stream.
  Error at_end{ErrorCode::kPeerLost, "closed its socket"};
  Error not_reading{ErrorCode::kTimeout, "does not read what it is sent"};
};

// A Channel that an Asio executor drives. It never waits for the other end to read. Always in a
// shared_ptr; used on its executor only.
class FramedSocket : public std::enable_shared_from_this<FramedSocket> {
 public:
  // An error closes the socket with that error.
  using OnFrame = std::function<Result<void>(Frame frame)>;

  FramedSocket(const boost::asio::any_io_executor& executor, Channel channel,
               FramedSocketOptions options);
  ~FramedSocket();
  FramedSocket(const FramedSocket&) = delete;
  FramedSocket& operator=(const FramedSocket&) = delete;

  // Reads until the stream ends or close() is called, and returns the reason.
  async::Task<Error> run(OnFrame on_frame);
  // Fails when this process cannot send the frame (no descriptors, no memory); the socket stays
  // open. A closed socket drops the frame.
  Result<void> send(std::string body, std::vector<UniqueFd> descriptors = {});
  // The first reason stays.
  void close(Error why);
  // Closes when a frame was begun in either direction and did not end in time.
  void check(TimePoint now);

  bool closed() const { return closed_; }
  // When bytes last came.
  TimePoint last_heard() const { return last_heard_; }
  // This process did not run for so long, and could not read.
  void excuse(Duration pause) { last_heard_ += pause; }

 private:
  Result<Received> read_frames(const OnFrame& on_frame);
  void flush();

  // Borrows the channel's descriptor.
  boost::asio::posix::stream_descriptor descriptor_;
  Channel channel_;
  const FramedSocketOptions options_;
  TimePoint last_heard_;
  bool writing_ = false;
  bool closed_ = false;
  Error why_;
};

}  // namespace rekindle::ipc
