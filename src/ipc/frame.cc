#include "src/ipc/frame.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <span>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

namespace rekindle::ipc {

namespace {

// Flag of a frame whose body is in the first descriptor.
constexpr std::uint32_t kSpilled = 1;
// A larger buffer is freed when it is empty.
constexpr std::size_t kKeepBufferBytes = 64u << 10;

std::uint32_t big_endian(const char* bytes, std::size_t size) {
  std::uint32_t value = 0;
  for (std::size_t i = 0; i < size; ++i) value = value << 8 | static_cast<std::uint8_t>(bytes[i]);
  return value;
}

void append_big_endian(std::string& out, std::uint32_t value, int bytes) {
  for (int shift = 8 * (bytes - 1); shift >= 0; shift -= 8) {
    out += static_cast<char>(value >> shift & 0xff);
  }
}

// Sends bytes and, with the first byte, descriptors. Returns the result of sendmsg().
ssize_t send_with(int socket_fd, std::string_view bytes, std::span<const UniqueFd> descriptors) {
  iovec part{const_cast<char*>(bytes.data()), bytes.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kMaxDescriptorsAtOnce * sizeof(int))> control{};
  if (!descriptors.empty()) {
    message.msg_control = control.data();
    message.msg_controllen = CMSG_SPACE(descriptors.size() * sizeof(int));
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(descriptors.size() * sizeof(int));
    auto* out = CMSG_DATA(header);
    for (const UniqueFd& fd : descriptors) {
      const int number = fd.get();
      std::memcpy(out, &number, sizeof number);
      out += sizeof number;
    }
  }
  ssize_t sent;
  do {
    sent = ::sendmsg(socket_fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  } while (sent < 0 && errno == EINTR);
  return sent;
}

Failure send_failure(int error_number) {
  if (error_number == EPIPE || error_number == ECONNRESET || error_number == ENOTCONN) {
    return fail(ErrorCode::kPeerLost, "the other end has closed the connection");
  }
  if (error_number == ETOOMANYREFS) {
    return fail(ErrorCode::kExhausted,
                "as many descriptors are under way as this process may open; raise ulimit -n");
  }
  return fail_errno(error_number, "send on a unix socket");
}

}  // namespace

struct FrameReader::Header {
  std::uint32_t length = 0;
  // Includes the memfd of the body.
  std::size_t descriptors = 0;
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
    // Closes them at once.
    descriptors_.clear();
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

Result<void> FrameWriter::push(std::string body, std::vector<UniqueFd> descriptors) {
  if (body.empty() || body.size() > kMaxSpilledBytes) {
    return fail(ErrorCode::kInvalid, "a message of {} bytes does not fit a frame of {}",
                body.size(), kMaxSpilledBytes);
  }
  if (descriptors.size() > kMaxFrameDescriptors) {
    return fail(ErrorCode::kInvalid, "a message with {} descriptors, at most {} fit",
                descriptors.size(), kMaxFrameDescriptors);
  }
  // The kernel would refuse it in the middle of the frame.
  if (!std::ranges::all_of(descriptors, [](const UniqueFd& fd) { return static_cast<bool>(fd); })) {
    return fail(ErrorCode::kInvalid, "a message with an empty descriptor");
  }
  const auto length = static_cast<std::uint32_t>(body.size());
  const bool spilled = length > kMaxFrameBytes;
  if (spilled) {
    TRY(UniqueFd memory, sealed_memfd(body));
    descriptors.insert(descriptors.begin(), std::move(memory));
    body.clear();
  }
  Outgoing out;
  out.bytes.reserve(kFrameHeaderBytes + body.size());
  append_big_endian(out.bytes, length, 4);
  append_big_endian(out.bytes, static_cast<std::uint32_t>(descriptors.size()), 2);
  append_big_endian(out.bytes, spilled ? kSpilled : 0, 2);
  out.bytes += body;
  out.descriptors = std::move(descriptors);
  queued_bytes_ += out.bytes.size();
  frames_.push_back(std::move(out));
  return {};
}

Result<void> FrameWriter::send_some(int socket_fd, TimePoint now) {
  while (!frames_.empty()) {
    Outgoing& frame = frames_.front();
    const std::size_t left = frame.descriptors.size() - frame.descriptors_sent;
    const std::size_t with = std::min(left, kMaxDescriptorsAtOnce);
    std::string_view bytes = std::string_view(frame.bytes).substr(frame.sent);
    // The other descriptors go with the next bytes.
    if (left > with) bytes = bytes.substr(0, 1);
    const ssize_t sent = send_with(
        socket_fd, bytes, std::span(frame.descriptors).subspan(frame.descriptors_sent, with));
    if (sent < 0) {
      if (errno == EAGAIN || errno == EWOULDBLOCK) return {};
      return send_failure(errno);
    }
    if (frame.sent == 0) frame.began = now;
    frame.sent += static_cast<std::size_t>(sent);
    frame.descriptors_sent += with;
    queued_bytes_ -= static_cast<std::size_t>(sent);
    if (frame.sent == frame.bytes.size()) frames_.pop_front();
  }
  return {};
}

std::optional<TimePoint> FrameWriter::deadline() const {
  if (frames_.empty() || frames_.front().sent == 0) return std::nullopt;
  return frames_.front().began + kFrameDeadline;
}

Result<UniqueFd> sealed_memfd(std::string_view bytes) {
  UniqueFd fd(::memfd_create("rekindle-frame", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) return fail_errno(errno, "create a memfd");
  for (std::string_view left = bytes; !left.empty();) {
    const ssize_t written = ::write(fd.get(), left.data(), left.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return fail_errno(errno, "write a memfd");
    left.remove_prefix(static_cast<std::size_t>(written));
  }
  constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL;
  if (::fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0) return fail_errno(errno, "seal a memfd");
  return fd;
}

Result<std::string> read_sealed_memfd(int fd, std::size_t size) {
  // Only memory can be sealed. This refuses pipes and files of a stuck file system, on which read()
  // would wait.
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_WRITE) == 0 || (seals & F_SEAL_SHRINK) == 0) {
    return fail(ErrorCode::kInvalid, "the descriptor of a large frame is not a sealed memfd");
  }
  struct stat info {};
  if (::fstat(fd, &info) != 0) return fail_errno(errno, "stat the memfd of a large frame");
  if (info.st_size < 0 || static_cast<std::uint64_t>(info.st_size) != size) {
    return fail(ErrorCode::kInvalid, "a large frame of {} bytes lies in a memfd of {}", size,
                info.st_size);
  }
  std::string bytes(size, '\0');
  for (std::size_t at = 0; at < size;) {
    const ssize_t got = ::pread(fd, bytes.data() + at, size - at, static_cast<off_t>(at));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return fail_errno(got == 0 ? EIO : errno, "read the memfd of a large frame");
    at += static_cast<std::size_t>(got);
  }
  return bytes;
}

}  // namespace rekindle::ipc
