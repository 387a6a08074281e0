#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "transport/verbs/host/gid.h"

// Facts about NICs that the kernel shows without libibverbs. All functions take the directory that
// is mounted as /sys. They give an empty answer for missing files.
namespace rekindle::transport::verbs {

// The first line, without white space at its end.
std::optional<std::string> read_line(const std::filesystem::path& path);
std::optional<int> read_int(const std::filesystem::path& path);
// The names in a directory, "mlx5_2" before "mlx5_10".
std::vector<std::string> list_names(const std::filesystem::path& directory);

// One port of /sys/class/infiniband.
struct PortView {
  std::string device;
  std::uint8_t port = 0;
  std::string state;  // "ACTIVE", "DOWN"
  LinkLayer link = LinkLayer::kEthernet;
  std::uint64_t bytes_per_second = 0;  // 0: unknown
  std::uint16_t lid = 0;
  std::vector<GidEntry> gids;                    // of those in use
  std::map<std::uint32_t, std::string> netdevs;  // of their interfaces, by index
};
std::vector<PortView> read_ports(const std::filesystem::path& sysfs);

// "400 Gb/sec (4X NDR)" of a port's `rate`; 0: unknown.
std::uint64_t read_port_rate(const std::filesystem::path& sysfs, std::string_view device,
                             std::uint8_t port);

}  // namespace rekindle::transport::verbs
