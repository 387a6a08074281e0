#include "recovery/agent/fleet_duties.h"

#include <algorithm>
#include <utility>

#include <boost/asio/bind_cancellation_slot.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/this_coro.hpp>

#include "recovery/agent/announced.h"
#include "recovery/rpc/convert.h"
#include "src/async/task.h"
#include "src/base/log.h"

namespace rekindle::agent {

using async::Task;

FleetDuties::FleetDuties(boost::asio::any_io_executor executor, ServedVersions& served, Hooks hooks)
    : executor_(std::move(executor)), served_(served), hooks_(std::move(hooks)) {}

void FleetDuties::fill(proto::HeartbeatRequest& request) {
  request.set_store_free_bytes(hooks_.free_bytes());
  for (const ModelVersion& id : served_.draining()) {
    auto& entry = *request.add_readers();
    *entry.mutable_id() = rpc::to_proto(id);
    entry.set_readers(hooks_.readers(id));
  }
  for (const ModelVersion& id : failed_) *request.add_failed_fetches() = rpc::to_proto(id);
  said_ = failed_.size();
  for (const auto& [id, fetching] : fetching_) {
    if (!fetching.unwanted) *request.add_fetching() = rpc::to_proto(id);
  }
}

void FleetDuties::obey(const proto::HeartbeatResponse& response) {
  failed_.erase(failed_.begin(), failed_.begin() + static_cast<std::ptrdiff_t>(said_));
  said_ = 0;
  if (std::exchange(drained_, response.drained()) != response.drained()) {
    log::info(drained_ ? "agent.drained" : "agent.undrained");
  }
  std::set<ModelVersion> draining;
  std::vector<ModelVersion> let_go;
  for (const auto& entry : response.retiring()) {
    if (const auto id = rpc::from_proto(entry)) draining.insert(*id);
  }
  for (const auto& entry : response.retire()) {
    if (const auto id = rpc::from_proto(entry)) {
      draining.insert(*id);
      let_go.push_back(*id);
    }
  }
  served_.set_draining(std::move(draining));
  for (const ModelVersion& id : let_go) retire(id);
  for (const auto& task : response.fetch()) fetch(task, response.epoch());
  cancel_unwanted(response);
}

// The coordinator that wanted it (one that has just started knows of no tasks yet) has given it to
// another node, or there are copies enough.
void FleetDuties::cancel_unwanted(const proto::HeartbeatResponse& response) {
  std::set<ModelVersion> wanted;
  for (const auto& task : response.fetch()) {
    if (const auto id = rpc::from_proto(task.id())) wanted.insert(*id);
  }
  for (auto& [id, fetching] : fetching_) {
    const bool keep = fetching.unwanted || fetching.epoch != response.epoch() ||
                      wanted.contains(id) || has_whole(id, fetching.root);
    if (keep) continue;
    fetching.unwanted = true;
    log::info("replica.unwanted", "version", id.to_string());
    fetching.cancel->emit(boost::asio::cancellation_type::terminal);
  }
}

void FleetDuties::retire(const ModelVersion& id) {
  if (stopping_ || !letting_go_.insert(id).second) return;
  boost::asio::co_spawn(
      executor_,
      [](FleetDuties* self, ModelVersion version) -> Task<void> {
        auto done = co_await self->hooks_.retire(version);
        // Not found: it is gone, and the coordinator has yet to hear of it.
        if (!done && done.error().code() != ErrorCode::kNotFound) {
          log::warn("retire.failed", "version", version.to_string(), "error", done.error());
        }
        self->letting_go_.erase(version);
        self->hooks_.announce_soon();
      }(this, id),
      boost::asio::detached);
}

bool FleetDuties::has_whole(const ModelVersion& id, const Digest& root) const {
  return std::ranges::any_of(served_.find(id), [&](const Served* served) {
    return served->complete() && served->checkpoint().root == root && make_holding(*served).whole();
  });
}

void FleetDuties::fetch(const proto::HeartbeatResponse::Fetch& task, std::uint64_t epoch) {
  const auto id = rpc::from_proto(task.id());
  if (!id) return;
  const Digest root = rpc::from_proto(task.root());
  if (has_whole(*id, root)) {
    hooks_.announce_soon();  // it has not heard of it
    return;
  }
  if (const auto running = fetching_.find(*id); running != fetching_.end()) {
    running->second.epoch = epoch;
    return;
  }
  if (stopping_) return;
  fetching_[*id] = {std::make_unique<boost::asio::cancellation_signal>(), root, epoch};
  log::info("replica.fetch", "version", id->to_string(), "max_bytes_per_second",
            task.max_bytes_per_second());
  run_fetch(*id);
}

void FleetDuties::run_fetch(const ModelVersion& id) {
  const auto& cancel = fetching_.at(id).cancel;
  boost::asio::co_spawn(
      executor_,
      [](FleetDuties* self, ModelVersion version) -> Task<void> {
        co_await boost::asio::this_coro::throw_if_cancelled(false);
        auto done = co_await self->hooks_.fetch(version);
        if (!done && !self->fetching_.at(version).unwanted) {
          log::warn("replica.failed", "version", version.to_string(), "error", done.error());
          self->failed_.push_back(version);
        }
        // The signal may be what has just ended this: it must outlive its own call.
        boost::asio::post(self->executor_, [self, version] { self->fetching_.erase(version); });
      }(this, id),
      boost::asio::bind_cancellation_slot(cancel->slot(), boost::asio::detached));
}

Task<void> FleetDuties::stop(std::chrono::milliseconds deadline) {
  stopping_ = true;
  for (auto& [id, fetching] : fetching_) {
    fetching.cancel->emit(boost::asio::cancellation_type::terminal);
  }
  const auto give_up = std::chrono::steady_clock::now() + deadline;
  while (!(fetching_.empty() && letting_go_.empty()) &&
         std::chrono::steady_clock::now() < give_up) {
    co_await async::sleep_for(std::chrono::milliseconds(5));
  }
}

}  // namespace rekindle::agent
