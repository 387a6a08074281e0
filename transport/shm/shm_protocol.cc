#include "transport/shm/shm_protocol.h"

#include <array>
#include <cerrno>
#include <cstring>

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "transport/shm/shm_transport.h"

namespace rekindle::transport::shm {

Io send_packet(int socket, std::span<const std::byte> packet, int fd) {
  iovec part{const_cast<std::byte*>(packet.data()), packet.size()};
  alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (fd >= 0) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof fd);
    std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
  }
  while (true) {
    const ssize_t n = ::sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n == static_cast<ssize_t>(packet.size())) return Io::kDone;
    if (n < 0 && errno == EINTR) continue;
    return n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK) ? Io::kAgain : Io::kClosed;
  }
}

Io receive_packet(int socket, std::span<std::byte> packet, UniqueFd& fd) {
  iovec part{packet.data(), packet.size()};
  alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(4 * sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  ssize_t n = 0;
  do {
    n = ::recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  } while (n < 0 && errno == EINTR);
  if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return Io::kAgain;
  if (n < 0) return Io::kClosed;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int received = -1;
      std::memcpy(&received, CMSG_DATA(header) + i * sizeof(int), sizeof received);
      fd.reset(received);  // more than one: the earlier ones are closed
    }
  }
  const bool whole =
      n == static_cast<ssize_t>(packet.size()) && (message.msg_flags & MSG_TRUNC) == 0;
  return whole ? Io::kDone : Io::kClosed;
}

bool peer_is_trusted(int socket) {
  ucred credentials{};
  socklen_t size = sizeof credentials;
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0) return false;
  return credentials.uid == ::geteuid() || credentials.uid == 0;
}

Result<std::string> host_boot_id() {
  constexpr const char* kFile = "/proc/sys/kernel/random/boot_id";
  const UniqueFd fd(::open(kFile, O_RDONLY | O_CLOEXEC));
  if (!fd) return fail_errno(errno, fmt::format("read {}", kFile));
  std::array<char, 64> text{};
  const ssize_t n = ::read(fd.get(), text.data(), text.size());
  if (n < 36) return fail(ErrorCode::kUnavailable, "read {}: no boot id in it", kFile);
  return std::string(text.data(), 36);
}

std::string Endpoint::to_string() const { return fmt::format("{}/{}", boot_id, socket_name); }

Result<Endpoint> Endpoint::parse(std::string_view text) {
  const auto slash = text.find('/');
  // 100: abstract names have 107 bytes at most.
  if (slash == std::string_view::npos || slash == 0 || slash + 1 == text.size() ||
      text.size() - slash - 1 > 100 || slash > 64) {
    return fail(ErrorCode::kInvalid, "shm endpoint '{}' is not BOOT_ID/SOCKET",
                text.substr(0, 200));
  }
  return Endpoint{std::string(text.substr(0, slash)), std::string(text.substr(slash + 1))};
}

}  // namespace rekindle::transport::shm
