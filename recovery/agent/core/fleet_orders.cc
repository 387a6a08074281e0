#include "recovery/agent/core/fleet_orders.h"

#include <utility>

#include "recovery/rpc/convert.h"

namespace rekindle::agent {

void FleetOrders::fill(proto::HeartbeatRequest& request) {
  for (const ModelVersion& id : failed_) *request.add_failed_fetches() = rpc::to_proto(id);
  reported_ = failed_.size();
  for (const auto& [id, running] : fetching_) {
    if (running.state == Running::State::kWanted) *request.add_fetching() = rpc::to_proto(id);
  }
}

FleetOrders::Actions FleetOrders::take(const proto::HeartbeatResponse& orders,
                                       const HasWhole& has_whole) {
  failed_.erase(failed_.begin(), failed_.begin() + static_cast<std::ptrdiff_t>(reported_));
  reported_ = 0;
  drained_ = orders.drained();
  Actions actions;
  for (const auto& entry : orders.retiring()) {
    if (const auto id = rpc::from_proto(entry)) actions.draining.insert(*id);
  }
  for (const auto& entry : orders.retire()) {
    const auto id = rpc::from_proto(entry);
    if (!id) continue;
    actions.draining.insert(*id);
    if (!stopped_ && retiring_.insert(*id).second) actions.retire.push_back(*id);
  }
  take_fetches(orders, has_whole, actions);
  return actions;
}

void FleetOrders::take_fetches(const proto::HeartbeatResponse& orders, const HasWhole& has_whole,
                               Actions& actions) {
  std::set<ModelVersion> wanted;
  for (const auto& order : orders.fetch()) {
    const auto id = rpc::from_proto(order.id());
    if (!id) continue;
    wanted.insert(*id);
    const Digest root = rpc::from_proto(order.root());
    if (has_whole(*id, root)) {
      actions.announce = true;
    } else if (const auto running = fetching_.find(*id); running != fetching_.end()) {
      running->second.epoch = orders.epoch();
    } else if (!stopped_) {
      fetching_[*id] = {root, orders.epoch()};
      actions.fetch.push_back({*id, order.max_bytes_per_second()});
    }
  }
  // The coordinator that wanted a copy has given the task to another node, or there are enough
  // copies. A coordinator that has just started does not know the tasks of its predecessor yet.
  for (auto& [id, running] : fetching_) {
    const bool keep = running.state == Running::State::kCancelled ||
                      running.epoch != orders.epoch() || wanted.contains(id) ||
                      has_whole(id, running.root);
    if (keep) continue;
    running.state = Running::State::kCancelled;
    actions.cancel.push_back(id);
  }
}

bool FleetOrders::was_cancelled(const ModelVersion& id) const {
  const auto found = fetching_.find(id);
  return found != fetching_.end() && found->second.state == Running::State::kCancelled;
}

void FleetOrders::fetched(const ModelVersion& id, bool succeeded) {
  if (!succeeded && !was_cancelled(id)) failed_.push_back(id);
  fetching_.erase(id);
}

}  // namespace rekindle::agent
