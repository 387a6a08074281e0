#include <algorithm>

#include "src/ipc/frame.h"
#include "src/ipc/frame_header.h"

namespace rekindle::ipc {

namespace {

constexpr std::size_t kKeepBufferBytes = 64u << 10;  // a larger buffer is given back when empty

std::uint32_t big_endian(const char* bytes, std::size_t size) {
  std::uint32_t value = 0;
  for (std::size_t i = 0; i < size; ++i) value = value << 8 | static_cast<std::uint8_t>(bytes[i]);
  return value;
}

}  // namespace

struct FrameReader::Header {
  std::uint32_t length = 0;
  std::size_t descriptors = 0;  // the body's memfd included
  bool spilled = false;

  std::size_t stream_bytes() const { return kFrameHeaderBytes + (spilled ? 0 : length); }
};

void FrameReader::feed(std::string_view bytes, std::vector<UniqueFd> descriptors, TimePoint now) {
  if (consumed_ == buffer_.size()) {
    consumed_ = 0;
    if (buffer_.capacity() > kKeepBufferBytes) {
      std::string().swap(buffer_);
    } else {
      buffer_.clear();
    }
    began_ = now;
  } else if (consumed_ > buffer_.size() / 2) {
    buffer_.erase(0, consumed_);
    consumed_ = 0;
  }
  buffer_.append(bytes);
  for (UniqueFd& fd : descriptors) descriptors_.push_back(std::move(fd));
  last_feed_ = now;
}

Result<FrameReader::Header> FrameReader::read_header() const {
  const char* const at = buffer_.data() + consumed_;
  const std::uint32_t flags = big_endian(at + 6, 2);
  Header header{big_endian(at, 4), big_endian(at + 4, 2), (flags & kSpilled) != 0};
  const std::uint32_t cap = header.spilled ? kMaxSpilledBytes : kMaxFrameBytes;
  if ((flags & ~kSpilled) != 0) {
    return fail(ErrorCode::kInvalid, "a frame with unknown flags {:#x}: is the other end Rekindle?",
                flags);
  }
  if (header.length == 0) return fail(ErrorCode::kInvalid, "an empty frame");
  if (header.length > cap) {
    return fail(ErrorCode::kInvalid, "a frame of {} bytes is over the cap of {}", header.length,
                cap);
  }
  if (header.spilled && header.descriptors == 0) {
    return fail(ErrorCode::kInvalid, "a frame of {} bytes without the memfd that should hold them",
                header.length);
  }
  if (header.descriptors > max_descriptors_ + (header.spilled ? 1 : 0)) {
    return fail(ErrorCode::kInvalid, "a frame with {} descriptors, at most {} are expected",
                header.descriptors, max_descriptors_);
  }
  return header;
}

Result<Frame> FrameReader::take(const Header& header) {
  Frame frame;
  if (descriptors_.size() < header.descriptors) {
    return fail(ErrorCode::kInvalid, "a frame declares {} descriptors, {} came", header.descriptors,
                descriptors_.size());
  }
  for (std::size_t i = 0; i < header.descriptors; ++i) {
    frame.descriptors.push_back(std::move(descriptors_.front()));
    descriptors_.pop_front();
  }
  if (header.spilled) {
    TRY(frame.body, read_sealed_memfd(frame.descriptors.front().get(), header.length));
    frame.descriptors.erase(frame.descriptors.begin());
  } else {
    frame.body = buffer_.substr(consumed_ + kFrameHeaderBytes, header.length);
  }
  consumed_ += header.stream_bytes();
  began_ = last_feed_;
  if (buffered() == 0 && !descriptors_.empty()) {
    return fail(ErrorCode::kInvalid, "{} descriptors came that no frame declares",
                descriptors_.size());
  }
  return frame;
}

Result<std::optional<Frame>> FrameReader::next() {
  if (failed_) return fail(*failed_);
  const auto failed = [this](Error error) {
    descriptors_.clear();  // closes them now
    failed_ = error;
    return fail(std::move(error));
  };
  if (buffered() == 0 && !descriptors_.empty()) {
    return failed(Error(ErrorCode::kInvalid, "descriptors came without a frame"));
  }
  if (descriptors_.size() > 2 * (max_descriptors_ + 1)) {
    return failed(Error(ErrorCode::kInvalid,
                        fmt::format("{} descriptors are waiting for a frame, at most {} may come",
                                    descriptors_.size(), max_descriptors_)));
  }
  if (buffered() < kFrameHeaderBytes) return std::nullopt;
  auto header = read_header();
  if (!header) return failed(std::move(header).error());
  if (buffered() < header->stream_bytes()) return std::nullopt;
  auto frame = take(*header);
  if (!frame) return failed(std::move(frame).error());
  return std::optional<Frame>(std::move(*frame));
}

std::optional<TimePoint> FrameReader::deadline() const {
  if (buffered() == 0) return std::nullopt;
  return began_ + kFrameDeadline;
}

}  // namespace rekindle::ipc
