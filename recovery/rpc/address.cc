#include "recovery/rpc/address.h"

#include <charconv>
#include <cstring>

#include <boost/asio/ip/address.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/local/stream_protocol.hpp>

#include "src/ipc/unix_socket.h"

namespace rekindle::rpc {

namespace asio = boost::asio;
using asio::ip::tcp;

namespace {

constexpr std::size_t kMaxHostBytes = 253;

Failure malformed(std::string_view text) {
  return fail(ErrorCode::kInvalid,
              "'{}' is not an address; write HOST:PORT, 10.0.0.3:7400 or [fd00::3]:7400",
              text.substr(0, kMaxHostBytes));
}

}  // namespace

Result<HostPort> HostPort::parse(std::string_view text) {
  const auto colon = text.rfind(':');
  if (colon == std::string_view::npos || colon == 0) return malformed(text);
  std::string_view host = text.substr(0, colon);
  const std::string_view digits = text.substr(colon + 1);
  HostPort result;
  const auto [end, error] =
      std::from_chars(digits.data(), digits.data() + digits.size(), result.port);
  if (digits.empty() || error != std::errc() || end != digits.data() + digits.size()) {
    return malformed(text);
  }
  if (host.front() == '[') {
    if (host.size() < 3 || host.back() != ']') return malformed(text);
    host = host.substr(1, host.size() - 2);
  } else if (host.find(':') != std::string_view::npos) {
    return malformed(text);
  }
  if (host.size() > kMaxHostBytes || host.find_first_of(" \t\n[]") != std::string_view::npos) {
    return malformed(text);
  }
  result.host = host;
  return result;
}

std::string HostPort::to_string() const {
  return host.find(':') == std::string::npos ? fmt::format("{}:{}", host, port)
                                             : fmt::format("[{}]:{}", host, port);
}

Result<std::vector<std::string>> parse_addresses(std::string_view text) {
  std::vector<std::string> addresses;
  while (true) {
    const auto comma = text.find(',');
    TRY(const HostPort address, HostPort::parse(text.substr(0, comma)));
    addresses.push_back(address.to_string());
    if (comma == std::string_view::npos) return addresses;
    text.remove_prefix(comma + 1);
  }
}

std::string to_string(const Endpoint& endpoint) {
  tcp::endpoint inet;
  if (endpoint.size() == 0 || endpoint.size() > inet.capacity()) return "unknown";
  std::memcpy(inet.data(), endpoint.data(), endpoint.size());
  inet.resize(endpoint.size());
  asio::ip::address address = inet.address();
  if (address.is_v6() && address.to_v6().is_v4_mapped()) {
    address = asio::ip::make_address_v4(asio::ip::v4_mapped, address.to_v6());
  }
  return HostPort{address.to_string(), inet.port()}.to_string();
}

std::vector<Endpoint> numeric_endpoints(const HostPort& address) {
  boost::system::error_code error;
  const auto parsed = asio::ip::make_address(address.host, error);
  if (error) return {};
  return {Endpoint(tcp::endpoint(parsed, address.port))};
}

Result<Endpoint> unix_endpoint(const std::string& path) {
  TRY_VOID(ipc::unix_address(path));
  return Endpoint(boost::asio::local::stream_protocol::endpoint(path));
}

Result<UniqueFd> listen_unix_socket(const std::string& path) {
  return ipc::listen_unix_socket(path);
}

Result<void> check_unix_path(const std::string& path) { return ipc::check_unix_path(path); }

Result<void> check_peer_uid(int socket_fd, const std::string& path) {
  TRY(const ipc::Peer peer, ipc::peer_of(socket_fd));
  return ipc::check_peer(peer, {}, "unix socket " + path);
}

}  // namespace rekindle::rpc
