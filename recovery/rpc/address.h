#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include <boost/asio/generic/stream_protocol.hpp>

#include "recovery/rpc/rpc.h"
#include "src/base/result.h"
#include "src/base/unique_fd.h"

namespace rekindle::rpc {

using Endpoint = boost::asio::generic::stream_protocol::endpoint;

// "host:port", "10.0.0.3:7400" or "[fd00::3]:7400".
struct HostPort {
  // Without brackets.
  std::string host;
  std::uint16_t port = 0;

  static Result<HostPort> parse(std::string_view text);
  // With brackets where the host has a colon.
  std::string to_string() const;
};

// "a:7300,b:7300": the addresses of coordinators, in order. At least one; each is checked.
Result<std::vector<std::string>> parse_addresses(std::string_view text);

inline constexpr std::string_view kUnixPrefix = "unix:";

// The unix sockets of src/ipc, for Asio. kInvalid: the path is too long.
Result<Endpoint> unix_endpoint(const std::string& path);
// As in src/ipc/unix_socket.h.
Result<UniqueFd> listen_unix_socket(const std::string& path);
Result<void> check_unix_path(const std::string& path);
// kDenied unless the other end runs as our user.
Result<void> check_peer_uid(int socket_fd, const std::string& path);

// An endpoint from a socket call: "10.0.0.3:51234", "[fd00::3]:7400"; a v4-mapped address as v4.
std::string to_string(const Endpoint& endpoint);
// The addresses of the interfaces of this host, "10.0.0.3" or "fd00::3"; at most 64.
std::vector<std::string> local_hosts();
// Addresses written as numbers, without asking a name server; empty when `host` is a name.
std::vector<Endpoint> numeric_endpoints(const HostPort& address);

// Resolves names to addresses within a deadline. getaddrinfo has no deadline and cannot be
// interrupted, so it runs on its own thread, which is left behind when it takes too long. Asio's
// resolver would make the end of the process wait for it.

inline constexpr std::chrono::milliseconds kResolveDeadline{2000};

// May block for any time; runs on the thread that is left behind.
using LookUp = std::function<Result<std::vector<Endpoint>>(const HostPort& address)>;
// Calls getaddrinfo.
Result<std::vector<Endpoint>> system_look_up(const HostPort& address);

// kTimeout, kNotFound or kUnavailable; the message names the host.
async::Task<Result<std::vector<Endpoint>>> resolve(HostPort address, TimePoint deadline,
                                                   LookUp look_up = system_look_up);
// Blocks. For listen(), which runs before anything is served.
Result<std::vector<Endpoint>> resolve_blocking(const HostPort& address);

}  // namespace rekindle::rpc
