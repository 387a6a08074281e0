#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "src/base/clock.h"
#include "src/base/result.h"
#include "src/base/unique_fd.h"
#include "src/ipc/frame.h"

// One connected unix socket that carries frames. An event loop calls `receive_frames` when the
// socket is readable, `push` and `send_some`, and `check_deadline` at `deadline`. Other callers use
// `send` and `receive`, which wait at most until their deadline. One thread at a time.
namespace rekindle::ipc {

enum class Received { kSomething, kNothing, kEnd };

class Channel {
 public:
  // Makes the socket non-blocking. `max_descriptors` is as in FrameReader.
  static Result<Channel> adopt(UniqueFd socket, std::size_t max_descriptors);

  int fd() const { return socket_.get(); }

  // Calls recvmsg() once. kPeerLost: the connection was reset. kExhausted: this process has no room
  // for the descriptors that came.
  Result<Received> receive_some(TimePoint now);
  Result<std::optional<Frame>> next() { return reader_.next(); }
  // Reads a bounded number of times, until nothing is left, and passes each whole frame to
  // `on_frame`. Returns kEnd after the last frame of a stream that has ended, kSomething if bytes
  // came. Also fails with the errors of receive_some(), next() and `on_frame`.
  Result<Received> receive_frames(TimePoint now,
                                  const std::function<Result<void>(Frame frame)>& on_frame);
  Result<void> push(std::string body, std::vector<UniqueFd> descriptors = {}) {
    return writer_.push(std::move(body), std::move(descriptors));
  }
  Result<void> send_some(TimePoint now) { return writer_.send_some(socket_.get(), now); }
  bool wants_to_send() const { return !writer_.empty(); }
  std::size_t queued_bytes() const { return writer_.queued_bytes(); }
  // The earliest deadline of the frames that were begun in either direction.
  std::optional<TimePoint> deadline() const;
  // kPeerLost when that deadline has passed.
  Result<void> check_deadline(TimePoint now) const;
  // The same for the frame that the other end has begun.
  std::optional<TimePoint> receive_deadline() const { return reader_.deadline(); }
  Result<void> check_receive_deadline(TimePoint now) const;

  // After kTimeout the channel may be in the middle of a frame and is of no further use.
  Result<void> send(std::string body, std::vector<UniqueFd> descriptors, TimePoint deadline);
  // kTimeout: no whole frame has come; the caller may ask again. kPeerLost: the stream has ended.
  Result<Frame> receive(TimePoint deadline);

 private:
  Channel(UniqueFd socket, std::size_t max_descriptors)
      : socket_(std::move(socket)), reader_(max_descriptors) {}

  UniqueFd socket_;
  FrameReader reader_;
  FrameWriter writer_;
};

// Polls one descriptor until `deadline`, also across EINTR. False: the time is over.
Result<bool> wait_for(int fd, short events, TimePoint deadline);
// A timeout for poll(): never negative, rounded up, at most an hour.
int poll_timeout_ms(TimePoint now, TimePoint deadline);

}  // namespace rekindle::ipc
