#include <chrono>
#include <functional>
#include <memory>

#include <gtest/gtest.h>

#include "recovery/joint/course.h"
#include "recovery/joint/joint_peer.h"
#include "recovery/joint/joint_roster.h"
#include "recovery/joint/lead_link.h"
#include "recovery/rpc/convert.h"
#include "recovery/rpc/methods.h"
#include "tests/joint/joint_sample.h"
#include "tests/recovery/rpc_fixture.h"
#include "tests/support/numbered_digest.h"

// What an agent does when another one is silent, or answers without an end.
namespace rekindle::joint {
namespace {

using namespace rpc::testing;
using test::code_of;
using test::kId;

class JointCalls : public ::testing::Test {
 protected:
  JointCalls() {
    server_ = rpc::RpcServer::create(loop_.executor(), theirs_);
    rpc::handle<proto::AGENT_JOINT>(
        *server_, [this](rpc::Peer, proto::JointRequest request, const rpc::Events&) {
          return answer(std::move(request));
        });
    auto address = server_->listen("127.0.0.1:0");
    if (!address) throw std::runtime_error(address.error().message());
    proto::NodeAddress node;
    node.set_node_id("other");
    node.set_incarnation(theirs_.incarnation.to_bytes());
    node.set_control_endpoint(*address);
    roster_.id = kId;
    roster_.number = 1;
    roster_.self = 1;
    for (int i = 0; i < 2; ++i) {
      roster_.hosts.push_back({node,
                               {},
                               std::make_unique<JointPeer>(
                                   node, ours_, [] { return false; }, 200ms)});
    }
  }
  ~JointCalls() override { loop_.run(server_->close(5s)); }

  async::Task<Result<proto::JointResponse>> answer(proto::JointRequest request) {
    ++calls_;
    if (answer_) co_return answer_(request);
    co_await async::sleep_for(1h);  // until the caller cancels it
    co_return fail(ErrorCode::kInternal, "an hour has passed");
  }

  Loop loop_;
  const rpc::Identity ours_ = make_identity(proto::ROLE_AGENT, "self");
  const rpc::Identity theirs_ = make_identity(proto::ROLE_AGENT, "other");
  std::unique_ptr<rpc::RpcServer> server_;
  // Empty: the other agent accepts calls and says nothing.
  std::function<Result<proto::JointResponse>(const proto::JointRequest&)> answer_;
  int calls_ = 0;
  Roster roster_;
  Course course_{loop_.executor(), kId};
  LeadLink lead_{roster_, course_};
};

TEST_F(JointCalls, ACallToASilentAgentEndsAndNamesIt) {
  auto answer = loop_.run(roster_.lead().call(roster_.request()));
  ASSERT_FALSE(answer);
  EXPECT_EQ(answer.error().code(), ErrorCode::kPeerLost);
  EXPECT_NE(answer.error().message().find("other at 127.0.0.1:"), std::string::npos)
      << answer.error().message();
  EXPECT_GE(calls_, 1);
}

TEST_F(JointCalls, AnAgentThatIsNeverReadyIsGivenUp) {
  answer_ = [](const proto::JointRequest&) {
    return fail(ErrorCode::kUnavailable, "there is no plan yet");
  };
  auto answer = loop_.run(roster_.lead().call(roster_.request()));
  EXPECT_EQ(code_of(answer), ErrorCode::kPeerLost);
  EXPECT_GE(calls_, 2) << "it was asked again";
}

TEST_F(JointCalls, ASilentLeadEndsThePublication) {
  loop_.run(lead_.watch());
  ASSERT_TRUE(course_.error());
  EXPECT_EQ(course_.error()->code(), ErrorCode::kPeerLost);
  EXPECT_NE(course_.error()->message().find("m@7: its lead"), std::string::npos)
      << course_.error()->message();
  EXPECT_EQ(code_of(loop_.run(lead_.reach(proto::JOINT_WRITING))), ErrorCode::kPeerLost);
}

TEST_F(JointCalls, AStepAtASilentLeadEnds) {
  const std::vector<TileIndex> tiles{0, 1, 5};
  const std::vector<Digest> leaves(3, rekindle::test::numbered_digest(1));
  EXPECT_EQ(code_of(loop_.run(lead_.declare("abc"))), ErrorCode::kPeerLost);
  EXPECT_EQ(code_of(loop_.run(lead_.put_leaves(tiles, leaves))), ErrorCode::kPeerLost);
  EXPECT_EQ(code_of(loop_.run(lead_.read_leaves(3))), ErrorCode::kPeerLost);
  EXPECT_EQ(code_of(loop_.run(lead_.confirm())), ErrorCode::kPeerLost);
  loop_.run(lead_.give_up({ErrorCode::kInternal, "why"}));
}

TEST_F(JointCalls, PagesWithoutAnEndAreCorrupt) {
  answer_ = [](const proto::JointRequest& request) -> Result<proto::JointResponse> {
    proto::JointResponse page;
    page.set_data(std::string(32, 'x'));
    page.set_total_bytes(request.read().offset() + 64);
    return page;
  };
  EXPECT_EQ(code_of(loop_.run(lead_.read_leaves(10))), ErrorCode::kCorrupt);
  EXPECT_EQ(calls_, 10) << "the last page would end after 10 digests";
}

TEST_F(JointCalls, LeavesArriveInPages) {
  const std::vector<Digest> leaves{rekindle::test::numbered_digest(1),
                                   rekindle::test::numbered_digest(2)};
  answer_ = [&](const proto::JointRequest& request) -> Result<proto::JointResponse> {
    proto::JointResponse page;
    page.set_data(std::string(digest_bytes(leaves).substr(request.read().offset(), 32)));
    page.set_total_bytes(64);
    return page;
  };
  auto read = loop_.run(lead_.read_leaves(2));
  ASSERT_TRUE(read) << read.error().message();
  EXPECT_EQ(*read, leaves);
  EXPECT_EQ(code_of(loop_.run(lead_.read_leaves(1))), ErrorCode::kCorrupt) << "more than expected";
}

TEST_F(JointCalls, AWaitEndsWithThePublicationAndAtItsDeadline) {
  const auto never = [] { return false; };
  auto waited = loop_.run(course_.wait_for(never, steady_now() + 10ms));
  ASSERT_TRUE(waited);
  EXPECT_FALSE(*waited);
  course_.end({ErrorCode::kDenied, "first"});
  course_.end({ErrorCode::kTimeout, "second"});
  course_.complete(rekindle::test::numbered_digest(1));
  EXPECT_EQ(code_of(loop_.run(course_.wait_for(never))), ErrorCode::kDenied);
  EXPECT_FALSE(course_.root());
}

}  // namespace
}  // namespace rekindle::joint
