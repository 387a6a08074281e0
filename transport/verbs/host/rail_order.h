#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "transport/verbs/host/topology.h"

namespace rekindle::transport::verbs {

// The facts about a port that decide its place in the order.
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

// Orders rails by distance and speed. The nearest ones that have at least half of the fastest one's
// speed are preferred. The others are fallback, slow ones last. A list of the topology file is
// followed as it stands.
RailOrder order_rails(const Topology& topology, std::span<const RailPlace> rails,
                      const Place& place);

}  // namespace rekindle::transport::verbs
