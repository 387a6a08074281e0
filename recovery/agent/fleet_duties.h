#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/cancellation_signal.hpp>

#include "proto/coordinator.pb.h"
#include "recovery/agent/served_versions.h"
#include "recovery/rpc/rpc.h"

namespace rekindle::agent {

// What the coordinator asks of this agent in its heartbeats: let a version go when its readers are
// done, pull a whole copy of another (and no more, when the answer does not list it any more). Says
// with the next heartbeat who reads and what failed. Control thread only; must outlive what it
// starts.
class FleetDuties {
 public:
  struct Hooks {
    std::function<std::uint64_t()> free_bytes;  // of the store
    // Sessions of pullers and of workers on this version.
    std::function<std::uint32_t(const ModelVersion&)> readers;
    std::function<async::Task<Result<void>>(ModelVersion)> retire;  // here, now
    std::function<async::Task<Result<void>>(ModelVersion)> fetch;   // all of it, into the store
    std::function<void()> announce_soon;
  };

  FleetDuties(boost::asio::any_io_executor executor, ServedVersions& served, Hooks hooks);

  void fill(proto::HeartbeatRequest& request);
  // The answer to the heartbeat that was filled last.
  void obey(const proto::HeartbeatResponse& response);
  bool drained() const { return drained_; }
  // Ends what runs, and waits for it at most that long.
  async::Task<void> stop(std::chrono::milliseconds deadline);

 private:
  void retire(const ModelVersion& id);
  void fetch(const proto::HeartbeatResponse::Fetch& task, std::uint64_t epoch);
  void run_fetch(const ModelVersion& id);
  void cancel_unwanted(const proto::HeartbeatResponse& response);
  bool has_whole(const ModelVersion& id, const Digest& root) const;

  const boost::asio::any_io_executor executor_;
  ServedVersions& served_;
  const Hooks hooks_;
  std::set<ModelVersion> letting_go_;
  struct Fetching {
    std::unique_ptr<boost::asio::cancellation_signal> cancel;
    Digest root;
    std::uint64_t epoch = 0;  // of the coordinator that wanted it last
    bool unwanted = false;
  };
  std::map<ModelVersion, Fetching> fetching_;
  bool stopping_ = false;
  std::vector<ModelVersion> failed_;  // fetches
  std::size_t said_ = 0;              // of failed_, in the last heartbeat
  bool drained_ = false;
};

}  // namespace rekindle::agent
