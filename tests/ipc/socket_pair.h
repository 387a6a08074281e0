#pragma once

#include <cerrno>
#include <stdexcept>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "src/base/unique_fd.h"
#include "src/ipc/channel.h"

namespace rekindle::ipc::testing {

inline std::pair<UniqueFd, UniqueFd> socket_pair() {
  int fds[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) != 0) {
    throw std::runtime_error("socketpair");
  }
  return {UniqueFd(fds[0]), UniqueFd(fds[1])};
}

struct Pipe {
  UniqueFd read, write;
};
inline Pipe make_pipe() {
  int fds[2];
  if (::pipe2(fds, O_CLOEXEC) != 0) throw std::runtime_error("pipe2");
  return {UniqueFd(fds[0]), UniqueFd(fds[1])};
}

inline std::vector<UniqueFd> one(UniqueFd fd) {
  std::vector<UniqueFd> out;
  out.push_back(std::move(fd));
  return out;
}

inline std::vector<UniqueFd> copies_of(int fd, std::size_t count) {
  std::vector<UniqueFd> out;
  for (std::size_t i = 0; i < count; ++i) {
    out.emplace_back(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
    if (!out.back()) throw std::runtime_error("dup");
  }
  return out;
}

inline bool same_file(int a, int b) {
  struct stat first {};
  struct stat second {};
  return ::fstat(a, &first) == 0 && ::fstat(b, &second) == 0 && first.st_ino == second.st_ino &&
         first.st_dev == second.st_dev;
}

// True: no writer of the pipe is left, so the sent descriptors are closed.
inline bool all_writers_closed(const Pipe& pipe) {
  char byte;
  const int flags = ::fcntl(pipe.read.get(), F_GETFL);
  ::fcntl(pipe.read.get(), F_SETFL, flags | O_NONBLOCK);
  return ::read(pipe.read.get(), &byte, 1) == 0;
}

inline TimePoint soon() { return SteadyClock().now() + std::chrono::seconds(20); }

}  // namespace rekindle::ipc::testing
