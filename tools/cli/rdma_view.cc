#include "tools/cli/rdma_view.h"

#include <algorithm>

#include "transport/verbs/host/hca_filter.h"
#include "transport/verbs/host/sysfs.h"

#if REKINDLE_WITH_VERBS
#include "transport/verbs/device/fabric.h"
#include "transport/verbs/memory/device_share.h"
#endif

namespace rekindle::cli {

namespace verbs = transport::verbs;

namespace {

RailView view_of(const verbs::PortView& port, int gid_index) {
  RailView rail;
  rail.device = port.device;
  rail.port = port.port;
  rail.link = port.link;
  rail.lid = port.lid;
  rail.bytes_per_second = port.bytes_per_second;
  if (!port.netdevs.empty()) rail.netdev = port.netdevs.begin()->second;
  const auto choice = verbs::choose_gid(port.gids, port.link, gid_index);
  if (choice) {
    rail.gid = choice->gid;
    rail.gid_index = choice->index;
    const auto it = port.netdevs.find(choice->index);
    if (it != port.netdevs.end()) rail.netdev = it->second;
  }
  rail.up = port.state == "ACTIVE" && choice;
  rail.why = port.state != "ACTIVE" ? "port " + port.state
             : choice               ? choice->why
                                    : choice.error().message();
  return rail;
}

}  // namespace

std::string RailView::address() const {
  if (link == verbs::LinkLayer::kInfiniBand) return lid == 0 ? "" : "LID " + std::to_string(lid);
  return gid_index < 0 ? "" : verbs::format_gid(gid);
}

Result<RdmaView> look_at_sysfs(const verbs::FabricOptions& options) {
  TRY(const verbs::HcaFilter filter, verbs::HcaFilter::parse(options.hca));
  RdmaView view;
  TRY(view.topology, verbs::Topology::open(options.sysfs, options.topology_file));
  const auto ports = verbs::read_ports(options.sysfs);
  for (const verbs::PortView& port : ports) {
    if (!filter.allows(port.device, port.port)) continue;
    view.rails.push_back(view_of(port, options.gid_index));
  }
  if (ports.empty()) {
    view.lacking = "no RDMA device";
  } else if (view.rails.empty()) {
    view.lacking = fmt::format("--hca '{}' matches none of the ports", options.hca);
  }
  return view;
}

#if REKINDLE_WITH_VERBS

namespace {

// Replaces the guesses from sysfs by the facts of the opened device.
void overlay(RailView& view, const verbs::Rail& rail, bool dmabuf) {
  const verbs::Rail::State state = rail.state();
  view.device = rail.device().name();
  view.port = rail.port();
  if (!state.up) view.why = state.why_down;
  view.up = state.up;
  view.link = state.address.link;
  if (state.up) {
    view.gid = state.address.gid;
    view.gid_index = state.address.gid_index;
    view.lid = state.address.lid;
  }
  view.bytes_per_second = state.bytes_per_second;
  view.mtu_bytes = state.mtu_bytes;
  view.memory_windows = rail.device().limits().memory_windows_2b;
  view.dmabuf = dmabuf;
}

}  // namespace

Result<RdmaView> look_at_rdma(const verbs::FabricOptions& options) {
  TRY(RdmaView view, look_at_sysfs(options));
  view.compiled_in = true;
  const auto api = verbs::make_system_api();
  TRY(const auto fabric, verbs::Fabric::open(*api, options));
  if (fabric->rails().empty()) {
    view.lacking = fabric->why_empty();
    return view;
  }
  std::vector<RailView> rails;
  for (const auto& device : fabric->devices()) {
    const bool dmabuf = verbs::takes_dmabuf(*device);
    for (const auto& rail : fabric->rails()) {
      if (&rail->device() != device.get()) continue;
      RailView& own = rails.emplace_back();
      const auto known = std::ranges::find(view.rails, rail->name(), &RailView::name);
      if (known != view.rails.end()) own = *known;
      overlay(own, *rail, dmabuf);
    }
  }
  view.rails = std::move(rails);
  return view;
}

#else

Result<RdmaView> look_at_rdma(const verbs::FabricOptions& options) {
  TRY(RdmaView view, look_at_sysfs(options));
  view.lacking += view.lacking.empty() ? "" : "; ";
  view.lacking += "this build has no libibverbs: only what sysfs has";
  return view;
}

#endif

}  // namespace rekindle::cli
