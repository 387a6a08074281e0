#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "src/base/clock.h"
#include "src/base/result.h"
#include "src/base/unique_fd.h"

// Frames of the worker's channel. On the wire, big-endian:
//   u32 length | u16 descriptors | u16 flags | `length` bytes of body
// The descriptors come by SCM_RIGHTS with the header's first byte; beyond what the kernel takes at
// once, with its second, third, … byte. A body over 1 MiB is not in the stream (flag kSpilled): the
// first descriptor is a sealed memfd of `length` bytes that holds it.
// Reader and writer never wait; time is an argument. Each belongs to one connection and one thread.
namespace rekindle::ipc {

inline constexpr std::size_t kFrameHeaderBytes = 8;
inline constexpr std::uint32_t kMaxFrameBytes = 1u << 20;     // of a body in the stream
inline constexpr std::uint32_t kMaxSpilledBytes = 64u << 20;  // of one in a memfd
inline constexpr std::size_t kMaxFrameDescriptors = 1024;     // without the memfd of the body
inline constexpr std::size_t kMaxDescriptorsAtOnce = 253;     // SCM_MAX_FD of the kernel
inline constexpr std::chrono::seconds kFrameDeadline{5};      // who begins a frame ends it by then

struct Frame {
  std::string body;  // never empty
  std::vector<UniqueFd> descriptors;
};

class FrameReader {
 public:
  // `max_descriptors` of one frame: 0 where the other end has none to send.
  explicit FrameReader(std::size_t max_descriptors) : max_descriptors_(max_descriptors) {}

  // What one recvmsg() brought; take all frames with next() before feeding more. Memory grows with
  // the bytes that came, never with what a header claims.
  void feed(std::string_view bytes, std::vector<UniqueFd> descriptors, TimePoint now);
  // The next whole frame; nullopt: more bytes are needed. kInvalid for an empty, oversize or
  // unknown frame as soon as its header is there, and for descriptors that no frame declares; the
  // reader then stays failed and the connection should be closed.
  Result<std::optional<Frame>> next();
  // By when the frame that has begun must have ended; nullopt: none has begun.
  std::optional<TimePoint> deadline() const;

 private:
  struct Header;
  Result<Header> read_header() const;
  Result<Frame> take(const Header& header);
  std::size_t buffered() const { return buffer_.size() - consumed_; }

  std::size_t max_descriptors_;
  std::string buffer_;
  std::size_t consumed_ = 0;  // of buffer_
  std::deque<UniqueFd> descriptors_;
  TimePoint last_feed_{};
  TimePoint began_{};  // the frame at the front of buffer_
  std::optional<Error> failed_;
};

class FrameWriter {
 public:
  // Appends a frame; its descriptors are closed once they are sent. kInvalid: an empty body, or
  // more than a frame can hold. kExhausted: no memfd for a large body.
  Result<void> push(std::string body, std::vector<UniqueFd> descriptors = {});
  // Sends what the non-blocking socket takes. kPeerLost: the other end has gone.
  Result<void> send_some(int socket_fd, TimePoint now);
  bool empty() const { return frames_.empty(); }
  std::size_t queued_bytes() const { return queued_bytes_; }
  // By when the frame that was begun must be out; nullopt: none was begun.
  std::optional<TimePoint> deadline() const;

 private:
  struct Outgoing {
    std::string bytes;  // header and body
    std::size_t sent = 0;
    std::vector<UniqueFd> descriptors;
    std::size_t descriptors_sent = 0;
    TimePoint began{};
  };
  std::deque<Outgoing> frames_;
  std::size_t queued_bytes_ = 0;
};

// A memfd with these bytes, sealed against every change: what both ends may read without trust.
Result<UniqueFd> sealed_memfd(std::string_view bytes);
// Reads `size` bytes of such a memfd. kInvalid when it is not sealed, or has another size.
Result<std::string> read_sealed_memfd(int fd, std::size_t size);

}  // namespace rekindle::ipc
