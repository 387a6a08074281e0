#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <boost/asio/co_spawn.hpp>
#include <gtest/gtest.h>

#include "proto/coordinator.pb.h"
#include "recovery/rpc/convert.h"
#include "recovery/rpc/methods.h"
#include "tests/recovery/rpc_fixture.h"
#include "tests/support/process.h"

namespace rekindle::coordinator::testing {

using rekindle::testing::Process;
using rekindle::testing::TempDir;
using rpc::testing::Loop;
using rpc::testing::make_identity;
using namespace std::chrono_literals;

inline const ModelVersion kId{"qwen3", 41};
inline const Digest kRoot{1, 2};

// The real coordinator process over real sockets.
class CoordinatorDaemon : public ::testing::Test {
 protected:
  std::unique_ptr<Process> spawn(std::vector<std::string> extra = {},
                                 const std::string& listen = "127.0.0.1:0");
  void start(std::vector<std::string> extra = {}) {
    process_ = spawn(std::move(extra), address_.empty() ? "127.0.0.1:0" : address_);
    address_ = process_->value_after("ready ");
    ASSERT_FALSE(address_.empty()) << process_->err();
  }

  struct Agent {
    rpc::Identity identity;
    std::shared_ptr<rpc::RpcClient> client;

    proto::NodeAddress address() const {
      proto::NodeAddress node;
      node.set_node_id(identity.node_id);
      node.set_incarnation(identity.incarnation.to_bytes());
      node.set_control_endpoint("0.0.0.0:7400");
      return node;
    }
  };
  Result<void> connect(Agent& agent) {
    TRY(agent.client, loop_.run(rpc::RpcClient::connect(address_, agent.identity, 5s)));
    return {};
  }
  Agent agent(const std::string& name, const std::string& secret = "") {
    Agent agent{make_identity(proto::ROLE_AGENT, name, secret), {}};
    const auto connected = connect(agent);
    EXPECT_TRUE(connected) << connected.error().message();
    return agent;
  }
  Result<proto::RegisterResponse> enroll(const Agent& agent, std::uint64_t epoch = 0) {
    proto::RegisterRequest request;
    *request.mutable_node() = agent.address();
    request.set_highest_epoch(epoch);
    return loop_.run(rpc::call<proto::COORDINATOR_REGISTER>(agent.client, std::move(request), 5s));
  }
  static async::Task<Result<proto::HeartbeatResponse>> heartbeat(const Agent& agent) {
    proto::HeartbeatRequest request;
    request.set_node_id(agent.identity.node_id);
    request.set_incarnation(agent.identity.incarnation.to_bytes());
    return rpc::call<proto::COORDINATOR_HEARTBEAT>(agent.client, std::move(request), 5s);
  }
  Result<proto::HeartbeatResponse> beat(const Agent& agent) { return loop_.run(heartbeat(agent)); }
  Result<proto::PublishResponse> publish(const Agent& agent, const ModelVersion& id,
                                         const Digest& root) {
    proto::PublishRequest request;
    request.set_node_id(agent.identity.node_id);
    request.set_incarnation(agent.identity.incarnation.to_bytes());
    *request.mutable_id() = rpc::to_proto(id);
    *request.mutable_root() = rpc::to_proto(root);
    return loop_.run(rpc::call<proto::COORDINATOR_PUBLISH>(agent.client, std::move(request), 5s));
  }
  Result<proto::AnnounceResponse> announce(const Agent& agent, const ModelVersion& id,
                                           const Digest& root) {
    proto::AnnounceRequest request;
    request.set_node_id(agent.identity.node_id);
    request.set_incarnation(agent.identity.incarnation.to_bytes());
    request.set_full(true);
    auto& holding = *request.add_add();
    *holding.mutable_id() = rpc::to_proto(id);
    *holding.mutable_root() = rpc::to_proto(root);
    *holding.mutable_layout() = rpc::to_proto(Digest{9, 9});
    holding.set_complete(true);
    holding.set_verified(true);
    holding.set_whole(true);
    return loop_.run(rpc::call<proto::COORDINATOR_ANNOUNCE>(agent.client, std::move(request), 5s));
  }
  // One worker, which serves qwen3@40.
  static proto::RoundReport report_of(const Agent& agent) {
    proto::RoundReport report;
    report.set_node_id(agent.identity.node_id);
    report.set_incarnation(agent.identity.incarnation.to_bytes());
    auto& member = *report.add_members();
    member.set_session(1);
    member.set_group("g");
    member.set_instance("i");
    *member.mutable_id() = rpc::to_proto({"qwen3", 40});
    return report;
  }
  // Waits for the end of the grace while these live. `meanwhile` is told whether it is over.
  Result<proto::BeginUpdateResponse> begin_update(
      const Agent& command, proto::BeginUpdateRequest request,
      const std::vector<const Agent*>& living,
      const std::function<void(const bool& over)>& meanwhile = {}) {
    std::optional<Result<proto::BeginUpdateResponse>> begun;
    bool over = false;
    request.set_wait_ms(5000);
    auto call = rpc::call<proto::COORDINATOR_BEGIN_UPDATE>(command.client, std::move(request), 20s);
    boost::asio::co_spawn(
        loop_.io(), std::move(call),
        [&](const std::exception_ptr&, Result<proto::BeginUpdateResponse> answer) {
          begun = std::move(answer);
          over = true;
        });
    if (meanwhile) meanwhile(over);
    while (!over) {
      for (const Agent* const agent : living) (void)beat(*agent);
      loop_.run(rpc::testing::sleep_for(20ms));
    }
    return *std::move(begun);
  }
  Result<proto::OpenPullResponse> open(const Agent& agent, const std::string& model) {
    proto::OpenPullRequest request;
    *request.mutable_puller() = agent.address();
    request.set_model(model);
    request.set_latest(true);
    return loop_.run(rpc::call<proto::COORDINATOR_OPEN_PULL>(agent.client, std::move(request), 5s));
  }

  TempDir temp_;
  Loop loop_;
  std::string address_;
  std::unique_ptr<Process> process_;
};

}  // namespace rekindle::coordinator::testing
