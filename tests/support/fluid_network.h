#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace rekindle::testing {

using HostId = std::uint32_t;
using FlowId = std::uint32_t;

// The network as a fluid, for simulations: each host has one link, full duplex, and nothing between
// the links is ever full. The flows of one direction share it. When a flow cannot use its part,
// because its other end is tighter or it has a cap, the others get the rest (max-min fair, to a
// percent).
class FluidNetwork {
 public:
  FluidNetwork(std::size_t hosts, double bytes_per_second);

  // `cap`: bytes per second; 0 is none.
  FlowId open(HostId from, HostId to, double cap);
  void close(FlowId flow);
  // Only flows that want to send get a rate.
  void set_wants(FlowId flow, bool wants) { flows_[flow].wants = wants; }
  void set_up(HostId host, bool up) { up_[host] = up; }
  // The host sends at this part of its link's rate.
  void set_upload(HostId host, double part) { upload_[host] = part; }
  // Computes the rates of all flows.
  void share();
  double rate(FlowId flow) const { return flows_[flow].rate; }

 private:
  struct Flow {
    HostId from = 0;
    HostId to = 0;
    double cap = 0;
    double rate = 0;
    bool open = false;
    bool wants = false;
  };
  struct Link {
    double left = 0;
    std::uint32_t flows = 0;
  };
  double fill();

  const double bytes_per_second_;
  std::vector<Flow> flows_;
  std::vector<FlowId> free_;
  std::vector<bool> up_;
  std::vector<double> upload_;
  std::vector<Link> out_;
  std::vector<Link> in_;
  std::vector<FlowId> sharing_;
};

}  // namespace rekindle::testing
