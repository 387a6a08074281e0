#include "recovery/agent/fleet_duties.h"

#include <algorithm>

#include <boost/asio/this_coro.hpp>

#include "recovery/rpc/convert.h"
#include "src/base/clock.h"
#include "src/base/log.h"

namespace rekindle::agent {

using async::Task;

namespace {

// Of a heartbeat; the coordinator takes no more.
constexpr std::size_t kMostEvents = 64;

template <typename Ids>
std::vector<ModelVersion> valid_ids(const Ids& ids) {
  std::vector<ModelVersion> valid;
  for (const auto& entry : ids) {
    if (const auto id = rpc::from_proto(entry)) valid.push_back(*id);
  }
  return valid;
}

FleetOrders::Answer orders_from(const proto::HeartbeatResponse& response) {
  FleetOrders::Answer answer{response.epoch(),
                             response.drained(),
                             valid_ids(response.retiring()),
                             valid_ids(response.retire()),
                             {}};
  for (const auto& order : response.fetch()) {
    const auto id = rpc::from_proto(order.id());
    if (!id) continue;
    answer.fetch.push_back({*id, rpc::from_proto(order.root()), order.max_bytes_per_second()});
  }
  return answer;
}

}  // namespace

void FleetDuties::registered(const Incarnation& term) {
  // The newest ones, so that old events do not push out those of the new term.
  if (std::exchange(term_, term) != term) told_ -= std::min<std::uint64_t>(told_, kMostEvents);
}

void FleetDuties::fill(proto::HeartbeatRequest& request) {
  request.set_store_free_bytes(hooks_.free_bytes());
  for (const ModelVersion& id : served_.draining()) {
    auto& entry = *request.add_readers();
    *entry.mutable_id() = rpc::to_proto(id);
    entry.set_readers(hooks_.readers(id));
  }
  const FleetOrders::Report report = orders_.report();
  for (const ModelVersion& id : report.failed_fetches) {
    *request.add_failed_fetches() = rpc::to_proto(id);
  }
  for (const ModelVersion& id : report.fetching) *request.add_fetching() = rpc::to_proto(id);
  telling_ = told_;
  if (!events_) return;
  for (proto::FleetEvent& event : events_(told_, kMostEvents)) {
    telling_ = event.number();
    *request.add_events() = std::move(event);
  }
}

void FleetDuties::obey(const proto::HeartbeatResponse& response) {
  told_ = telling_;
  const bool was_drained = orders_.is_drained();
  const auto has_whole = [this](const ModelVersion& id, const Digest& root) {
    return std::ranges::any_of(served_.find(id), [&](const Served* served) {
      return served->complete() && served->checkpoint().root == root && served->whole();
    });
  };
  FleetOrders::Actions actions = orders_.take(orders_from(response), has_whole);
  if (orders_.is_drained() != was_drained) {
    log::info(orders_.is_drained() ? "agent.drained" : "agent.undrained");
    if (hooks_.drained) hooks_.drained(orders_.is_drained());
    if (drained_) drained_(orders_.is_drained());
  }
  served_.set_draining(std::move(actions.draining));
  for (const ModelVersion& id : actions.retire) retirements_.spawn("fleet.retire", retire(id));
  std::erase_if(fetches_, [](const auto& entry) { return entry.second->size() == 0; });
  for (const auto& order : actions.fetch) {
    log::info("replica.fetch", "version", order.id.to_string(), "max_bytes_per_second",
              order.max_bytes_per_second);
    auto& task = fetches_[order.id];
    if (task == nullptr) task = std::make_unique<async::TaskGroup>(executor_);
    task->spawn("fleet.fetch", fetch(order.id));
  }
  for (const ModelVersion& id : actions.cancel) {
    log::info("replica.unwanted", "version", id.to_string());
    if (const auto task = fetches_.find(id); task != fetches_.end()) task->second->cancel();
  }
  if (actions.announce) hooks_.announce_soon();
}

Task<void> FleetDuties::retire(ModelVersion id) {
  auto done = co_await hooks_.retire(id);
  // The version may be gone although the coordinator has not heard of it yet.
  if (!done && done.error().code() != ErrorCode::kNotFound) {
    log::warn("retire.failed", "version", id.to_string(), "error", done.error());
  }
  orders_.retired(id);
  hooks_.announce_soon();
}

Task<void> FleetDuties::fetch(ModelVersion id) {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  auto done = co_await hooks_.fetch(id);
  if (!done && !orders_.was_cancelled(id)) {
    log::warn("replica.failed", "version", id.to_string(), "error", done.error());
  }
  orders_.fetched(id, done.has_value());
}

Task<void> FleetDuties::stop(std::chrono::milliseconds deadline) {
  orders_.stop();
  const TimePoint give_up = steady_now() + deadline;
  for (auto& [id, task] : fetches_) task->cancel();
  for (auto& [id, task] : fetches_) (void)co_await task->join(give_up - steady_now());
  (void)co_await retirements_.join(give_up - steady_now());
}

}  // namespace rekindle::agent
