#include "transport/verbs/host/topology.h"

#include <algorithm>
#include <charconv>
#include <compare>
#include <fstream>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "src/base/result.h"
#include "src/base/settings_file.h"
#include "transport/verbs/host/sysfs.h"

namespace rekindle::transport::verbs {
namespace {

using Json = nlohmann::json;

// The contents of a topology file (docs/internals/verbs.md). Lists name ports ("mlx5_0" or
// "mlx5_0:1"), best first.
struct TopologyFile {
  struct Nic {
    std::string name;
    std::optional<int> numa_node;
    std::vector<int> cpus;  // empty: not given
  };
  struct Gpu {
    std::string bus_id;  // normalized
    std::optional<int> numa_node;
  };
  std::vector<Nic> nics;
  std::vector<Gpu> gpus;
  std::map<std::string, std::vector<std::string>, std::less<>> gpu_rails;
  std::map<int, std::vector<std::string>> node_rails;
  std::vector<std::string> any_rails;

  // kInvalid gives `name` and the place in the file. An unknown key is an error, too: an ignored
  // typing error would look like a slow network.
  static Result<TopologyFile> parse(std::string_view json, std::string_view name);
};

class TopologyParser {
 public:
  explicit TopologyParser(std::string_view name) : name_(name) {}

  Result<TopologyFile> parse(const Json& root) {
    TRY_VOID(object("", root));
    for (const auto& [key, value] : root.items()) {
      if (key == "nics") {
        TRY_VOID(each(key, value, &TopologyParser::nic));
      } else if (key == "gpus") {
        TRY_VOID(each(key, value, &TopologyParser::gpu));
      } else if (key == "nodes") {
        TRY_VOID(each(key, value, &TopologyParser::node));
      } else if (key == "preferred") {
        TRY(file_.any_rails, names(key, value));
      } else {
        return wrong(key, "is not known; use nics, gpus, nodes or preferred");
      }
    }
    return std::move(file_);
  }

 private:
  using Section = Result<void> (TopologyParser::*)(const std::string& where,
                                                   const std::string& name, const Json& value);

  Failure wrong(const std::string& where, std::string_view what) const {
    return fail(ErrorCode::kInvalid, "{}: {}{}{}", name_, where, where.empty() ? "" : " ", what);
  }

  Result<void> object(const std::string& where, const Json& value) const {
    if (!value.is_object()) return wrong(where, "must be an object: {…}");
    return {};
  }

  Result<void> each(const std::string& where, const Json& value, Section section) {
    TRY_VOID(object(where, value));
    for (const auto& [key, entry] : value.items()) {
      const std::string inner = fmt::format("{}.{}", where, key);
      TRY_VOID(object(inner, entry));
      TRY_VOID((this->*section)(inner, key, entry));
    }
    return {};
  }

  Result<int> node_id(const std::string& where, const Json& value) const {
    constexpr int kMaxNodes = 1024;
    if (!value.is_number_integer() || value < 0 || value >= kMaxNodes) {
      return wrong(where, "must be the number of a NUMA node");
    }
    return value.get<int>();
  }

  Result<std::vector<std::string>> names(const std::string& where, const Json& value) const {
    std::vector<std::string> list;
    constexpr std::string_view kWhat = "must be a list of ports: [\"mlx5_0\", \"mlx5_1:1\"]";
    if (!value.is_array() || value.empty()) return wrong(where, kWhat);
    for (const Json& entry : value) {
      if (!entry.is_string() || entry.get_ref<const std::string&>().empty()) {
        return wrong(where, kWhat);
      }
      list.push_back(entry.get<std::string>());
    }
    return list;
  }

  Result<void> nic(const std::string& where, const std::string& name, const Json& value) {
    TopologyFile::Nic& place = file_.nics.emplace_back();
    place.name = name;
    for (const auto& [key, entry] : value.items()) {
      const std::string at = fmt::format("{}.{}", where, key);
      if (key == "numa_node") {
        TRY(place.numa_node, node_id(at, entry));
      } else if (key == "cpus") {
        place.cpus =
            entry.is_string() ? parse_cpu_list(entry.get<std::string>()) : std::vector<int>();
        if (place.cpus.empty()) return wrong(at, "must be a list of CPUs: \"0-15,32\"");
      } else {
        return wrong(at, "is not known; use numa_node or cpus");
      }
    }
    return {};
  }

  Result<void> gpu(const std::string& where, const std::string& name, const Json& value) {
    const auto bus_id = normalize_bus_id(name);
    if (!bus_id) return wrong(where, "must be a PCI bus id: 0000:1b:00.0");
    TopologyFile::Gpu& place = file_.gpus.emplace_back();
    place.bus_id = *bus_id;
    for (const auto& [key, entry] : value.items()) {
      const std::string at = fmt::format("{}.{}", where, key);
      if (key == "numa_node") {
        TRY(place.numa_node, node_id(at, entry));
      } else if (key == "preferred") {
        TRY(file_.gpu_rails[*bus_id], names(at, entry));
      } else {
        return wrong(at, "is not known; use numa_node or preferred");
      }
    }
    return {};
  }

