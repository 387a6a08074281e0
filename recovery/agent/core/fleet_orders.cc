#include "recovery/agent/core/fleet_orders.h"

#include <utility>

namespace rekindle::agent {

FleetOrders::Report FleetOrders::report() {
  Report report{failed_, {}};
  reported_ = failed_.size();
  for (const auto& [id, running] : fetching_) {
    if (running.state == Running::State::kWanted) report.fetching.push_back(id);
  }
  return report;
}

FleetOrders::Actions FleetOrders::take(const Answer& answer, const HasWhole& has_whole) {
  failed_.erase(failed_.begin(), failed_.begin() + static_cast<std::ptrdiff_t>(reported_));
  reported_ = 0;
  drained_ = answer.drained;
  Actions actions;
  actions.draining.insert(answer.retiring.begin(), answer.retiring.end());
  for (const ModelVersion& id : answer.retire) {
    actions.draining.insert(id);
    if (!stopped_ && retiring_.insert(id).second) actions.retire.push_back(id);
  }
  take_fetches(answer, has_whole, actions);
  return actions;
}

void FleetOrders::take_fetches(const Answer& answer, const HasWhole& has_whole, Actions& actions) {
  std::set<ModelVersion> wanted;
  for (const Answer::WantedCopy& copy : answer.fetch) {
    wanted.insert(copy.id);
    if (has_whole(copy.id, copy.root)) {
      actions.announce = true;
    } else if (const auto running = fetching_.find(copy.id); running != fetching_.end()) {
      running->second.epoch = answer.epoch;
    } else if (!stopped_) {
      fetching_[copy.id] = {copy.root, answer.epoch};
      actions.fetch.push_back({copy.id, copy.max_bytes_per_second});
    }
  }
  // The coordinator that wanted a copy has given the task to another node, or there are enough
  // copies. A coordinator that has just started does not know the tasks of its predecessor yet.
  for (auto& [id, running] : fetching_) {
    const bool keep = running.state == Running::State::kCancelled ||
                      running.epoch != answer.epoch || wanted.contains(id) ||
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
