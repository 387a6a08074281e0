#include "recovery/rpc/unix_socket.h"

#include <filesystem>

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <boost/asio/local/stream_protocol.hpp>

namespace rekindle::rpc {

namespace {

constexpr int kBacklog = 128;

Result<void> check_directory(const std::string& path) {
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
  if (info.st_uid != ::geteuid()) {
    return fail(ErrorCode::kDenied,
                "unix socket directory {} belongs to uid {}, we are uid {}; use a directory of "
                "your own",
                directory, info.st_uid, ::geteuid());
  }
  if ((info.st_mode & 077) != 0) {
    return fail(ErrorCode::kDenied,
                "unix socket directory {} is open to other users (mode {:o}); run: chmod 700 {}",
                directory, info.st_mode & 07777, directory);
  }
  return {};
}

// True when `path` is a socket on which nobody listens any more.
Result<bool> is_dead_socket(const std::string& path, const Endpoint& endpoint) {
  struct stat info {};
  if (::lstat(path.c_str(), &info) != 0) {
    if (errno == ENOENT) return false;
    return fail_errno(errno, fmt::format("unix socket {}", path));
  }
  if (!S_ISSOCK(info.st_mode)) {
    return fail(ErrorCode::kDenied, "{} exists and is not a socket; move it away", path);
  }
  const UniqueFd probe(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!probe) return fail_errno(errno, "create a unix socket");
  if (::connect(probe.get(), endpoint.data(), static_cast<socklen_t>(endpoint.size())) == 0 ||
      errno != ECONNREFUSED) {
    return fail(ErrorCode::kUnavailable,
                "unix socket {} is served by a live process; stop that one, or use another "
                "directory",
                path);
  }
  return true;
}

}  // namespace

Result<Endpoint> unix_endpoint(const std::string& path) {
  if (path.empty() || path.size() >= sizeof(sockaddr_un::sun_path) ||
      path.find('\0') != std::string::npos) {
    return fail(ErrorCode::kInvalid, "unix socket path '{}' has {} bytes, 1 to {} are allowed",
                path, path.size(), sizeof(sockaddr_un::sun_path) - 1);
  }
  return Endpoint(boost::asio::local::stream_protocol::endpoint(path));
}

Result<UniqueFd> listen_unix_socket(const std::string& path) {
  TRY(const Endpoint endpoint, unix_endpoint(path));
  TRY_VOID(check_directory(path));
  TRY(const bool dead, is_dead_socket(path, endpoint));
  if (dead && ::unlink(path.c_str()) != 0 && errno != ENOENT) {
    return fail_errno(errno, fmt::format("remove the dead socket {}", path));
  }
  UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) return fail_errno(errno, "create a unix socket");
  if (::bind(fd.get(), endpoint.data(), static_cast<socklen_t>(endpoint.size())) != 0) {
    return fail_errno(errno, fmt::format("bind unix socket {}", path));
  }
  if (::chmod(path.c_str(), 0600) != 0 || ::listen(fd.get(), kBacklog) != 0) {
    return fail_errno(errno, fmt::format("listen on unix socket {}", path));
  }
  return fd;
}

Result<void> check_unix_path(const std::string& path) {
  TRY_VOID(check_directory(path));
  struct stat info {};
  if (::lstat(path.c_str(), &info) != 0)
    return fail_errno(errno, fmt::format("unix socket {}", path));
  if (!S_ISSOCK(info.st_mode) || info.st_uid != ::geteuid()) {
    return fail(ErrorCode::kDenied, "{} is not a socket of ours (uid {})", path, info.st_uid);
  }
  return {};
}

Result<void> check_peer_uid(int socket_fd, const std::string& path) {
  ucred credentials{};
  socklen_t size = sizeof credentials;
  if (::getsockopt(socket_fd, SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0) {
    return fail_errno(errno, fmt::format("credentials of the peer on {}", path));
  }
  if (credentials.uid != ::geteuid()) {
    return fail(ErrorCode::kDenied,
                "the other end of unix socket {} runs as uid {} (pid {}), we are uid {}; run both "
                "as the same user",
                path, credentials.uid, credentials.pid, ::geteuid());
  }
  return {};
}

}  // namespace rekindle::rpc
