#pragma once

#include <cstdint>
#include <map>
#include <vector>

namespace rekindle::bench {

// Links and flows in virtual time, as a fluid: the flows of a link share it max-min fairly. A flow
// may take several links at the same rate, as a ring does. Pure.
class LinkModel {
 public:
  using LinkId = std::size_t;
  using FlowId = std::uint64_t;

  LinkId add_link(double bytes_per_second);
  FlowId start(std::vector<LinkId> links, double bytes);
  // Seconds until the next flow ends; infinite without flows.
  double next_end();
  // Returns the flows that have ended.
  std::vector<FlowId> advance(double seconds);

  // Of a flow that has not ended.
  double rate(FlowId flow);
  double moved(FlowId flow) const;
  // What a link has carried.
  double carried(LinkId link) const { return links_[link].carried; }

 private:
  struct Link {
    double capacity = 0;
    double carried = 0;
    // Of one pass of share().
    double left = 0;
    std::size_t open = 0;
  };
  struct Flow {
    std::vector<LinkId> links;
    double bytes = 0;
    double moved = 0;
    double rate = 0;
    bool open = false;
  };
  void share();

  std::vector<Link> links_;
  std::map<FlowId, Flow> flows_;
  FlowId last_ = 0;
  // A flow has come or gone since the last share().
  bool changed_ = false;
};

}  // namespace rekindle::bench
