#pragma once

#include <optional>
#include <string>
#include <vector>

#include "src/base/clock.h"
#include "src/base/result.h"
#include "src/base/unique_fd.h"
#include "src/ipc/frame.h"

// One connected unix socket with frames on it. For event loops: `receive_some` when it is readable,
// `next` until nothing is left, `push` and `send_some`, `deadline`. For others: `send` and
// `receive` wait, at most until their deadline. One thread at a time.
namespace rekindle::ipc {

enum class Received { kSomething, kNothing, kEnd };

class Channel {
 public:
  // Makes the socket non-blocking. `max_descriptors`: as FrameReader.
  static Result<Channel> adopt(UniqueFd socket, std::size_t max_descriptors);

  int fd() const { return socket_.get(); }

  // One recvmsg(). kPeerLost: reset; kExhausted: descriptors came and this process has no room.
  Result<Received> receive_some(TimePoint now);
  Result<std::optional<Frame>> next() { return reader_.next(); }
  Result<void> push(std::string body, std::vector<UniqueFd> descriptors = {}) {
    return writer_.push(std::move(body), std::move(descriptors));
  }
  Result<void> send_some(TimePoint now) { return writer_.send_some(socket_.get(), now); }
  bool wants_to_send() const { return !writer_.empty(); }
  std::size_t queued_bytes() const { return writer_.queued_bytes(); }
  // The earlier of what was begun in either direction.
  std::optional<TimePoint> deadline() const;
  // kPeerLost when that deadline has passed.
  Result<void> check_deadline(TimePoint now) const;
  // The same of what the other end has begun only.
  std::optional<TimePoint> receive_deadline() const { return reader_.deadline(); }
  Result<void> check_receive_deadline(TimePoint now) const;

  // kTimeout; then the channel may be amid a frame and is of no further use.
  Result<void> send(std::string body, std::vector<UniqueFd> descriptors, TimePoint deadline);
  // kTimeout: nothing whole has come, ask again. kPeerLost: the end of the stream.
  Result<Frame> receive(TimePoint deadline);

 private:
  Channel(UniqueFd socket, std::size_t max_descriptors)
      : socket_(std::move(socket)), reader_(max_descriptors) {}

  UniqueFd socket_;
  FrameReader reader_;
  FrameWriter writer_;
};

// poll() of one descriptor until `deadline`; false: the time is over. EINTR goes on.
Result<bool> wait_for(int fd, short events, TimePoint deadline);
// For poll(): never negative, rounded up, at most an hour.
int poll_timeout_ms(TimePoint now, TimePoint deadline);

}  // namespace rekindle::ipc
