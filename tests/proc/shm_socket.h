#pragma once

#include <cstddef>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>

#include <sys/socket.h>
#include <sys/types.h>
#include <sys/un.h>

namespace rekindle::testing {

struct AbstractAddress {
  sockaddr_un name{};
  socklen_t length = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&name); }
};

// Where an agent hands its segments to pullers of the same host; length 0 when there is none.
inline AbstractAddress shm_socket_of(pid_t pid) {
  std::string open_sockets;
  const std::filesystem::path descriptors = "/proc/" + std::to_string(pid) + "/fd";
  for (const auto& fd : std::filesystem::directory_iterator(descriptors)) {
    std::error_code gone;
    open_sockets += std::filesystem::read_symlink(fd.path(), gone).string() + "\n";
  }
  AbstractAddress address;
  std::ifstream table("/proc/net/unix");  // … INODE @NAME
  for (std::string line; std::getline(table, line);) {
    const auto at = line.find(" @rekindle-");
    if (at == std::string::npos) continue;
    const auto begin = line.rfind(' ', at - 1) + 1;
    const std::string socket = "socket:[" + line.substr(begin, at - begin) + "]";
    if (open_sockets.find(socket) == std::string::npos) continue;
    const std::string name = line.substr(at + 2);
    address.name.sun_family = AF_UNIX;
    name.copy(address.name.sun_path + 1, sizeof address.name.sun_path - 1);
    address.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  }
  return address;
}

}  // namespace rekindle::testing
