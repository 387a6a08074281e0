#include <functional>
#include <memory>

#include "tools/cli/cli_session.h"
#include "tools/cli/command_line.h"
#include "tools/cli/output.h"
#include "tools/cli/rdma_view.h"
#include "transport/verbs/host/topology.h"

namespace rekindle::cli {

namespace verbs = transport::verbs;

namespace {

std::vector<verbs::RailPlace> places_of(const RdmaView& view) {
  std::vector<verbs::RailPlace> places;
  for (const RailView& rail : view.rails) {
    places.push_back({rail.device, rail.port, rail.bytes_per_second});
  }
  return places;
}

int numa_of(const RdmaView& view, const RailView& rail) {
  const verbs::NicPlace* const nic = view.topology.nic(rail.device);
  return nic == nullptr ? -1 : nic->numa_node;
}

std::string speed_text(std::uint64_t bytes_per_second) {
  if (bytes_per_second == 0) return "?";
  return fmt::format("{} Gb/s", static_cast<double>(bytes_per_second) * 8 / 1e9);
}

std::string number_or_dash(std::int64_t value) { return value < 0 ? "-" : std::to_string(value); }

// One line of the matrix: a GPU or NUMA node that wants bytes near it.
struct Target {
  std::string kind, name;
  int numa_node;
  verbs::Place place;
  std::function<std::string(const RailView&)> distance;
};

std::vector<Target> targets_of(const RdmaView& view) {
  const verbs::Topology& topology = view.topology;
  std::vector<Target> targets;
  for (const verbs::GpuPlace& gpu : topology.gpus()) {
    targets.push_back({"gpu",
                       gpu.bus_id,
                       gpu.numa_node,
                       {.gpu = gpu.bus_id},
                       [&topology, &gpu](const RailView& rail) -> std::string {
                         const verbs::NicPlace* const nic = topology.nic(rail.device);
                         return std::string(
                             nic == nullptr ? "?" : to_string(topology.distance(*nic, gpu)));
                       }});
  }
  for (const NumaNode& node : topology.nodes()) {
    targets.push_back({"node",
                       std::to_string(node.id),
                       node.id,
                       {.numa_node = node.id},
                       [&topology, id = node.id](const RailView& rail) -> std::string {
                         const verbs::NicPlace* const nic = topology.nic(rail.device);
                         return std::string(nic == nullptr || nic->numa_node < 0
                                                ? "?"
                                                : to_string(topology.distance(*nic, id)));
                       }});
  }
  return targets;
}

std::vector<std::string> names_of(const RdmaView& view, const std::vector<std::size_t>& order) {
  std::vector<std::string> names;
  for (const std::size_t index : order) names.push_back(printable(view.rails[index].name()));
  return names;
}

Json rail_json(const RdmaView& view, const RailView& rail) {
  Json json = {{"rail", rail.name()},
               {"device", rail.device},
               {"port", rail.port},
               {"state", rail.up ? "up" : "down"},
               {"why", rail.why},
               {"link_layer", to_string(rail.link)},
               {"bytes_per_second", rail.bytes_per_second},
               {"address", rail.address()}};
  json["gid"] = rail.gid_index < 0 ? Json() : Json(verbs::format_gid(rail.gid));
  json["gid_index"] = rail.gid_index < 0 ? Json() : Json(rail.gid_index);
  json["lid"] = rail.lid;
  json["mtu_bytes"] = rail.mtu_bytes == 0 ? Json() : Json(rail.mtu_bytes);
  json["numa_node"] = numa_of(view, rail) < 0 ? Json() : Json(numa_of(view, rail));
  json["netdev"] = rail.netdev;
  json["memory_windows"] = rail.memory_windows ? Json(*rail.memory_windows) : Json();
  json["dmabuf"] = rail.dmabuf ? Json(*rail.dmabuf) : Json();
  return json;
}

std::string rail_table(const RdmaView& view) {
  std::vector<std::vector<std::string>> rows;
  for (const RailView& rail : view.rails) {
    const std::string address = rail.address();
    rows.push_back(
        {printable(rail.name()), rail.up ? "up" : "down", std::string(to_string(rail.link)),
         speed_text(rail.bytes_per_second),
         rail.mtu_bytes == 0 ? "?" : std::to_string(rail.mtu_bytes),
         number_or_dash(numa_of(view, rail)), rail.netdev.empty() ? "-" : printable(rail.netdev),
         number_or_dash(rail.gid_index), address.empty() ? "-" : address, printable(rail.why)});
  }
  return table({{"rail"},
                {"state"},
                {"link"},
                {"speed", true},
                {"mtu", true},
                {"node", true},
                {"netdev"},
                {"gid", true},
                {"address"},
                {"why"}},
               rows);
}

std::string distance_table(const RdmaView& view, const std::vector<Target>& targets) {
  const auto places = places_of(view);
  std::vector<Column> columns = {{"near"}, {"node", true}};
  for (const RailView& rail : view.rails) columns.push_back({printable(rail.name())});
  columns.push_back({"preferred"});
  std::vector<std::vector<std::string>> rows;
  for (const Target& target : targets) {
    std::vector<std::string> row = {printable(target.kind + " " + target.name),
                                    number_or_dash(target.numa_node)};
    for (const RailView& rail : view.rails) row.push_back(target.distance(rail));
    std::string preferred;
    for (const auto& name :
         names_of(view, verbs::order_rails(view.topology, places, target.place).preferred)) {
      preferred += (preferred.empty() ? "" : " ") + name;
    }
    row.push_back(std::move(preferred));
    rows.push_back(std::move(row));
  }
  return table(columns, rows);
}

}  // namespace

Json topo_json(const RdmaView& view) {
  const auto places = places_of(view);
  Json json = {{"libibverbs", view.compiled_in}, {"lacking", view.lacking}};
  json["rails"] = Json::array();
  json["gpus"] = Json::array();
  json["nodes"] = Json::array();
  for (const RailView& rail : view.rails) json["rails"].push_back(rail_json(view, rail));
  for (const Target& target : targets_of(view)) {
    const bool gpu = target.kind == "gpu";
    Json entry;
    if (gpu) entry["gpu"] = target.name;
    entry["numa_node"] = target.numa_node < 0 ? Json() : Json(target.numa_node);
    entry["distances"] = Json::object();
    for (const RailView& rail : view.rails) entry["distances"][rail.name()] = target.distance(rail);
    const verbs::RailOrder order = verbs::order_rails(view.topology, places, target.place);
    entry["preferred"] = names_of(view, order.preferred);
    entry["fallback"] = names_of(view, order.fallback);
    json[gpu ? "gpus" : "nodes"].push_back(std::move(entry));
  }
  const verbs::RailOrder anywhere = verbs::order_rails(view.topology, places, {});
  json["preferred"] = names_of(view, anywhere.preferred);
  json["fallback"] = names_of(view, anywhere.fallback);
  return json;
}

std::string topo_text(const RdmaView& view) {
  std::string text;
  if (!view.rails.empty()) text += rail_table(view);
  if (const auto targets = targets_of(view); !targets.empty()) {
    if (!text.empty()) text += "\n";
    text += distance_table(view, targets);
    if (!view.rails.empty()) {
      text +=
          "\nPIX: at most one PCIe switch between them; PXB: several; PHB: the CPU's PCIe root; "
          "NODE: the\nsame NUMA node; SYS: another node.\n";
    }
  }
  if (!view.lacking.empty()) text += fmt::format("note: {}\n", printable(view.lacking));
  return text;
}

void add_topo(Command& app, Session& session) {
  Command sub = app.command(
      "topo",
      "Show RDMA ports, GPUs and NUMA nodes and which are near each other. Says for each port "
      "which\n"
      "address is used and why, and for each GPU and node which ports are used first.");
  auto options = std::make_shared<transport::verbs::FabricOptions>();
  add_fabric_options(sub, *options);
  sub.runs(session, "topo", [&session, options]() -> Result<int> {
    TRY(const RdmaView view, look_at_rdma(*options));
    print_result(session.settings.json, topo_json(view), topo_text(view));
    return kExitOk;
  });
}

}  // namespace rekindle::cli
