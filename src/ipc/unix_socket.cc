#include "src/ipc/unix_socket.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <thread>

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace rekindle::ipc {

namespace {

constexpr int kBacklog = 128;

const sockaddr* generic(const sockaddr_un& address) {
  return reinterpret_cast<const sockaddr*>(&address);
}

bool is_ours(uid_t owner, std::span<const uid_t> also_allowed) {
  return owner == ::geteuid() ||
         std::find(also_allowed.begin(), also_allowed.end(), owner) != also_allowed.end();
}

Result<void> check_directory(const std::string& path, std::span<const uid_t> also_allowed) {
  const std::filesystem::path parent = std::filesystem::path(path).parent_path();
  const std::string directory = parent.empty() ? "." : parent.string();
  struct stat info {};
  if (::lstat(directory.c_str(), &info) != 0) {
    return fail_errno(errno, fmt::format("unix socket directory {}", directory));
  }
  if (!S_ISDIR(info.st_mode)) {
    return fail(ErrorCode::kDenied, "{}, which should hold a unix socket, is not a directory",
                directory);
  }
  if (!is_ours(info.st_uid, also_allowed)) {
    return fail(ErrorCode::kDenied,
                "unix socket directory {} belongs to uid {}, we are uid {}; use a directory of "
                "your own",
                directory, info.st_uid, ::geteuid());
  }
  // Passing through (x) is harmless: others can neither replace a socket nor connect to one of mode
  // 0600.
  if ((info.st_mode & 066) != 0) {
    return fail(ErrorCode::kDenied,
                "unix socket directory {} is open to other users (mode {:o}); run: chmod 700 {}",
                directory, info.st_mode & 07777, directory);
  }
  return {};
}

Result<UniqueFd> new_socket() {
  UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) return fail_errno(errno, "create a unix socket");
  return fd;
}

// True: `path` is a socket on which no process listens.
Result<bool> is_dead_socket(const std::string& path, const sockaddr_un& address) {
  struct stat info {};
  if (::lstat(path.c_str(), &info) != 0) {
    if (errno == ENOENT) return false;
    return fail_errno(errno, fmt::format("unix socket {}", path));
  }
  if (!S_ISSOCK(info.st_mode)) {
    return fail(ErrorCode::kDenied, "{} exists and is not a socket; move it away", path);
  }
  TRY(const UniqueFd probe, new_socket());
  if (::connect(probe.get(), generic(address), sizeof address) == 0 || errno != ECONNREFUSED) {
    return fail(ErrorCode::kUnavailable,
                "unix socket {} is served by a live process; stop that one, or use another "
                "directory",
                path);
  }
  return true;
}

}  // namespace

Result<sockaddr_un> unix_address(const std::string& path) {
  sockaddr_un address{};
  if (path.empty() || path.size() >= sizeof address.sun_path ||
      path.find('\0') != std::string::npos) {
    return fail(ErrorCode::kInvalid, "unix socket path '{}' has {} bytes, 1 to {} are allowed",
                path, path.size(), sizeof address.sun_path - 1);
  }
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

Result<UniqueFd> listen_unix_socket(const std::string& path) {
  TRY(const sockaddr_un address, unix_address(path));
  TRY_VOID(check_directory(path, {}));
  TRY(const bool dead, is_dead_socket(path, address));
  if (dead && ::unlink(path.c_str()) != 0 && errno != ENOENT) {
    return fail_errno(errno, fmt::format("remove the dead socket {}", path));
  }
  TRY(UniqueFd fd, new_socket());
  if (::bind(fd.get(), generic(address), sizeof address) != 0) {
    return fail_errno(errno, fmt::format("bind unix socket {}", path));
  }
  if (::chmod(path.c_str(), 0600) != 0 || ::listen(fd.get(), kBacklog) != 0) {
    return fail_errno(errno, fmt::format("listen on unix socket {}", path));
  }
  return fd;
}

Result<void> open_to_others(const std::string& socket_path,
                            std::span<const std::string> directories) {
  for (const std::string& directory : directories) {
    if (::chmod(directory.c_str(), 0711) != 0) {
      return fail_errno(errno, fmt::format("let other users pass through {}", directory));
    }
  }
  if (::chmod(socket_path.c_str(), 0666) != 0) {
    return fail_errno(errno, fmt::format("let other users connect to {}", socket_path));
  }
  return {};
}

Result<void> close_to_others(std::span<const std::string> directories) {
  for (const std::string& directory : directories) {
    if (::chmod(directory.c_str(), 0700) != 0) {
      return fail_errno(errno, fmt::format("close {} to other users", directory));
    }
  }
  return {};
}

Result<void> check_unix_path(const std::string& path, std::span<const uid_t> also_allowed) {
  TRY_VOID(check_directory(path, also_allowed));
  struct stat info {};
  if (::lstat(path.c_str(), &info) != 0) {
    return fail_errno(errno, fmt::format("unix socket {}", path));
  }
  if (!S_ISSOCK(info.st_mode) || !is_ours(info.st_uid, also_allowed)) {
    return fail(ErrorCode::kDenied, "{} is not a socket of ours (uid {})", path, info.st_uid);
  }
  return {};
}

Result<UniqueFd> connect_unix_socket(const std::string& path, TimePoint deadline) {
  TRY(const sockaddr_un address, unix_address(path));
  while (true) {
    TRY(UniqueFd fd, new_socket());
    if (::connect(fd.get(), generic(address), sizeof address) == 0) return fd;
    if (errno == ECONNREFUSED || errno == ENOENT) {
      return fail(ErrorCode::kUnavailable, "nobody listens on {}", path);
    }
    // EAGAIN: the listener's queue is full, and there is no descriptor to poll.
    if (errno != EAGAIN && errno != EINTR) {
      return fail_errno(errno, fmt::format("connect to {}", path));
    }
    if (SteadyClock().now() >= deadline) {
      return fail(ErrorCode::kTimeout, "{} does not accept connections", path);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

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
