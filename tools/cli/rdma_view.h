#pragma once

#include <optional>
#include <string>
#include <vector>

#include "src/base/result.h"
#include "tools/cli/output.h"
#include "transport/verbs/host/gid.h"
#include "transport/verbs/host/hca_filter.h"
#include "transport/verbs/host/topology.h"

// The RDMA ports of this host for `topo` and `doctor`. They come from libibverbs where this build
// has it and the devices can be opened, and from sysfs otherwise.
namespace rekindle::cli {

struct RailView {
  std::string device;
  std::uint8_t port = 0;
  bool up = false;
  // Why the port is down, or why it uses this GID.
  std::string why;
  transport::verbs::LinkLayer link = transport::verbs::LinkLayer::kEthernet;
  transport::verbs::Gid gid{};
  // -1: none.
  int gid_index = -1;
  std::uint16_t lid = 0;
  std::uint64_t bytes_per_second = 0;
  // 0: unknown.
  std::uint32_t mtu_bytes = 0;
  std::string netdev;
  // Asked of the device itself.
  std::optional<bool> memory_windows;
  std::optional<bool> dmabuf;

  std::string name() const { return device + ":" + std::to_string(port); }
  // "10.0.0.3" or "LID 12"; "" for none.
  std::string address() const;
};

struct RdmaView {
  bool compiled_in = false;
  std::vector<RailView> rails;
  transport::verbs::Topology topology;
  // Why the view is from sysfs only, or empty; "" when it is complete.
  std::string lacking;
};

// kInvalid: the filter or the topology file is malformed.
Result<RdmaView> look_at_rdma(const transport::verbs::FabricOptions& options);

// From sysfs only.
Result<RdmaView> look_at_sysfs(const transport::verbs::FabricOptions& options);

Json topo_json(const RdmaView& view);
std::string topo_text(const RdmaView& view);

}  // namespace rekindle::cli
