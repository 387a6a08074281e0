#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "proto/frame.pb.h"
#include "src/base/result.h"

// Frames as bytes: a 4-byte big-endian length, then that many bytes of proto::Frame. Pure; one
// decoder belongs to one connection.
namespace rekindle::rpc {

inline constexpr std::size_t kFrameHeaderBytes = 4;
// Until the hello is accepted.
inline constexpr std::uint32_t kMaxHelloFrameBytes = 64u << 10;

class FrameDecoder {
 public:
  explicit FrameDecoder(std::uint32_t cap_bytes) : cap_bytes_(cap_bytes) {}

  void set_cap(std::uint32_t cap_bytes) { cap_bytes_ = cap_bytes; }
  // Sees the first kFrameHeadBytes of a frame beyond kSmallFrameBytes, and its length, before the
  // rest is buffered. An error of it fails the decoder.
  using LargeFrameCheck =
      std::function<Result<void>(std::string_view head, std::uint32_t frame_bytes)>;
  void set_large_frame_check(LargeFrameCheck check) { check_large_ = std::move(check); }
  // Memory grows with the received bytes, never with the length in a header.
  void feed(std::string_view bytes);
  // The body of the next whole frame; nullopt: more bytes are needed. kInvalid: the frame is empty
  // or beyond the cap, which its header shows; the decoder stays failed.
  Result<std::optional<std::string>> next();
  // A part of a frame is waiting for the rest.
  bool mid_frame() const { return buffer_.size() > consumed_; }
  std::size_t buffered_bytes() const { return buffer_.size() - consumed_; }

 private:
  std::uint32_t cap_bytes_;
  LargeFrameCheck check_large_;
  // check_large_ has passed the frame that is being received.
  bool large_passed_ = false;
  std::string buffer_;
  // Of buffer_.
  std::size_t consumed_ = 0;
};

// kInvalid beyond kMaxFrameBytes.
Result<std::string> encode_frame(const proto::Frame& frame);
// kInvalid also for a frame without a known kind.
Result<proto::Frame> decode_frame(std::string_view body);

}  // namespace rekindle::rpc
