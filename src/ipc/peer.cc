#include "src/ipc/peer.h"

#include <algorithm>
#include <cerrno>

#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace rekindle::ipc {

namespace {

// SO_PEERPIDFD, since Linux 6.5.
constexpr int kSoPeerPidfd = 77;

// Of exactly the process that connected. Older kernels know only its number, which another process
// may have got since. The caller then sees the end of the socket.
UniqueFd pidfd_of(int socket_fd, pid_t pid) {
  int fd = -1;
  socklen_t size = sizeof fd;
  if (::getsockopt(socket_fd, SOL_SOCKET, kSoPeerPidfd, &fd, &size) == 0) return UniqueFd(fd);
  if (errno != ENOPROTOOPT || pid <= 0) return {};
  return UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
}

}  // namespace

Result<Peer> peer_of(int socket_fd) {
  ucred credentials{};
  socklen_t size = sizeof credentials;
  if (::getsockopt(socket_fd, SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0) {
    return fail_errno(errno, "credentials of the other end of a unix socket");
  }
  return Peer{credentials.pid, credentials.uid, pidfd_of(socket_fd, credentials.pid)};
}

Result<void> check_peer(const Peer& peer, std::span<const uid_t> also_allowed,
                        const std::string& what) {
  if (peer.uid == ::geteuid() ||
      std::find(also_allowed.begin(), also_allowed.end(), peer.uid) != also_allowed.end()) {
    return {};
  }
  return fail(
      ErrorCode::kDenied,
      "the other end of {} runs as uid {} (pid {}), we are uid {}; run both as the same user", what,
      peer.uid, peer.pid, ::geteuid());
}

}  // namespace rekindle::ipc
