#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace rekindle::scale {

using HostId = std::uint32_t;
using FlowId = std::uint32_t;

// The network as a fluid: each host has one link, full duplex, and nothing between the links is
// ever full. A direction is shared by the flows over it; what one of them cannot use, because its
// other end is the tighter one or it has a cap, the others get.
class Nics {
 public:
  Nics(std::size_t hosts, double bytes_per_second);

  // `cap`: bytes per second, 0 = none.
  FlowId open(HostId from, HostId to, double cap);
  void close(FlowId flow);
  // Only flows that want to send take part.
  void set_wants(FlowId flow, bool wants) { flows_[flow].wants = wants; }
  void set_up(HostId host, bool up) { up_[host] = up; }
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
  std::vector<Link> out_;
  std::vector<Link> in_;
  std::vector<FlowId> sharing_;
};

}  // namespace rekindle::scale
