#include "recovery/swarm/slice_order.h"

#include <cstring>
#include <utility>

namespace rekindle::swarm {

using transport::SliceIndex;

namespace {

// splitmix64: a few instructions, and every bit of the seed counts.
std::uint64_t next_random(std::uint64_t& state) {
  state += 0x9e3779b97f4a7c15u;
  std::uint64_t value = state;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

}  // namespace

std::uint64_t order_seed(const Incarnation& incarnation) {
  std::uint64_t halves[2];
  std::memcpy(halves, incarnation.bytes.data(), sizeof halves);
  std::uint64_t state = halves[0] ^ (halves[1] << 1);
  return next_random(state);
}

std::vector<SliceIndex> slice_order(const planner::Plan& plan, std::uint64_t seed) {
  std::vector<std::pair<SliceIndex, SliceIndex>> buckets;
  for (SliceIndex slice = 0; slice < plan.slice_count(); ++slice) {
    const bool begins = slice == 0 || plan.bucket(slice) != plan.bucket(slice - 1);
    if (begins) buckets.emplace_back(slice, slice);
    buckets.back().second = slice + 1;
  }
  for (std::size_t i = buckets.size(); i > 1; --i) {
    std::swap(buckets[i - 1], buckets[next_random(seed) % i]);
  }
  std::vector<SliceIndex> order;
  order.reserve(plan.slice_count());
  for (const auto& [begin, end] : buckets) {
    for (SliceIndex slice = begin; slice < end; ++slice) order.push_back(slice);
  }
  return order;
}

}  // namespace rekindle::swarm
