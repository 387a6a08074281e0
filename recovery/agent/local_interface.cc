#include "recovery/agent/local_interface.h"

#include <fstream>
#include <memory>

#include <ifaddrs.h>
#include <netinet/in.h>

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/address.hpp>
#include <boost/asio/ip/udp.hpp>

#include "recovery/rpc/address.h"

namespace rekindle::agent {

namespace {

std::string address_of(const sockaddr* address) {
  if (address == nullptr) return "";
  if (address->sa_family == AF_INET) {
    const auto& v4 = *reinterpret_cast<const sockaddr_in*>(address);
    return boost::asio::ip::address_v4(ntohl(v4.sin_addr.s_addr)).to_string();
  }
  if (address->sa_family != AF_INET6) return "";
  const auto& v6 = *reinterpret_cast<const sockaddr_in6*>(address);
  boost::asio::ip::address_v6::bytes_type bytes;
  std::copy(std::begin(v6.sin6_addr.s6_addr), std::end(v6.sin6_addr.s6_addr), bytes.begin());
  return boost::asio::ip::address_v6(bytes, v6.sin6_scope_id).to_string();
}

// sysfs has Mbit/s, and -1 or an error where a device has no speed.
std::uint64_t link_speed_of(const std::string& interface) {
  std::ifstream file("/sys/class/net/" + interface + "/speed");
  std::int64_t megabits = 0;
  if (!(file >> megabits) || megabits <= 0) return 0;
  return static_cast<std::uint64_t>(megabits) * 125'000;
}

}  // namespace

std::string local_host_towards(const std::vector<std::string>& remotes) {
  boost::asio::io_context context;
  boost::asio::ip::udp::resolver resolver(context);
  std::string loopback;
  for (const std::string& address : remotes) {
    const auto remote = rpc::HostPort::parse(address);
    if (!remote) continue;
    boost::system::error_code error;
    for (const auto& entry : resolver.resolve(remote->host, std::to_string(remote->port), error)) {
      boost::asio::ip::udp::socket socket(context);
      if (socket.connect(entry.endpoint(), error)) continue;
      const auto local = socket.local_endpoint(error);
      if (error) continue;
      if (!local.address().is_loopback()) return local.address().to_string();
      if (loopback.empty()) loopback = local.address().to_string();
    }
  }
  return loopback.empty() ? "127.0.0.1" : loopback;
}

LocalInterface interface_towards(const std::string& remote) {
  const std::string local = local_host_towards({remote});
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return {};
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(list, &::freeifaddrs);
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (address_of(entry->ifa_addr) != local) continue;
    return {entry->ifa_name, link_speed_of(entry->ifa_name)};
  }
  return {};
}

}  // namespace rekindle::agent
