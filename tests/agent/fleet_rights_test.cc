// What an agent makes of the coordinator's answer to: may this peer read?
#include "recovery/agent/fleet_rights.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "recovery/rpc/methods.h"
#include "tests/recovery/rpc_fixture.h"

namespace rekindle::agent {
namespace {

using namespace std::chrono_literals;
using rpc::testing::make_identity;
using ::testing::HasSubstr;

class FleetRightsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    rpc::handle<proto::AUTHORIZE>(
        *server_,
        [this](rpc::Peer, proto::AuthorizeRequest request,
               rpc::Events) -> async::Task<Result<proto::AuthorizeResponse>> {
          asked_.push_back(request);
          co_return answer_;
        });
    const auto address = server_->listen("127.0.0.1:0");
    ASSERT_TRUE(address);
    link_.emplace(loop_.executor(), self_, grants_, *address);
    link_->start("", {});
    ASSERT_TRUE(loop_.run(link_->wait_connected(5s)));
    rights_.emplace(*link_);
  }
  void TearDown() override {
    loop_.run(link_->close(5s));
    stop_coordinator();
  }
  void stop_coordinator() { loop_.run(server_->close(5s)); }
  static rpc::Peer peer(const std::string& principal) {
    rpc::Peer peer;
    peer.address = "10.0.0.9:1";
    peer.principals = {principal};
    return peer;
  }
  Result<void> may_read(const std::string& principal, const std::string& model) {
    return loop_.run(rights_->may_read(peer(principal), model));
  }

  rpc::testing::Loop loop_;
  const rpc::Identity self_ = make_identity(proto::ROLE_PULLER, "a");
  const std::unique_ptr<rpc::RpcServer> server_ =
      rpc::RpcServer::create(loop_.executor(), make_identity(proto::ROLE_COORDINATOR, "c"));
  GrantClock grants_;
  std::optional<CoordinatorLink> link_;
  std::optional<FleetRights> rights_;
  proto::AuthorizeResponse answer_;
  std::vector<proto::AuthorizeRequest> asked_;
};

TEST_F(FleetRightsTest, TheCoordinatorDecidesByPrincipalVerbAndModel) {
  answer_.set_allowed(true);
  EXPECT_TRUE(may_read("spiffe://x/rekindle/client/ann", "qwen3"));
  ASSERT_EQ(asked_.size(), 1u);
  EXPECT_EQ(asked_[0].verb(), "read");
  EXPECT_EQ(asked_[0].model(), "qwen3");
  ASSERT_EQ(asked_[0].principals_size(), 1);
  EXPECT_EQ(asked_[0].principals(0), "spiffe://x/rekindle/client/ann");

  answer_.set_allowed(false);
  answer_.set_why("no line of the rights file gives it read on llama");
  const auto denied = may_read("spiffe://x/rekindle/client/ann", "llama");
  ASSERT_FALSE(denied);
  EXPECT_EQ(denied.error().code(), ErrorCode::kDenied);
  EXPECT_THAT(denied.error().message(),
              HasSubstr("client/ann at 10.0.0.9:1 may not read llama: no line"));
  EXPECT_TRUE(may_read("spiffe://x/rekindle/client/ann", "qwen3")) << "asked a moment ago";
  EXPECT_EQ(asked_.size(), 2u);
}

TEST_F(FleetRightsTest, WithoutTheCoordinatorItsLastAnswerCounts) {
  answer_.set_allowed(true);
  EXPECT_TRUE(may_read("a", "qwen3"));
  answer_.set_allowed(false);
  EXPECT_FALSE(may_read("b", "qwen3"));
  stop_coordinator();
  EXPECT_TRUE(may_read("a", "qwen3"));
  EXPECT_EQ(may_read("b", "qwen3").error().code(), ErrorCode::kDenied);
  const auto unknown = may_read("c", "qwen3");
  ASSERT_FALSE(unknown);
  EXPECT_EQ(unknown.error().code(), ErrorCode::kUnavailable);
  EXPECT_THAT(unknown.error().message(), HasSubstr("cannot ask the coordinator"));
}

TEST_F(FleetRightsTest, APeerThatHasProvenNothingIsAskedAbout) {
  rpc::Peer nobody = peer("");
  nobody.principals.clear();
  EXPECT_FALSE(loop_.run(rights_->may_read(nobody, "qwen3")));
  ASSERT_EQ(asked_.size(), 1u);
  ASSERT_EQ(asked_[0].principals_size(), 1);
  EXPECT_EQ(asked_[0].principals(0), "unproven");
}

TEST_F(FleetRightsTest, AnAgentWithoutACoordinatorAsksNobody) {
  CoordinatorLink alone(loop_.executor(), self_, grants_, "");
  FleetRights rights(alone);
  EXPECT_TRUE(loop_.run(rights.may_read(peer("a"), "qwen3")));
  EXPECT_TRUE(asked_.empty());
}

}  // namespace
}  // namespace rekindle::agent
