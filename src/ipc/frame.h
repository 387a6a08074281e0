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
// The descriptors come by SCM_RIGHTS with the header's first byte. Descriptors that the kernel does
// not take at once come with its second, third, … byte. A body over 1 MiB is not in the stream
// (flag 1): the first descriptor is a sealed memfd that holds its `length` bytes. Reader and writer
// never wait; time is an argument. Each belongs to one connection and one thread.
namespace rekindle::ipc {

inline constexpr std::size_t kFrameHeaderBytes = 8;
// Of a body in the stream.
inline constexpr std::uint32_t kMaxFrameBytes = 1u << 20;
// Of a body in a memfd.
inline constexpr std::uint32_t kMaxSpilledBytes = 64u << 20;
// Without the memfd of the body.
inline constexpr std::size_t kMaxFrameDescriptors = 1024;
// SCM_MAX_FD of the kernel.
inline constexpr std::size_t kMaxDescriptorsAtOnce = 253;
// A frame that was begun must end within this time.
inline constexpr std::chrono::seconds kFrameDeadline{5};

struct Frame {
  // Never empty.
  std::string body;
  std::vector<UniqueFd> descriptors;
};

class FrameReader {
 public:
  // `max_descriptors` is per frame; 0 where the other end has none to send.
  explicit FrameReader(std::size_t max_descriptors) : max_descriptors_(max_descriptors) {}

  // Adds the bytes and descriptors of one recvmsg(). Take all frames with next() before feeding
  // more. Memory grows with the bytes that came, never with the length that a header claims.
  void feed(std::string_view bytes, std::vector<UniqueFd> descriptors, TimePoint now);
  // The next whole frame; nullopt: more bytes are needed. kInvalid: the frame is empty, too large
  // or unknown, which the header shows, or descriptors came that no frame declares. The reader then
  // stays failed, and the connection should be closed.
  Result<std::optional<Frame>> next();
  // When the frame that was begun must end; nullopt: none was begun.
  std::optional<TimePoint> deadline() const;

 private:
  struct Header;
  Result<Header> read_header() const;
  Result<Frame> take(const Header& header);
  std::size_t buffered() const { return buffer_.size() - consumed_; }

  std::size_t max_descriptors_;
  std::string buffer_;
  // Of buffer_.
  std::size_t consumed_ = 0;
  std::deque<UniqueFd> descriptors_;
  TimePoint last_feed_{};
  // Of the frame at the front of buffer_.
  TimePoint began_{};
  std::optional<Error> failed_;
};

class FrameWriter {
 public:
  // Appends a frame. Its descriptors are closed after they are sent. kInvalid: the body or a
  // descriptor is empty, or the body is too large for a frame. kExhausted: there is no memfd for a
  // large body.
  Result<void> push(std::string body, std::vector<UniqueFd> descriptors = {});
  // Sends as much as the non-blocking socket takes. kPeerLost: the other end is gone.
  Result<void> send_some(int socket_fd, TimePoint now);
  bool empty() const { return frames_.empty(); }
  std::size_t queued_bytes() const { return queued_bytes_; }
  // When the frame that was begun must be sent; nullopt: none was begun.
  std::optional<TimePoint> deadline() const;

 private:
  struct Outgoing {
    // Header and body.
    std::string bytes;
    std::size_t sent = 0;
    std::vector<UniqueFd> descriptors;
    std::size_t descriptors_sent = 0;
    TimePoint began{};
  };
  std::deque<Outgoing> frames_;
  std::size_t queued_bytes_ = 0;
};

// A memfd with these bytes, sealed against every change, so that neither end has to trust the
// other.
Result<UniqueFd> sealed_memfd(std::string_view bytes);
// Reads `size` bytes of such a memfd. kInvalid: it is not sealed, or has another size.
Result<std::string> read_sealed_memfd(int fd, std::size_t size);

}  // namespace rekindle::ipc
