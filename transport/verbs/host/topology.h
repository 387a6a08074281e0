#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "src/base/numa_nodes.h"
#include "src/base/result.h"

// How near NICs, GPUs and NUMA nodes are to each other, from the PCI paths in sysfs. A topology
// file overrides them. This is a snapshot: plain values, no threads.
namespace rekindle::transport::verbs {

// The distances of `nvidia-smi topo -m` and NCCL, nearer ones first.
enum class Distance : std::uint8_t {
  kPix,   // at most one PCIe switch between them
  kPxb,   // several switches, not the CPU
  kPhb,   // through the CPU's PCIe root, the same one
  kNode,  // another root of the same NUMA node
  kSys,   // between NUMA nodes, or unknown
};
std::string_view to_string(Distance distance);

// The way from the CPU down: root complex ("pci0000:17"), bridges, the device itself. Empty: it is
// no PCI device, like soft-RoCE on a virtual interface.
using PciPath = std::vector<std::string>;

struct NicPlace {
  std::string name;  // "mlx5_0"
  PciPath pci;
  int numa_node = -1;     // -1: unknown
  std::vector<int> cpus;  // near it; empty: any
};

struct GpuPlace {
  std::string bus_id;  // "0000:1b:00.0"
  PciPath pci;
  int numa_node = -1;
};

// Where the bytes are wanted. Without a GPU and a node: anywhere.
struct Place {
  std::string gpu;  // PCI bus id, as CUDA or nvidia-smi write it
  int numa_node = -1;
};

class Topology {
 public:
  static Topology read(const std::filesystem::path& sysfs);
  // read(), then apply() of the file if one is named. kInvalid names the file and the place in it.
  static Result<Topology> open(const std::filesystem::path& sysfs,
                               const std::filesystem::path& file);
  // Applies the text of a topology file (docs/internals/verbs.md). `name` is for messages. Names
  // that this host does not have are skipped: one file may serve many hosts.
  Result<void> apply(std::string_view json, std::string_view name);

  const std::vector<NicPlace>& nics() const { return nics_; }
  const std::vector<GpuPlace>& gpus() const { return gpus_; }
  const std::vector<NumaNode>& nodes() const { return nodes_; }
  const NicPlace* nic(std::string_view name) const;  // nullptr: none
  const GpuPlace* gpu(std::string_view bus_id) const;
  const NumaNode* node(int id) const;

  Distance distance(const NicPlace& nic, const GpuPlace& gpu) const;
  Distance distance(const NicPlace& nic, int numa_node) const;
  // As the firmware's table has it, 10 = itself; large numbers for nodes that are far or unknown.
  int node_distance(int from, int to) const;
  // The list of ports ("mlx5_0" or "mlx5_0:1", best first) that the topology file has for this
  // place: the GPU's own, else that of its node, else the general one. nullptr: none.
  const std::vector<std::string>* listed_rails(const Place& place) const;

 private:
  std::vector<NicPlace> nics_;
  std::vector<GpuPlace> gpus_;
  std::vector<NumaNode> nodes_;
  // From the file.
  std::map<std::string, std::vector<std::string>, std::less<>> gpu_rails_;
  std::map<int, std::vector<std::string>> node_rails_;
  std::vector<std::string> any_rails_;
};

// The GPU with this UUID ("GPU-6f2c…"), by the files of NVIDIA's driver below `proc`, the directory
// that stands for /proc. nullptr: unknown, also for a MIG slice, and for a GPU that no process has
// opened since the driver was loaded.
const GpuPlace* gpu_by_uuid(const Topology& topology, const std::filesystem::path& proc,
                            std::string_view uuid);
// The node of gpu_by_uuid(). -1: unknown.
int node_of_gpu(const Topology& topology, const std::filesystem::path& proc, std::string_view uuid);

// "0000:1b:00.0" for "00000000:1B:00.0" or "1b:00.0". Nothing: the text is no bus id.
std::optional<std::string> normalize_bus_id(std::string_view text);

// The facts about a port that decide its place in the order.
struct RailPlace {
  std::string device;
  std::uint8_t port = 0;
  std::uint64_t bytes_per_second = 0;  // 0: unknown
};

// Indexes into the rails that order_rails() was given, nearest first.
struct RailOrder {
  std::vector<std::size_t> preferred;
  std::vector<std::size_t> fallback;
};

// Orders rails by distance and speed. The nearest ones that have at least half of the fastest one's
// speed are preferred. The others are fallback, slow ones last. A list of the topology file is
// followed as it stands.
RailOrder order_rails(const Topology& topology, std::span<const RailPlace> rails,
                      const Place& place);

}  // namespace rekindle::transport::verbs
