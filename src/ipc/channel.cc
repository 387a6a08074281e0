#include "src/ipc/channel.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>

namespace rekindle::ipc {

namespace {

constexpr std::size_t kReadBytes = 64u << 10;
// One connection does not starve the others of its thread.
constexpr int kReadsAtOnce = 16;

std::vector<UniqueFd> descriptors_of(msghdr& message) {
  std::vector<UniqueFd> out;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int number = -1;
      std::memcpy(&number, CMSG_DATA(header) + i * sizeof(int), sizeof number);
      out.emplace_back(number);
    }
  }
  return out;
}

}  // namespace

Result<Channel> Channel::adopt(UniqueFd socket, std::size_t max_descriptors) {
  const int flags = ::fcntl(socket.get(), F_GETFL);
  if (flags < 0 || ::fcntl(socket.get(), F_SETFL, flags | O_NONBLOCK) != 0) {
    return fail_errno(errno, "make a unix socket non-blocking");
  }
  return Channel(std::move(socket), max_descriptors);
}

Result<Received> Channel::receive_some(TimePoint now) {
  std::array<char, kReadBytes> bytes;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kMaxDescriptorsAtOnce * sizeof(int))> control;
  iovec part{bytes.data(), bytes.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  ssize_t got;
  do {
    got = ::recvmsg(socket_.get(), &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  } while (got < 0 && errno == EINTR);
  if (got < 0) {
    if (errno == EAGAIN || errno == EWOULDBLOCK) return Received::kNothing;
    if (errno == ECONNRESET) return fail(ErrorCode::kPeerLost, "the other end was killed");
    return fail_errno(errno, "receive on a unix socket");
  }
  std::vector<UniqueFd> descriptors = descriptors_of(message);
  if ((message.msg_flags & MSG_CTRUNC) != 0) {
    return fail(
        ErrorCode::kExhausted,
        "descriptors were lost on a unix socket: this process may open no more (ulimit -n)");
  }
  if (got == 0) return Received::kEnd;
  reader_.feed({bytes.data(), static_cast<std::size_t>(got)}, std::move(descriptors), now);
  return Received::kSomething;
}

Result<Received> Channel::receive_frames(TimePoint now,
                                         const std::function<Result<void>(Frame frame)>& on_frame) {
  Received all = Received::kNothing;
  for (int i = 0; i < kReadsAtOnce; ++i) {
    TRY(const Received received, receive_some(now));
    if (received == Received::kNothing) break;
    all = received;
    if (received == Received::kEnd) break;
    while (true) {
      TRY(auto frame, next());
      if (!frame) break;
      TRY_VOID(on_frame(std::move(*frame)));
    }
  }
  return all;
}

std::optional<TimePoint> Channel::deadline() const {
  const auto in = reader_.deadline();
  const auto out = writer_.deadline();
  if (in && out) return std::min(*in, *out);
  return in ? in : out;
}

Result<void> Channel::check_receive_deadline(TimePoint now) const {
  if (const auto in = reader_.deadline(); in && now >= *in) {
    return fail(ErrorCode::kPeerLost, "the other end began a frame and did not end it within {} s",
                kFrameDeadline.count());
  }
  return {};
}

Result<void> Channel::check_deadline(TimePoint now) const {
  TRY_VOID(check_receive_deadline(now));
  if (const auto out = writer_.deadline(); out && now >= *out) {
    return fail(ErrorCode::kPeerLost, "the other end did not take a frame within {} s",
                kFrameDeadline.count());
  }
  return {};
}

Result<void> Channel::send(std::string body, std::vector<UniqueFd> descriptors,
                           TimePoint deadline) {
  TRY_VOID(push(std::move(body), std::move(descriptors)));
  while (true) {
    TRY_VOID(send_some(SteadyClock().now()));
    if (!wants_to_send()) return {};
    const TimePoint until = std::min(deadline, writer_.deadline().value_or(deadline));
    TRY(const bool ready, wait_for(fd(), POLLOUT, until));
    if (!ready) return fail(ErrorCode::kTimeout, "the other end does not read");
  }
}

Result<Frame> Channel::receive(TimePoint deadline) {
  while (true) {
    TRY(auto frame, next());
    if (frame) return std::move(*frame);
    const TimePoint until = std::min(deadline, reader_.deadline().value_or(deadline));
    TRY(const bool ready, wait_for(fd(), POLLIN, until));
    const TimePoint now = SteadyClock().now();
    if (!ready) {
      TRY_VOID(check_deadline(now));
      if (now >= deadline) return fail(ErrorCode::kTimeout, "no answer in time");
      continue;
    }
    TRY(const Received received, receive_some(now));
    if (received == Received::kEnd) {
      return fail(ErrorCode::kPeerLost, "the other end has closed the connection");
    }
  }
}

int poll_timeout_ms(TimePoint now, TimePoint deadline) {
  if (deadline <= now) return 0;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - now);
  return static_cast<int>(std::min<std::chrono::milliseconds>(left, std::chrono::hours(1)).count());
}

Result<bool> wait_for(int fd, short events, TimePoint deadline) {
  while (true) {
    const TimePoint now = SteadyClock().now();
    pollfd entry{fd, events, 0};
    const int ready = ::poll(&entry, 1, poll_timeout_ms(now, deadline));
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) return fail_errno(errno, "poll a socket");
    if (SteadyClock().now() >= deadline) return false;
  }
}

}  // namespace rekindle::ipc
