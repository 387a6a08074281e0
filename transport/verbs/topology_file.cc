#include <algorithm>
#include <charconv>

#include <nlohmann/json.hpp>

#include "transport/verbs/sysfs.h"
#include "transport/verbs/topology.h"

// The topology file: JSON, checked to the last key, since a typing error that is ignored looks
// like a slow network.
namespace rekindle::transport::verbs {

using Json = nlohmann::json;

class TopologyFile {
 public:
  TopologyFile(Topology& topology, std::string_view name) : topology_(topology), name_(name) {}

  Result<void> apply(const Json& root) {
    TRY_VOID(object("", root));
    for (const auto& [key, value] : root.items()) {
      if (key == "nics") {
        TRY_VOID(each(key, value, &TopologyFile::nic));
      } else if (key == "gpus") {
        TRY_VOID(each(key, value, &TopologyFile::gpu));
      } else if (key == "nodes") {
        TRY_VOID(each(key, value, &TopologyFile::node));
      } else if (key == "preferred") {
        TRY(topology_.any_rails_, names(key, value));
      } else {
        return wrong(key, "is not known; use nics, gpus, nodes or preferred");
      }
    }
    return {};
  }

 private:
  using Section = Result<void> (TopologyFile::*)(const std::string& where, const std::string& name,
                                                 const Json& value);

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
    NicPlace ignored;
    const auto it = std::ranges::find(topology_.nics_, name, &NicPlace::name);
    NicPlace& place = it == topology_.nics_.end() ? ignored : *it;
    bool own_cpus = false;
    for (const auto& [key, entry] : value.items()) {
      const std::string at = fmt::format("{}.{}", where, key);
      if (key == "numa_node") {
        TRY(place.numa_node, node_id(at, entry));
      } else if (key == "cpus") {
        place.cpus =
            entry.is_string() ? parse_cpu_list(entry.get<std::string>()) : std::vector<int>();
        if (place.cpus.empty()) return wrong(at, "must be a list of CPUs: \"0-15,32\"");
        own_cpus = true;
      } else {
        return wrong(at, "is not known; use numa_node or cpus");
      }
    }
    if (const NumaNode* at = topology_.node(place.numa_node); at != nullptr && !own_cpus) {
      place.cpus = at->cpus;
    }
    return {};
  }

  Result<void> gpu(const std::string& where, const std::string& name, const Json& value) {
    const auto bus_id = normalize_bus_id(name);
    if (!bus_id) return wrong(where, "must be a PCI bus id: 0000:1b:00.0");
    GpuPlace ignored;
    const auto it = std::ranges::find(topology_.gpus_, *bus_id, &GpuPlace::bus_id);
    GpuPlace& place = it == topology_.gpus_.end() ? ignored : *it;
    for (const auto& [key, entry] : value.items()) {
      const std::string at = fmt::format("{}.{}", where, key);
      if (key == "numa_node") {
        TRY(place.numa_node, node_id(at, entry));
      } else if (key == "preferred") {
        TRY(topology_.gpu_rails_[*bus_id], names(at, entry));
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
      TRY(topology_.node_rails_[id], names(at, entry));
    }
    return {};
  }

  Topology& topology_;
  std::string_view name_;
};

namespace {

// The library's message has its own prefix; line and column are what a reader needs.
std::string position_of(std::string_view text, std::size_t byte) {
  const std::string_view before = text.substr(0, byte == 0 ? 0 : byte - 1);
  const auto line = 1 + std::ranges::count(before, '\n');
  const auto last = before.rfind('\n');
  const auto column = before.size() - (last == std::string_view::npos ? 0 : last + 1) + 1;
  return fmt::format("line {}, column {}", line, column);
}

}  // namespace

Result<void> Topology::apply(std::string_view json, std::string_view name) {
  try {
    const Json root = Json::parse(json);
    Topology changed = *this;
    TRY_VOID(TopologyFile(changed, name).apply(root));
    *this = std::move(changed);
    return {};
  } catch (const Json::parse_error& error) {
    return fail(ErrorCode::kInvalid, "{}: not JSON at {}", name, position_of(json, error.byte));
  }
}

}  // namespace rekindle::transport::verbs
