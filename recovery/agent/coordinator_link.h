#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <boost/asio/any_io_executor.hpp>

#include "proto/coordinator.pb.h"
#include "recovery/agent/core/coordinator_registration.h"
#include "recovery/agent/grant_clock.h"
#include "recovery/rpc/rpc.h"
#include "src/async/task.h"
#include "src/async/task_group.h"

namespace rekindle::agent {

// The connection of an agent to its coordinator: performs the steps that CoordinatorRegistration
// decides on. Losing the coordinator stops nothing on this host. Without a configured coordinator
// nothing ever connects, and announcements do nothing. Control thread only.
class CoordinatorLink {
 public:
  struct Callbacks {
    std::function<proto::NodeAddress()> self;
    // All copies that this host announces.
    std::function<std::vector<proto::Holding>()> holdings;
    // This coordinator has registered the agent.
    std::function<void(const Incarnation& coordinator)> registered;
    // Adds the state of this host to a heartbeat, and takes the orders of its answer.
    std::function<void(proto::HeartbeatRequest&)> fill;
    std::function<void(const proto::HeartbeatResponse&)> obey;
    // The fleet knows the version by another root than the copies of this host have.
    std::function<void(const ModelVersion& id, const std::string& why)> other_root;
  };

  // `coordinator`: "a:7300" or "a:7300,b:7300"; "" for none.
  CoordinatorLink(boost::asio::any_io_executor executor, const rpc::Identity& identity,
                  GrantClock& grant_clock, const std::string& coordinator);

  bool configured() const { return configured_; }
  // Agents are members of the fleet; the embedded agent of a command is not.
  bool is_member() const { return identity_.role == proto::ROLE_AGENT; }
  // Begins to connect, when a coordinator is configured.
  void start(std::string failure_domain, Callbacks callbacks);
  async::Task<void> close(std::chrono::milliseconds deadline);

  // nullptr while there is no connection.
  std::shared_ptr<rpc::RpcClient> client() const;
  // Waits for a connection, at most for `deadline`; otherwise returns the last error.
  async::Task<Result<std::shared_ptr<rpc::RpcClient>>> wait_connected(
      std::chrono::milliseconds deadline);
  // The copies of this host have changed.
  void announce_soon();
  // Announces now and waits for the coordinator's answer, at most 5 s. Without this wait, a pull on
  // another host right after a publication would find no holder.
  async::Task<void> announce_now();
  // Why there is no connection, with the address.
  Error problem() const;
  const Error& last_error() const { return registration_.last_error(); }
  const std::string& address() const { return registration_.address(); }
  // Whether a rights file was in force at the last heartbeat. nullopt: none was answered yet.
  std::optional<bool> has_rights() const { return has_rights_; }
  // The highest epoch that this agent has heard of.
  std::uint64_t epoch() const { return grant_clock_.epochs().highest(); }

 private:
  async::Task<void> run();
  async::Task<Result<void>> perform(CoordinatorRegistration::Step step);
  async::Task<Result<void>> connect();
  async::Task<Result<void>> register_node();
  async::Task<Result<void>> announce();
  async::Task<Result<void>> heartbeat();
  void drop_connection(Error why);
  // Notes the epoch of an answer. kStale: it is lower than one that was heard of.
  Result<void> check_epoch(std::uint64_t answered);

  const rpc::Identity& identity_;
  GrantClock& grant_clock_;
  const bool configured_;
  CoordinatorRegistration registration_;
  std::string failure_domain_;
  Callbacks callbacks_;
  std::shared_ptr<rpc::RpcClient> client_;
  std::optional<bool> has_rights_;
  // A refused registration is logged once, until one succeeds.
  bool refusal_logged_ = false;
  // Ends the wait of run().
  async::Notifier wake_;
  // The connection was made or lost.
  async::Notifier changed_;
  async::TaskGroup tasks_;
};

}  // namespace rekindle::agent
