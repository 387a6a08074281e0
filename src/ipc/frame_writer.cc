#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <span>

#include <sys/socket.h>

#include "src/ipc/frame.h"
#include "src/ipc/frame_header.h"

namespace rekindle::ipc {

namespace {

void append_big_endian(std::string& out, std::uint32_t value, int bytes) {
  for (int shift = 8 * (bytes - 1); shift >= 0; shift -= 8) {
    out += static_cast<char>(value >> shift & 0xff);
  }
}

// Sends bytes and, with the first of them, descriptors. What sendmsg() returns.
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

Result<void> FrameWriter::push(std::string body, std::vector<UniqueFd> descriptors) {
  if (body.empty() || body.size() > kMaxSpilledBytes) {
    return fail(ErrorCode::kInvalid, "a message of {} bytes does not fit a frame of {}",
                body.size(), kMaxSpilledBytes);
  }
  if (descriptors.size() > kMaxFrameDescriptors) {
    return fail(ErrorCode::kInvalid, "a message with {} descriptors, at most {} fit",
                descriptors.size(), kMaxFrameDescriptors);
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
    if (left > with) bytes = bytes.substr(0, 1);  // the rest goes with the next byte
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

}  // namespace rekindle::ipc
