#include <algorithm>
#include <compare>

#include "transport/verbs/topology.h"

// Which rails first: distance, speed, and what the topology file wants.
namespace rekindle::transport::verbs {

struct Topology::Rank {
  Distance distance = Distance::kPix;
  int node_distance = 0;
  auto operator<=>(const Rank&) const = default;
};

Topology::Rank Topology::rank(const RailPlace& rail, const Place& place) const {
  const GpuPlace* const target = place.gpu.empty() ? nullptr : gpu(place.gpu);
  const int target_node = target != nullptr ? target->numa_node : place.numa_node;
  if (target == nullptr && target_node < 0) return {};  // anywhere: all are alike
  const NicPlace* const at = nic(rail.device);
  if (at == nullptr) return {Distance::kSys, node_distance(target_node, -1)};
  return {target != nullptr ? distance(*at, *target) : distance(*at, target_node),
          node_distance(target_node, at->numa_node)};
}

const std::vector<std::string>* Topology::preference(const Place& place) const {
  if (!place.gpu.empty()) {
    const auto it = gpu_rails_.find(normalize_bus_id(place.gpu).value_or(""));
    if (it != gpu_rails_.end()) return &it->second;
  }
  const GpuPlace* const target = place.gpu.empty() ? nullptr : gpu(place.gpu);
  const int node_id = target != nullptr ? target->numa_node : place.numa_node;
  if (const auto it = node_rails_.find(node_id); it != node_rails_.end()) return &it->second;
  return any_rails_.empty() ? nullptr : &any_rails_;
}

RailOrder Topology::order_rails(std::span<const RailPlace> rails, const Place& place) const {
  RailOrder order;
  std::vector<bool> taken(rails.size(), false);
  if (const auto* const wanted = preference(place)) {
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
    Rank rank;
    std::size_t index;
  };
  std::vector<Candidate> others;
  for (std::size_t i = 0; i < rails.size(); ++i) {
    const std::uint64_t speed = rails[i].bytes_per_second;
    if (!taken[i]) others.push_back({speed != 0 && speed < fastest / 2, rank(rails[i], place), i});
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
