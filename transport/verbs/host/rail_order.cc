#include "transport/verbs/host/rail_order.h"

#include <algorithm>
#include <compare>

namespace rekindle::transport::verbs {

namespace {

struct RailRank {
  Distance distance = Distance::kPix;
  int node_distance = 0;
  auto operator<=>(const RailRank&) const = default;
};

RailRank rank(const Topology& topology, const RailPlace& rail, const Place& place) {
  const GpuPlace* const target = place.gpu.empty() ? nullptr : topology.gpu(place.gpu);
  const int target_node = target != nullptr ? target->numa_node : place.numa_node;
  if (target == nullptr && target_node < 0) return {};  // anywhere: all are alike
  const NicPlace* const at = topology.nic(rail.device);
  if (at == nullptr) return {Distance::kSys, topology.node_distance(target_node, -1)};
  return {target != nullptr ? topology.distance(*at, *target) : topology.distance(*at, target_node),
          topology.node_distance(target_node, at->numa_node)};
}

}  // namespace

RailOrder order_rails(const Topology& topology, std::span<const RailPlace> rails,
                      const Place& place) {
  RailOrder order;
  std::vector<bool> taken(rails.size(), false);
  if (const auto* const wanted = topology.listed_rails(place)) {
    for (const std::string& name : *wanted) {
      for (std::size_t i = 0; i < rails.size(); ++i) {
        const bool named =
            name == rails[i].device || name == fmt::format("{}:{}", rails[i].device, rails[i].port);
        if (!named || taken[i]) continue;
        taken[i] = true;
        order.preferred.push_back(i);
      }
    }
  }
  std::uint64_t fastest = 0;
  for (const RailPlace& rail : rails) fastest = std::max(fastest, rail.bytes_per_second);
  struct Candidate {
    bool slow;
    RailRank rank;
    std::size_t index;
  };
  std::vector<Candidate> others;
  for (std::size_t i = 0; i < rails.size(); ++i) {
    const std::uint64_t speed = rails[i].bytes_per_second;
    if (!taken[i])
      others.push_back({speed != 0 && speed < fastest / 2, rank(topology, rails[i], place), i});
  }
  std::ranges::stable_sort(others, [](const Candidate& a, const Candidate& b) {
    return a.slow != b.slow ? b.slow : a.rank < b.rank;
  });
  const bool by_file = !order.preferred.empty();
  for (const Candidate& candidate : others) {
    const Candidate& best = others.front();
    const bool preferred = !by_file && candidate.slow == best.slow && candidate.rank == best.rank;
    (preferred ? order.preferred : order.fallback).push_back(candidate.index);
  }
  return order;
}

}  // namespace rekindle::transport::verbs
