#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "recovery/agent/worker_host.h"
#include "recovery/rpc/convert.h"
#include "tests/recovery/rpc_fixture.h"
#include "tests/support/process.h"

// An agent beside a coordinator that answers as it is told.
namespace rekindle::agent {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;

class WithCoordinator : public ::testing::Test {
 protected:
  using Answer = Result<std::string>;

  void SetUp() override {
    serve(proto::COORDINATOR_REGISTER, [](const std::string&) -> Answer {
      proto::RegisterResponse response;
      response.set_epoch(1);
      response.set_heartbeat_interval_ms(10);
      response.set_ttl_ms(10'000);
      return response.SerializeAsString();
    });
    serve(proto::COORDINATOR_HEARTBEAT, [](const std::string&) -> Answer {
      proto::HeartbeatResponse response;
      response.set_epoch(1);
      return response.SerializeAsString();
    });
    serve(proto::COORDINATOR_ANNOUNCE, [this](const std::string&) { return announced(); });
    serve(proto::COORDINATOR_RESOLVE, [this](const std::string&) { return resolve_(++resolved_); });
    const auto address = server_->listen("127.0.0.1:0");
    ASSERT_TRUE(address) << address.error().message();
    CoreOptions options;
    options.node_id = "a";
    options.store_directory = store_ / "store";
    options.store_budget_bytes = 1 << 20;
    options.coordinator = *address;
    auto core = AgentCore::create(loop_.executor(), options);
    ASSERT_TRUE(core) << core.error().message();
    core_ = std::move(*core);
    core_->connect_coordinator("", "127.0.0.1:7400");
  }
  void TearDown() override {
    if (core_ != nullptr) loop_.run(core_->stop());
    loop_.run(server_->close(5s));
  }

  void serve(proto::Method method, std::function<Answer(const std::string&)> handler) {
    server_->handle_at_once(
        method,
        [handler = std::move(handler)](const rpc::Peer&, const std::string& body) -> Answer {
          return handler(body);
        });
  }
  Answer announced() {
    ++announced_;
    proto::AnnounceResponse response;
    if (announced_ <= refusals_) {
      auto& conflict = *response.add_conflicts();
      conflict.set_why("no space left");
      conflict.set_again(true);
    }
    return response.SerializeAsString();
  }
  static Answer version(std::uint64_t number) {
    proto::ResolveResponse response;
    *response.mutable_id() = rpc::to_proto(ModelVersion{"m", number});
    return response.SerializeAsString();
  }
  Result<ModelVersion> newest() {
    WorkerHost host(*core_);
    return loop_.run(host.newest("m"));
  }

  rekindle::testing::TempDir store_;
  rpc::testing::Loop loop_;
  std::unique_ptr<rpc::RpcServer> server_ = rpc::RpcServer::create(
      loop_.executor(), rpc::testing::make_identity(proto::ROLE_COORDINATOR, "coordinator"));
  std::function<Answer(int)> resolve_ = [](int) { return version(1); };
  int resolved_ = 0;
  int announced_ = 0;
  int refusals_ = 0;
  std::unique_ptr<AgentCore> core_;
};

TEST_F(WithCoordinator, TheNewestVersionIsAskedForAgainWhileItIsNotKnownYet) {
  resolve_ = [](int asked) {
    return asked < 3 ? Answer(fail(ErrorCode::kUnavailable, "just started")) : version(7);
  };
  const auto id = newest();
  ASSERT_TRUE(id) << id.error().message();
  EXPECT_EQ(*id, (ModelVersion{"m", 7}));
  EXPECT_EQ(resolved_, 3);
}

TEST_F(WithCoordinator, WhereNothingIsReadyTheWorkerIsToldToPublish) {
  resolve_ = [](int) { return Answer(fail(ErrorCode::kNotFound, "no live agent holds it")); };
  const auto id = newest();
  ASSERT_FALSE(id);
  EXPECT_EQ(id.error().code(), ErrorCode::kNotFound);
  EXPECT_THAT(id.error().message(), HasSubstr("no version of m is ready in the fleet; publish"));
}

TEST_F(WithCoordinator, WhatCouldNotBeMadeDurableIsAnnouncedAgainOverTheSameConnection) {
  refusals_ = 1;
  loop_.run_until([&] { return announced_ == 2; });
  EXPECT_EQ(server_->connection_count(), 1u);
}

}  // namespace
}  // namespace rekindle::agent
