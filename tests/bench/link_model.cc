#include "tests/bench/link_model.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace rekindle::bench {

namespace {
// A flow with less than a byte left has ended: rates are not exact.
constexpr double kDone = 1.0;
constexpr double kNever = std::numeric_limits<double>::infinity();
}  // namespace

LinkModel::LinkId LinkModel::add_link(double bytes_per_second) {
  links_.push_back({bytes_per_second, 0, 0, 0});
  return links_.size() - 1;
}

LinkModel::FlowId LinkModel::start(std::vector<LinkId> links, double bytes) {
  changed_ = true;
  flows_[++last_] = {std::move(links), bytes, 0, 0, false};
  return last_;
}

// Fills the links evenly. Each pass fixes the flows of the links that are full first.
void LinkModel::share() {
  if (!std::exchange(changed_, false)) return;
  for (Link& link : links_) {
    link.left = link.capacity;
    link.open = 0;
  }
  std::size_t open = flows_.size();
  for (auto& [id, flow] : flows_) {
    flow.open = true;
    for (const LinkId link : flow.links) ++links_[link].open;
  }
  while (open > 0) {
    double level = kNever;
    for (const Link& link : links_) {
      if (link.open > 0) level = std::min(level, link.left / static_cast<double>(link.open));
    }
    const double limit = level * (1 + 1e-9);
    std::vector<bool> full(links_.size());
    for (LinkId i = 0; i < links_.size(); ++i) {
      full[i] = links_[i].open > 0 && links_[i].left / static_cast<double>(links_[i].open) <= limit;
    }
    for (auto& [id, flow] : flows_) {
      if (!flow.open) continue;
      if (std::ranges::none_of(flow.links, [&](LinkId link) { return full[link]; })) continue;
      flow.open = false;
      flow.rate = level;
      --open;
      for (const LinkId link : flow.links) {
        links_[link].left = std::max(0.0, links_[link].left - level);
        --links_[link].open;
      }
    }
  }
}

double LinkModel::next_end() {
  share();
  double next = kNever;
  for (const auto& [id, flow] : flows_) {
    next = std::min(next, std::max(0.0, flow.bytes - flow.moved) / flow.rate);
  }
  return next;
}

std::vector<LinkModel::FlowId> LinkModel::advance(double seconds) {
  share();
  std::vector<FlowId> ended;
  for (auto& [id, flow] : flows_) {
    const double bytes = std::min(flow.rate * seconds, flow.bytes - flow.moved);
    flow.moved += bytes;
    for (const LinkId link : flow.links) links_[link].carried += bytes;
    if (flow.bytes - flow.moved < kDone) ended.push_back(id);
  }
  for (const FlowId id : ended) flows_.erase(id);
  changed_ = changed_ || !ended.empty();
  return ended;
}

double LinkModel::rate(FlowId flow) {
  share();
  return flows_.at(flow).rate;
}

double LinkModel::moved(FlowId flow) const { return flows_.at(flow).moved; }

}  // namespace rekindle::bench
