#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/steady_timer.hpp>

#include "proto/coordinator.pb.h"
#include "recovery/agent/grant_clock.h"
#include "recovery/rpc/rpc.h"

namespace rekindle::agent {

// Keeps one agent registered at its coordinator: connects with bounded, jittered back-off,
// registers, announces everything anew, heartbeats. Losing the coordinator stops nothing here.
// Several addresses ("a:7300,b:7300") are tried in turn: of several coordinators only the one that
// leads listens.
// Control thread only.
class CoordinatorLink {
 public:
  struct Callbacks {
    std::function<proto::NodeAddress()> self;
    std::function<std::vector<proto::Holding>()> holdings;
    std::function<std::uint64_t()> progress;  // of the working threads
    // What a heartbeat says of this host beside its progress, and what its answer asks for.
    std::function<void(proto::HeartbeatRequest&)> fill;
    std::function<void(const proto::HeartbeatResponse&)> obey;
    // The fleet knows a version by another root than the copies of it here.
    std::function<void(const ModelVersion& id, const std::string& why)> other_root;
  };

  CoordinatorLink(boost::asio::any_io_executor executor, std::vector<std::string> addresses,
                  const rpc::Identity& identity, std::string failure_domain, bool member,
                  GrantClock& grant_clock, Callbacks callbacks);

  // Runs until stop(). A non-member (a command's embedded agent) connects, but neither registers
  // nor heartbeats.
  async::Task<void> run();
  void stop();

  std::shared_ptr<rpc::RpcClient> client() const;  // nullptr while there is none
  // Waits for a connection, at most `deadline`; the last error otherwise.
  async::Task<Result<std::shared_ptr<rpc::RpcClient>>> wait_connected(
      std::chrono::milliseconds deadline);
  // What this agent holds has changed.
  void announce_soon();
  // The same, and waits until the coordinator knows (at most 5 s): who publishes and then pulls
  // elsewhere must not be told that nobody holds it.
  async::Task<void> announce_now();
  // Why there is no connection.
  const Error& last_error() const { return last_error_; }
  // The highest that was heard of.
  std::uint64_t epoch() const { return grant_clock_.epochs().highest(); }
  const std::string& address() const { return addresses_[current_]; }

 private:
  async::Task<Result<void>> serve_connection();
  async::Task<Result<void>> register_and_announce();
  async::Task<Result<void>> announce(bool full);
  async::Task<Result<void>> heartbeat();
  async::Task<void> sleep(std::chrono::milliseconds duration);
  // Notes the epoch of an answer. kStale: it is lower than one that was heard of.
  Result<void> check_epoch(std::uint64_t epoch);

  const boost::asio::any_io_executor executor_;
  const std::vector<std::string> addresses_;
  std::size_t current_ = 0;
  const rpc::Identity& identity_;
  const std::string failure_domain_;
  const bool member_;
  GrantClock& grant_clock_;
  const Callbacks callbacks_;
  std::shared_ptr<rpc::RpcClient> client_;
  std::shared_ptr<boost::asio::steady_timer> sleep_timer_;
  Error last_error_{ErrorCode::kUnavailable, "not tried yet"};
  bool registered_ = false;  // on the connection that is open
  std::chrono::milliseconds heartbeat_interval_{250};
  std::chrono::milliseconds ttl_{2000};
  bool announce_due_ = false;
  std::optional<std::chrono::steady_clock::time_point> announce_again_;
  bool stopping_ = false;
  bool refused_ = false;  // logged once per cause
};

}  // namespace rekindle::agent
