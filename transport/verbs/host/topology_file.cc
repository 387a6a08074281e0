#include "transport/verbs/host/topology_file.h"

#include <algorithm>
#include <charconv>

#include <nlohmann/json.hpp>

#include "transport/verbs/host/sysfs.h"
#include "transport/verbs/host/topology.h"

namespace rekindle::transport::verbs {

namespace {

using Json = nlohmann::json;

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

// A reader needs line and column. The library's own message has a prefix of its own.
std::string position_of(std::string_view text, std::size_t byte) {
  const std::string_view before = text.substr(0, byte == 0 ? 0 : byte - 1);
  const auto line = 1 + std::ranges::count(before, '\n');
  const auto last = before.rfind('\n');
  const auto column = before.size() - (last == std::string_view::npos ? 0 : last + 1) + 1;
  return fmt::format("line {}, column {}", line, column);
}

}  // namespace

Result<TopologyFile> TopologyFile::parse(std::string_view json, std::string_view name) {
  try {
    return TopologyParser(name).parse(Json::parse(json));
  } catch (const Json::parse_error& error) {
    return fail(ErrorCode::kInvalid, "{}: not JSON at {}", name, position_of(json, error.byte));
  }
}

}  // namespace rekindle::transport::verbs
