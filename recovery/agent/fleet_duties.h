#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include <boost/asio/any_io_executor.hpp>

#include "proto/coordinator.pb.h"
#include "recovery/agent/core/fleet_orders.h"
#include "recovery/agent/served_versions.h"
#include "src/async/task_group.h"
#include "src/base/ids.h"

namespace rekindle::agent {

// Performs what FleetOrders decides about the coordinator's orders. Control thread only; must
// outlive the tasks that it starts.
class FleetDuties {
 public:
  struct Hooks {
    // Of the store.
    std::function<std::uint64_t()> free_bytes;
    // Sessions of pullers and of workers on this version.
    std::function<std::uint32_t(const ModelVersion&)> readers;
    std::function<async::Task<Result<void>>(ModelVersion)> retire;
    // Pulls all of the version into the store.
    std::function<async::Task<Result<void>>(ModelVersion)> fetch;
    std::function<void()> announce_soon;
    // An operator has drained this host, or has undone it. May be empty.
    std::function<void(bool drained)> drained = {};
  };

  FleetDuties(boost::asio::any_io_executor executor, ServedVersions& served, Hooks hooks)
      : executor_(executor), served_(served), hooks_(std::move(hooks)), retirements_(executor) {}

  // The events of this host after a number, oldest first, at most `most`.
  using EventsAfter =
      std::function<std::vector<proto::FleetEvent>(std::uint64_t after, std::size_t most)>;
  // Heartbeats tell these events to the coordinator, each until one is answered.
  void tell_events(EventsAfter events) { events_ = std::move(events); }
  // Called when an operator drains this host, and when that is undone.
  void tell_drained(std::function<void(bool)> drained) { drained_ = std::move(drained); }

  // A new coordinator has none of the events, and gets all that are kept. `term`: the incarnation
  // of the coordinator, which is new with each term.
  void registered(const Incarnation& term);
  void fill(proto::HeartbeatRequest& request);
  void obey(const proto::HeartbeatResponse& response);
  // Cancels fetches and waits for all tasks, at most until the deadline.
  async::Task<void> stop(std::chrono::milliseconds deadline);

 private:
  async::Task<void> retire(ModelVersion id);
  async::Task<void> fetch(ModelVersion id);

  const boost::asio::any_io_executor executor_;
  ServedVersions& served_;
  const Hooks hooks_;
  FleetOrders orders_;
  // Empty: the agent of a command has no events.
  EventsAfter events_;
  std::function<void(bool)> drained_;
  // The last event that the coordinator of `term_` has, and the last one of the heartbeat that has
  // no answer yet.
  Incarnation term_;
  std::uint64_t told_ = 0;
  std::uint64_t telling_ = 0;
  async::TaskGroup retirements_;
  // One task each, because each is cancelled on its own.
  std::map<ModelVersion, std::unique_ptr<async::TaskGroup>> fetches_;
};

}  // namespace rekindle::agent
