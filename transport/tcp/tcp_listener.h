#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "src/base/result.h"
#include "src/base/unique_fd.h"
#include "transport/tcp/tcp_socket.h"

namespace rekindle::transport::tcp {

// A listening socket that survives a lack of descriptors. It keeps one in reserve. With it, it
// accepts a waiting connection and closes it at once, so that peers see a clear end instead of
// hanging in the backlog.
class Listener {
 public:
  // An empty `host` means every address, of both families where the kernel has IPv6.
  static Result<Listener> bind(const std::string& host, std::uint16_t port);

  int fd() const { return socket_.get(); }
  std::uint16_t port() const { return port_; }

  enum class Outcome { kDrained, kMore, kExhausted };
  // Takes a turn's worth of connections at most. kExhausted: nothing can be accepted now, try again
  // later. `shed` counts the connections that were closed for lack of descriptors.
  Outcome accept_some(const std::function<void(UniqueFd)>& take, std::uint64_t& shed);

 private:
  Listener(UniqueFd socket, std::uint16_t port);
  bool shed_one();

  UniqueFd socket_;
  std::uint16_t port_ = 0;
  UniqueFd spare_;
};

}  // namespace rekindle::transport::tcp
