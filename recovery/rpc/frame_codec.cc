#include "recovery/rpc/frame_codec.h"

#include "recovery/rpc/rpc.h"

namespace rekindle::rpc {

namespace {

// A larger buffer is freed when it is empty.
constexpr std::size_t kKeepBufferBytes = 64u << 10;

std::uint32_t read_big_endian(const char* bytes) {
  std::uint32_t value = 0;
  for (std::size_t i = 0; i < kFrameHeaderBytes; ++i) {
    value = value << 8 | static_cast<std::uint8_t>(bytes[i]);
  }
  return value;
}

}  // namespace

void FrameDecoder::feed(std::string_view bytes) {
  if (consumed_ == buffer_.size()) {
    consumed_ = 0;
    if (buffer_.capacity() > kKeepBufferBytes) {
      std::string().swap(buffer_);
    } else {
      buffer_.clear();
    }
  } else if (consumed_ > buffer_.size() / 2) {
    buffer_.erase(0, consumed_);
    consumed_ = 0;
  }
  buffer_.append(bytes);
}

Result<std::optional<std::string>> FrameDecoder::next() {
  if (buffered_bytes() < kFrameHeaderBytes) return std::nullopt;
  const std::uint32_t length = read_big_endian(buffer_.data() + consumed_);
  if (length == 0) return fail(ErrorCode::kInvalid, "an empty frame");
  if (length > cap_bytes_) {
    return fail(ErrorCode::kInvalid, "a frame of {} bytes is over the cap of {}{}", length,
                cap_bytes_,
                cap_bytes_ <= kMaxHelloFrameBytes ? ": is the other end Rekindle at all?" : "");
  }
  if (length > kSmallFrameBytes && check_large_ && !large_passed_) {
    if (buffered_bytes() - kFrameHeaderBytes < kFrameHeadBytes) return std::nullopt;
    TRY_VOID(
        check_large_({buffer_.data() + consumed_ + kFrameHeaderBytes, kFrameHeadBytes}, length));
    large_passed_ = true;
  }
  if (buffered_bytes() - kFrameHeaderBytes < length) return std::nullopt;
  large_passed_ = false;
  std::string body = buffer_.substr(consumed_ + kFrameHeaderBytes, length);
  consumed_ += kFrameHeaderBytes + length;
  return body;
}

Result<std::string> encode_frame(const proto::Frame& frame) {
  const std::size_t size = frame.ByteSizeLong();
  if (size == 0 || size > kMaxFrameBytes) {
    return fail(ErrorCode::kInvalid, "a message of {} bytes does not fit a frame of {}", size,
                kMaxFrameBytes);
  }
  std::string out;
  out.reserve(kFrameHeaderBytes + size);
  for (int shift = 24; shift >= 0; shift -= 8) out += static_cast<char>(size >> shift & 0xff);
  if (!frame.AppendToString(&out)) return fail(ErrorCode::kInternal, "cannot serialize a frame");
  return out;
}

Result<proto::Frame> decode_frame(std::string_view body) {
  proto::Frame frame;
  if (!frame.ParseFromArray(body.data(), static_cast<int>(body.size()))) {
    return fail(ErrorCode::kInvalid, "a malformed frame of {} bytes", body.size());
  }
  if (frame.kind_case() == proto::Frame::KIND_NOT_SET) {
    return fail(ErrorCode::kInvalid, "a frame of {} bytes without a known kind", body.size());
  }
  return frame;
}

}  // namespace rekindle::rpc