  Result<void> node(const std::string& where, const std::string& name, const Json& value) {
    int id = -1;
    const char* const last = name.data() + name.size();
    const auto [end, error] = std::from_chars(name.data(), last, id);
    if (error != std::errc() || end != last || id < 0) {
      return wrong(where, "must be the number of a NUMA node");
    }
    for (const auto& [key, entry] : value.items()) {
      const std::string at = fmt::format("{}.{}", where, key);
      if (key != "preferred") return wrong(at, "is not known; use preferred");
      TRY(file_.node_rails[id], names(at, entry));
    }
    return {};
  }

  const std::string_view name_;
  TopologyFile file_;
};

// Errors name line and column. The library's own message has a prefix that means nothing here.
std::string position_of(std::string_view text, std::size_t byte) {
  const std::string_view before = text.substr(0, byte == 0 ? 0 : byte - 1);
  const auto line = 1 + std::ranges::count(before, '\n');
  const auto last = before.rfind('\n');
  const auto column = before.size() - (last == std::string_view::npos ? 0 : last + 1) + 1;
  return fmt::format("line {}, column {}", line, column);
}

Result<TopologyFile> TopologyFile::parse(std::string_view json, std::string_view name) {
  try {
    return TopologyParser(name).parse(Json::parse(json));
  } catch (const Json::parse_error& error) {
    return fail(ErrorCode::kInvalid, "{}: not JSON at {}", name, position_of(json, error.byte));
  }
}

bool is_hex(std::string_view text) {
  return !text.empty() && std::ranges::all_of(text, [](char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F');
  });
}

// The PCI part of a device's real directory, e.g. …/pci0000:17/0000:17:01.0/0000:18:00.0.
PciPath pci_path(const std::filesystem::path& device) {
  PciPath path;
  std::error_code error;
  for (const auto& part : std::filesystem::canonical(device, error)) {
    const std::string name = part.string();
    const bool root = name.starts_with("pci") && name.find(':') != std::string::npos;
    const bool function = std::ranges::count(name, ':') == 2 && normalize_bus_id(name).has_value();
    if (root || (function && !path.empty())) path.push_back(name);
  }
  return path;
}

// The PCI device of a NIC. A software device has that of its network interface.
std::filesystem::path device_of(const std::filesystem::path& sysfs, const std::string& nic) {
  const auto base = sysfs / "class/infiniband" / nic;
  std::error_code error;
  if (std::filesystem::exists(base / "device", error)) return base / "device";
  std::string netdev = read_line(base / "parent").value_or("");  // soft-RoCE
  if (netdev.empty()) netdev = read_line(base / "ports/1/gid_attrs/ndevs/0").value_or("");
  if (netdev.empty() || netdev.find('/') != std::string::npos) return {};
  return sysfs / "class/net" / netdev / "device";
}

std::vector<GpuPlace> read_gpus(const std::filesystem::path& sysfs) {
  std::vector<GpuPlace> gpus;
  const auto base = sysfs / "bus/pci/devices";
  for (const std::string& name : list_names(base)) {
    const std::string vendor = read_line(base / name / "vendor").value_or("");
    const std::string kind = read_line(base / name / "class").value_or("");
    // NVIDIA's display and 3D controllers, but not their audio functions and switches.
    if (vendor != "0x10de" || !(kind.starts_with("0x0300") || kind.starts_with("0x0302"))) continue;
    gpus.push_back({normalize_bus_id(name).value_or(name), pci_path(base / name),
                    read_int(base / name / "numa_node").value_or(-1)});
  }
  return gpus;
}

}  // namespace

std::string_view to_string(Distance distance) {
  switch (distance) {
    case Distance::kPix:
      return "PIX";
    case Distance::kPxb:
      return "PXB";
    case Distance::kPhb:
      return "PHB";
    case Distance::kNode:
      return "NODE";
    case Distance::kSys:
      return "SYS";
  }
  return "?";
}

std::optional<std::string> normalize_bus_id(std::string_view text) {
  std::string_view domain = "0000";
  if (std::ranges::count(text, ':') == 2) {
    domain = text.substr(0, text.find(':'));
    text.remove_prefix(domain.size() + 1);
    while (domain.size() > 4 && domain.front() == '0') domain.remove_prefix(1);
  }
  // BB:DD.F
  const bool good = is_hex(domain) && domain.size() >= 4 && domain.size() <= 8 &&
                    text.size() == 7 && text[2] == ':' && text[5] == '.' &&
                    is_hex(text.substr(0, 2)) && is_hex(text.substr(3, 2)) &&
                    is_hex(text.substr(6));
  if (!good) return std::nullopt;
  std::string result = fmt::format("{}:{}", domain, text);
  std::ranges::transform(result, result.begin(), [](char c) {
    return c >= 'A' && c <= 'F' ? static_cast<char>(c - 'A' + 'a') : c;
  });
  return result;
}

Topology Topology::read(const std::filesystem::path& sysfs) {
  Topology topology;
  topology.nodes_ = read_numa_nodes(sysfs);
  topology.gpus_ = read_gpus(sysfs);
  // Virtual machines say -1 even where there is only one node.
  const auto& nodes = topology.nodes_;
  const auto known = [&](int id) { return id < 0 && nodes.size() == 1 ? nodes[0].id : id; };
  for (GpuPlace& gpu : topology.gpus_) gpu.numa_node = known(gpu.numa_node);
  for (const std::string& name : list_names(sysfs / "class/infiniband")) {
    NicPlace nic;
    nic.name = name;
    if (const auto device = device_of(sysfs, name); !device.empty()) {
      nic.pci = pci_path(device);
      nic.numa_node = read_int(device / "numa_node").value_or(-1);
      nic.cpus = parse_cpu_list(read_line(device / "local_cpulist").value_or(""));
    }
    nic.numa_node = known(nic.numa_node);
    if (const NumaNode* node = topology.node(nic.numa_node)) nic.cpus = node->cpus;
    topology.nics_.push_back(std::move(nic));
  }
  return topology;
}

Result<Topology> Topology::open(const std::filesystem::path& sysfs,
                                const std::filesystem::path& file) {
  constexpr std::size_t kMaxBytes = 1 << 20;
  Topology topology = read(sysfs);
  if (file.empty()) return topology;
  auto text = read_settings_file(file, kMaxBytes);
  if (!text) return fail(std::move(text).error().with_context("topology file"));
  TRY_VOID(topology.apply(*text, fmt::format("topology file {}", file.string())));
  return topology;
}

const NicPlace* Topology::nic(std::string_view name) const {
  const auto it = std::ranges::find(nics_, name, &NicPlace::name);
  return it == nics_.end() ? nullptr : &*it;
}

const GpuPlace* Topology::gpu(std::string_view bus_id) const {
  const auto wanted = normalize_bus_id(bus_id);
  const auto it = std::ranges::find(gpus_, wanted.value_or(""), &GpuPlace::bus_id);
  return it == gpus_.end() ? nullptr : &*it;
}

const NumaNode* Topology::node(int id) const {
  const auto it = std::ranges::find(nodes_, id, &NumaNode::id);
  return it == nodes_.end() ? nullptr : &*it;
}

Distance Topology::distance(const NicPlace& nic, const GpuPlace& gpu) const {
  const auto [left, right] = std::ranges::mismatch(nic.pci, gpu.pci);
  const auto common = left - nic.pci.begin();
  // A device hangs below a port of the switch: it is two steps away from the common part.
  constexpr std::ptrdiff_t kOneSwitch = 2;
  if (common > 1) {
    const bool near = nic.pci.end() - left <= kOneSwitch && gpu.pci.end() - right <= kOneSwitch;
    return near ? Distance::kPix : Distance::kPxb;
  }
  // The node is asked first: a virtual machine may put everything under one root.
  const bool known = nic.numa_node >= 0 && gpu.numa_node >= 0;
  if (known && nic.numa_node != gpu.numa_node) return Distance::kSys;
  if (common == 1) return Distance::kPhb;
  return known ? Distance::kNode : Distance::kSys;
}

Distance Topology::distance(const NicPlace& nic, int numa_node) const {
  return nic.numa_node >= 0 && nic.numa_node == numa_node ? Distance::kNode : Distance::kSys;
}

int Topology::node_distance(int from, int to) const {
  constexpr int kFar = 255;  // "unreachable" in the firmware's tables
  const NumaNode* node_from = node(from);
  if (node_from == nullptr || to < 0) return kFar;
  if (from == to) return 0;
  const auto it = node_from->distances.find(to);
  return it == node_from->distances.end() ? kFar - 1 : it->second;
}

const std::vector<std::string>* Topology::listed_rails(const Place& place) const {
  if (!place.gpu.empty()) {
    const auto it = gpu_rails_.find(normalize_bus_id(place.gpu).value_or(""));
    if (it != gpu_rails_.end()) return &it->second;
  }
  const GpuPlace* const target = place.gpu.empty() ? nullptr : gpu(place.gpu);
  const int node_id = target != nullptr ? target->numa_node : place.numa_node;
  if (const auto it = node_rails_.find(node_id); it != node_rails_.end()) return &it->second;
  return any_rails_.empty() ? nullptr : &any_rails_;
}

const GpuPlace* gpu_by_uuid(const Topology& topology, const std::filesystem::path& proc,
                            std::string_view uuid) {
  const auto base = proc / "driver/nvidia/gpus";
  for (const std::string& bus_id : list_names(base)) {
    std::ifstream file(base / bus_id / "information");
    for (std::string line; std::getline(file, line);) {
      if (!line.starts_with("GPU UUID:")) continue;
      const auto begin = line.find_first_not_of(" \t", line.find(':') + 1);
      if (begin == std::string::npos || std::string_view(line).substr(begin) != uuid) break;
      return topology.gpu(bus_id);
    }
  }
  return nullptr;
}

int node_of_gpu(const Topology& topology, const std::filesystem::path& proc,
                std::string_view uuid) {
  const GpuPlace* const gpu = gpu_by_uuid(topology, proc, uuid);
  return gpu == nullptr ? -1 : gpu->numa_node;
}

Result<void> Topology::apply(std::string_view json, std::string_view name) {
  TRY(auto file, TopologyFile::parse(json, name));
  for (auto& said : file.nics) {
    const auto nic = std::ranges::find(nics_, said.name, &NicPlace::name);
    if (nic == nics_.end()) continue;
    nic->numa_node = said.numa_node.value_or(nic->numa_node);
    if (!said.cpus.empty()) {
      nic->cpus = std::move(said.cpus);
    } else if (const NumaNode* const at = node(nic->numa_node)) {
      nic->cpus = at->cpus;
    }
  }
  for (const auto& said : file.gpus) {
    const auto gpu = std::ranges::find(gpus_, said.bus_id, &GpuPlace::bus_id);
    if (gpu != gpus_.end()) gpu->numa_node = said.numa_node.value_or(gpu->numa_node);
  }
  for (auto& [gpu, rails] : file.gpu_rails) gpu_rails_[gpu] = std::move(rails);
  for (auto& [node, rails] : file.node_rails) node_rails_[node] = std::move(rails);
  if (!file.any_rails.empty()) any_rails_ = std::move(file.any_rails);
  return {};
}

namespace {

struct RailRank {
  Distance distance = Distance::kPix;
  int node_distance = 0;
  auto operator<=>(const RailRank&) const = default;
};

RailRank rank(const Topology& topology, const RailPlace& rail, const Place& place) {
  const GpuPlace* const target = place.gpu.empty() ? nullptr : topology.gpu(place.gpu);
  const int target_node = target != nullptr ? target->numa_node : place.numa_node;
  if (target == nullptr && target_node < 0) return {};  // anywhere: all are alike
  const NicPlace* const at = topology.nic(rail.device);
  if (at == nullptr) return {Distance::kSys, topology.node_distance(target_node, -1)};
  return {target != nullptr ? topology.distance(*at, *target) : topology.distance(*at, target_node),
          topology.node_distance(target_node, at->numa_node)};
}

}  // namespace

RailOrder order_rails(const Topology& topology, std::span<const RailPlace> rails,
                      const Place& place) {
  RailOrder order;
  std::vector<bool> taken(rails.size(), false);
  if (const auto* const wanted = topology.listed_rails(place)) {
    for (const std::string& name : *wanted) {
      for (std::size_t i = 0; i < rails.size(); ++i) {
        const bool named =
            name == rails[i].device || name == fmt::format("{}:{}", rails[i].device, rails[i].port);
        if (!named || taken[i]) continue;
        taken[i] = true;
        order.preferred.push_back(i);
      }
    }
  }
  std::uint64_t fastest = 0;
  for (const RailPlace& rail : rails) fastest = std::max(fastest, rail.bytes_per_second);
  struct Candidate {
    bool slow;
    RailRank rank;
    std::size_t index;
  };
  std::vector<Candidate> others;
  for (std::size_t i = 0; i < rails.size(); ++i) {
    const std::uint64_t speed = rails[i].bytes_per_second;
    if (!taken[i])
      others.push_back({speed != 0 && speed < fastest / 2, rank(topology, rails[i], place), i});
  }
  std::ranges::stable_sort(others, [](const Candidate& a, const Candidate& b) {
    return a.slow != b.slow ? b.slow : a.rank < b.rank;
  });
  const bool by_file = !order.preferred.empty();
  for (const Candidate& candidate : others) {
    const Candidate& best = others.front();
    const bool preferred = !by_file && candidate.slow == best.slow && candidate.rank == best.rank;
    (preferred ? order.preferred : order.fallback).push_back(candidate.index);
  }
  return order;
}

}  // namespace rekindle::transport::verbs
