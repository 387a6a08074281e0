#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include <netinet/in.h>
#include <sys/socket.h>

#include "src/base/clock.h"
#include "src/base/result.h"
#include "src/base/unique_fd.h"

// Socket helpers for both ends.
namespace rekindle::transport::tcp {

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t length = 0;

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
  std::uint16_t port() const;
  std::string to_string() const;  // "10.0.0.2:7401", "[fd00::2]:7401"; v4-mapped as v4
  std::string host() const;       // "10.0.0.2", "fd00::2"
};

// "host:port", "[v6]:port".
std::string format_endpoint(std::string_view host, std::uint16_t port);
struct HostPort {
  std::string host;
  std::uint16_t port = 0;
};
Result<HostPort> parse_endpoint(std::string_view endpoint);

// Every address of `host`. Numeric addresses never block. A name is looked up in a thread of its
// own, which is abandoned when the deadline passes first.
Result<std::vector<SocketAddress>> resolve(const HostPort& target, TimePoint deadline);

SocketAddress local_address(int fd);
SocketAddress peer_address(int fd);

// The congestion control of the kernel ("cubic", "bbr", …) on a socket; "" where the kernel has no
// answer.
std::string congestion_control(int fd);
// Chooses it, before connect() or listen(); accepted connections have that of their listener. "":
// as it is. kInvalid: this kernel does not have `name`, or root alone may use it; the message lists
// those that may be used.
Result<void> set_congestion_control(int fd, const std::string& name);
// bbr spreads its packets by a timer.
bool is_paced(std::string_view congestion_control);

// Switches Nagle's delay off. Sets keepalive and TCP_USER_TIMEOUT as backstops against peers that
// vanish.
void tune_stream(int fd);
// Closes with a reset, so that the kernel drops its buffers for the peer.
void reset_and_close(UniqueFd& fd);

// A listening socket that survives a lack of descriptors. It keeps one in reserve. With it, it
// accepts a waiting connection and closes it at once, so that peers see a clear end instead of
// hanging in the backlog.
class Listener {
 public:
  // An empty `host` means every address, of both families where the kernel has IPv6. `congestion`:
  // the algorithm of its connections, as for set_congestion_control().
  static Result<Listener> bind(const std::string& host, std::uint16_t port,
                               const std::string& congestion = {});

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
