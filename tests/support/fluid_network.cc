#include "tests/support/fluid_network.h"

#include <algorithm>

namespace rekindle::testing {

namespace {

// Each round gives every flow an equal part of the rest at its tighter end. After a few rounds the
// links that can be full are full, to a percent.
constexpr int kRounds = 8;
// A round that gives less than this part of one link is the last.
constexpr double kEnough = 0.005;

}  // namespace

FluidNetwork::FluidNetwork(std::size_t hosts, double bytes_per_second)
    : bytes_per_second_(bytes_per_second),
      up_(hosts, true),
      upload_(hosts, 1),
      out_(hosts),
      in_(hosts) {}

FlowId FluidNetwork::open(HostId from, HostId to, double cap) {
  FlowId id = 0;
  if (free_.empty()) {
    id = static_cast<FlowId>(flows_.size());
    flows_.emplace_back();
  } else {
    id = free_.back();
    free_.pop_back();
  }
  flows_[id] = {from, to, cap, 0, true, false};
  return id;
}

void FluidNetwork::close(FlowId flow) {
  flows_[flow] = {};
  free_.push_back(flow);
}

// One round; returns the sum of what it gave.
double FluidNetwork::fill() {
  for (auto* links : {&out_, &in_}) {
    for (Link& link : *links) link.flows = 0;
  }
  std::erase_if(sharing_, [&](FlowId id) {
    const Flow& flow = flows_[id];
    const bool done = (flow.cap > 0 && flow.rate >= flow.cap) || out_[flow.from].left <= 0 ||
                      in_[flow.to].left <= 0;
    if (!done) {
      ++out_[flow.from].flows;
      ++in_[flow.to].flows;
    }
    return done;
  });
  double given = 0;
  std::vector<double> parts;
  parts.reserve(sharing_.size());
  for (const FlowId id : sharing_) {
    const Flow& flow = flows_[id];
    const Link& out = out_[flow.from];
    const Link& in = in_[flow.to];
    double part = std::min(out.left / out.flows, in.left / in.flows);
    if (flow.cap > 0) part = std::min(part, flow.cap - flow.rate);
    parts.push_back(part);
  }
  for (std::size_t i = 0; i < sharing_.size(); ++i) {
    Flow& flow = flows_[sharing_[i]];
    flow.rate += parts[i];
    out_[flow.from].left -= parts[i];
    in_[flow.to].left -= parts[i];
    given += parts[i];
  }
  return given;
}

void FluidNetwork::share() {
  for (std::size_t host = 0; host < up_.size(); ++host) {
    out_[host].left = bytes_per_second_ * upload_[host];
    in_[host].left = bytes_per_second_;
  }
  sharing_.clear();
  for (FlowId id = 0; id < flows_.size(); ++id) {
    Flow& flow = flows_[id];
    flow.rate = 0;
    if (flow.open && flow.wants && up_[flow.from] && up_[flow.to]) sharing_.push_back(id);
  }
  for (int round = 0; round < kRounds && !sharing_.empty(); ++round) {
    if (fill() < kEnough * bytes_per_second_) break;
  }
}

}  // namespace rekindle::testing
