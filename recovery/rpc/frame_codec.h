#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "proto/frame.pb.h"
#include "src/base/result.h"

// Frames as bytes: a 4-byte big-endian length, then that many bytes of proto::Frame. Pure; one
// decoder belongs to one connection.
namespace rekindle::rpc {

inline constexpr std::size_t kFrameHeaderBytes = 4;
inline constexpr std::uint32_t kMaxHelloFrameBytes = 64u << 10;  // until the hello is accepted

class FrameDecoder {
 public:
  explicit FrameDecoder(std::uint32_t cap_bytes) : cap_bytes_(cap_bytes) {}

  void set_cap(std::uint32_t cap_bytes) { cap_bytes_ = cap_bytes; }
  // Memory grows with the bytes that came, never with the length that a header claims.
  void feed(std::string_view bytes);
  // The body of the next whole frame; nullopt: more bytes are needed. kInvalid for an empty frame
  // or one beyond the cap, as soon as its header is there; the decoder then stays failed.
  Result<std::optional<std::string>> next();
  // Bytes of a frame that has begun and not ended are waiting.
  bool mid_frame() const { return buffer_.size() > consumed_; }
  std::size_t buffered_bytes() const { return buffer_.size() - consumed_; }

 private:
  std::uint32_t cap_bytes_;
  std::string buffer_;
  std::size_t consumed_ = 0;  // of buffer_
};

// kInvalid beyond kMaxFrameBytes.
Result<std::string> encode_frame(const proto::Frame& frame);
// Strict: a frame without a known kind is kInvalid, too.
Result<proto::Frame> decode_frame(std::string_view body);

}  // namespace rekindle::rpc
