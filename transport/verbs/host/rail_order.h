#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "transport/verbs/host/topology.h"

namespace rekindle::transport::verbs {

// A port as far as its order goes.
struct RailPlace {
  std::string device;
  std::uint8_t port = 0;
  std::uint64_t bytes_per_second = 0;  // 0: unknown
};

// Indexes into the rails that order_rails() was given, nearest first.
struct RailOrder {
  std::vector<std::size_t> preferred;
  std::vector<std::size_t> fallback;
};

// Which rails come first: by distance, speed, and the lists of the topology file. Preferred are the
// nearest ones, but those slower than half of the fastest; the others are fallback, nearer before
// slower. The topology file's own lists are followed as they stand.
RailOrder order_rails(const Topology& topology, std::span<const RailPlace> rails,
                      const Place& place);

}  // namespace rekindle::transport::verbs
