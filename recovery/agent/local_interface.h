#pragma once

#include <cstdint>
#include <string>
#include <vector>

// The addresses and network interfaces of this host, as its routing table and sysfs tell them. All
// calls block: names are looked up.
namespace rekindle::agent {

// The address that this host uses towards one of `remotes` ("host:port"). Connecting a UDP socket
// asks the routing table and sends nothing. A remote on this host may give a loopback address,
// which no other host reaches. It is the answer only if every remote gives one. "127.0.0.1" if none
// can be looked up.
std::string local_host_towards(const std::vector<std::string>& remotes);

struct LocalInterface {
  // "eth0"; "": unknown.
  std::string name;
  // Of the link. 0: the device tells no speed.
  std::uint64_t bytes_per_second = 0;
};
LocalInterface interface_towards(const std::string& remote);

}  // namespace rekindle::agent
