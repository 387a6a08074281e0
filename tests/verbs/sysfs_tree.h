#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include <fmt/format.h>

#include "tests/support/process.h"

namespace rekindle::testing {

// A /sys for tests, with the symbolic links that the kernel makes.
class SysfsTree {
 public:
  explicit SysfsTree(std::filesystem::path root) : root_(std::move(root)) {}
  const std::filesystem::path& root() const { return root_; }

  void node(int id, std::string_view cpus, std::string_view distances) {
    const auto base = root_ / fmt::format("devices/system/node/node{}", id);
    write_file(base / "cpulist", fmt::format("{}\n", cpus));
    write_file(base / "distance", fmt::format("{}\n", distances));
  }

  // The nodes that have memory: "0-1".
  void memory(std::string_view nodes) {
    write_file(root_ / "devices/system/node/has_memory", fmt::format("{}\n", nodes));
  }

  // `path`: "pci0000:17/0000:17:01.0/0000:18:00.0". Also in bus/pci/devices.
  std::filesystem::path pci(const std::string& path, int numa, std::string_view vendor,
                            std::string_view kind) {
    const auto device = root_ / "devices" / path;
    write_file(device / "numa_node", fmt::format("{}\n", numa));
    write_file(device / "vendor", fmt::format("{}\n", vendor));
    write_file(device / "class", fmt::format("{}\n", kind));
    link(root_ / "bus/pci/devices" / device.filename(), device);
    return device;
  }

  void gpu(const std::string& path, int numa) { pci(path, numa, "0x10de", "0x030200"); }
  // What NVIDIA's driver says of that GPU, below `proc`.
  static void gpu_information(const std::filesystem::path& proc, const std::string& bus_id,
                              std::string_view uuid) {
    write_file(proc / "driver/nvidia/gpus" / bus_id / "information",
               fmt::format("Model: \t\t NVIDIA H200\nIRQ:   \t\t 41\nGPU UUID: \t {}\n"
                           "Bus Type: \t PCIe\nBus Location: \t {}\n",
                           uuid, bus_id));
  }

  void nic(const std::string& name, const std::string& path, int numa) {
    const auto device = pci(path, numa, "0x15b3", "0x020000");
    const auto infiniband = device / "infiniband" / name;
    std::filesystem::create_directories(infiniband);
    link(infiniband / "device", device);
    link(root_ / "class/infiniband" / name, infiniband);
  }

  // Soft-RoCE on an interface: no `device`, but the interface's name.
  void virtual_nic(const std::string& name, const std::string& parent) {
    const auto infiniband = root_ / "devices/virtual/infiniband" / name;
    write_file(infiniband / "parent", fmt::format("{}\n", parent));
    link(root_ / "class/infiniband" / name, infiniband);
  }

  void netdev(const std::string& name, const std::string& pci_path) {
    const auto device = root_ / "devices" / pci_path;
    std::filesystem::create_directories(device / "net" / name);
    link(device / "net" / name / "device", device);
    link(root_ / "class/net" / name, device / "net" / name);
  }

  void port(const std::string& nic, int number, std::string_view state, std::string_view rate,
            std::string_view link_layer = "Ethernet") {
    const auto base = root_ / "class/infiniband" / nic / "ports" / std::to_string(number);
    write_file(base / "state", fmt::format("{}\n", state));
    write_file(base / "rate", fmt::format("{}\n", rate));
    write_file(base / "link_layer", fmt::format("{}\n", link_layer));
    write_file(base / "lid", "0x0\n");
  }

  void gid(const std::string& nic, int port, int index, std::string_view gid, std::string_view type,
           std::string_view netdev) {
    const auto base = root_ / "class/infiniband" / nic / "ports" / std::to_string(port);
    write_file(base / "gids" / std::to_string(index), fmt::format("{}\n", gid));
    write_file(base / "gid_attrs/types" / std::to_string(index), fmt::format("{}\n", type));
    write_file(base / "gid_attrs/ndevs" / std::to_string(index), fmt::format("{}\n", netdev));
  }

 private:
  static void link(const std::filesystem::path& from, const std::filesystem::path& to) {
    std::filesystem::create_directories(from.parent_path());
    std::filesystem::create_directory_symlink(to, from);
  }

  std::filesystem::path root_;
};

}  // namespace rekindle::testing
