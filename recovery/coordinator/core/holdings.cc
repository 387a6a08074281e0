#include "recovery/coordinator/core/holdings.h"

#include <algorithm>

namespace rekindle::coordinator {

namespace {
HoldingKey key_of(const Holding& holding) { return {holding.id, holding.layout}; }
}  // namespace

std::ranges::subrange<Holdings::Map::const_iterator> Holdings::of(const ModelVersion& id) const {
  const auto begin = all_.lower_bound({id, {}});
  auto end = begin;
  while (end != all_.end() && end->first.id == id) ++end;
  return {begin, end};
}

bool Holdings::holds_whole(const ModelVersion& id, const Digest& root) const {
  return std::ranges::any_of(of(id), [&](const auto& entry) {
    const Holding& holding = entry.second;
    return holding.whole && holding.counts() && holding.root == root;
  });
}

bool Holdings::holds_a_complete_layout(const ModelVersion& id) const {
  return std::ranges::any_of(of(id), [](const auto& entry) { return entry.second.counts(); });
}

void Holdings::put(Holding holding) { all_[key_of(holding)] = std::move(holding); }

void Holdings::put_pending(Holding holding) { pending_[key_of(holding)] = std::move(holding); }

void Holdings::erase(const HoldingKey& key) {
  all_.erase(key);
  pending_.erase(key);
}

void Holdings::clear() {
  all_.clear();
  pending_.clear();
}

}  // namespace rekindle::coordinator
