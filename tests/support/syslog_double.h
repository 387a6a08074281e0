#pragma once

#include <array>
#include <filesystem>
#include <string>

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <gtest/gtest.h>

#include "src/base/unique_fd.h"

namespace rekindle::testing {

// Stands in for the daemon of syslog: a datagram socket at `path`, which must not exist.
class SyslogDouble {
 public:
  explicit SyslogDouble(const std::filesystem::path& path) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    path.string().copy(address.sun_path, sizeof address.sun_path - 1);
    EXPECT_EQ(::bind(fd_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  }

  // The next message; "" when none comes.
  std::string next() {
    constexpr int kPatienceMs = 20'000;
    pollfd entry{fd_.get(), POLLIN, 0};
    if (::poll(&entry, 1, kPatienceMs) != 1) return "";
    std::array<char, 65536> text;
    const ssize_t got = ::recv(fd_.get(), text.data(), text.size(), 0);
    return got < 0 ? "" : std::string(text.data(), static_cast<std::size_t>(got));
  }
  // The JSON document of the next message.
  std::string next_line() {
    const std::string message = next();
    const auto begin = message.find('{');
    return begin == std::string::npos ? "" : message.substr(begin);
  }

 private:
  const UniqueFd fd_{::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0)};
};

}  // namespace rekindle::testing
