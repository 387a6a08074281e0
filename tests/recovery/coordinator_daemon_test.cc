#include <memory>
#include <optional>
#include <string>

#include <sys/stat.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "recovery/rpc/grants.h"
#include "tests/recovery/coordinator_daemon_fixture.h"

// The real coordinator process: what it serves, and whom it refuses.
namespace rekindle::coordinator {
namespace {

using namespace testing;
using rekindle::testing::eventually;
using ::testing::HasSubstr;

TEST_F(CoordinatorDaemon, AnAgentRegistersPublishesAndIsFoundByAPuller) {
  start();
  const Agent a = agent("a");
  const auto registered = enroll(a);
  ASSERT_TRUE(registered) << registered.error().message();
  EXPECT_EQ(registered->epoch(), 1u);
  EXPECT_EQ(registered->heartbeat_interval_ms(), 250u);
  EXPECT_EQ(registered->ttl_ms(), 2000u);
  EXPECT_EQ(registered->seen_from(), "127.0.0.1");
  ASSERT_TRUE(publish(a, kId, kRoot));
  ASSERT_TRUE(announce(a, kId, kRoot));
  const Agent p = agent("p");
  const auto opened = open(p, "qwen3");
  ASSERT_TRUE(opened) << opened.error().message();
  ASSERT_EQ(opened->sources_size(), 1);
  EXPECT_EQ(opened->sources(0).node().control_endpoint(), "127.0.0.1:7400")
      << "an agent on every address is where it called from";
  const auto& grant = opened->sources(0).grant();
  const rpc::Peer& issuer = p.client->peer();
  EXPECT_EQ(grant.issuer(), issuer.incarnation.to_bytes());
  EXPECT_TRUE(rpc::check_grant(grant, issuer.public_key, "",
                               {p.identity.incarnation, a.identity.incarnation, kRoot}));
  const auto beaten = beat(a);
  ASSERT_TRUE(beaten);
  EXPECT_GT(grant.expiry_ms(), beaten->coordinator_time_ms());
  const auto status = loop_.run(rpc::call<proto::COORDINATOR_STATUS>(p.client, {}, 5s));
  ASSERT_TRUE(status);
  ASSERT_EQ(status->nodes_size(), 1);
  EXPECT_EQ(status->nodes(0).state(), "alive");
  ASSERT_EQ(status->versions_size(), 1);
  EXPECT_EQ(status->versions(0).state(), "ready");
  EXPECT_EQ(status->pulls_size(), 1);
}

TEST_F(CoordinatorDaemon, ADuplicateNodeIdIsRefusedWhileTheHolderLives) {
  start();
  auto first = std::make_unique<Agent>(agent("a"));
  ASSERT_TRUE(enroll(*first));
  const Agent second = agent("a");
  const auto refused = enroll(second);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), ErrorCode::kDenied);
  EXPECT_THAT(refused.error().message(),
              HasSubstr("is in use by a live process at 127.0.0.1:7400"));
  EXPECT_TRUE(beat(*first)) << "the live holder keeps it";
  first.reset();  // its connection closes
  EXPECT_TRUE(eventually([&] { return enroll(second).has_value(); }));
}

TEST_F(CoordinatorDaemon, NobodySpeaksForAnotherIncarnation) {
  start();
  const Agent a = agent("a");
  ASSERT_TRUE(enroll(a));
  Agent liar = agent("a");
  const auto own = liar.client;
  liar.identity.incarnation = a.identity.incarnation;  // in the bodies, not in its hello
  EXPECT_EQ(beat(liar).error().code(), ErrorCode::kDenied);
  EXPECT_EQ(enroll(liar).error().code(), ErrorCode::kDenied);
  EXPECT_EQ(publish(liar, kId, kRoot).error().code(), ErrorCode::kDenied);
  EXPECT_EQ(announce(liar, kId, kRoot).error().code(), ErrorCode::kDenied);
  EXPECT_EQ(open(liar, "qwen3").error().code(), ErrorCode::kDenied);
}

TEST_F(CoordinatorDaemon, ADrainedNodeStaysDrainedOverAKillAndItsReadersAreCounted) {
  start();
  const Agent a = agent("a");
  ASSERT_TRUE(enroll(a));
  ASSERT_TRUE(announce(a, kId, kRoot));
  const Agent p = agent("p");
  ASSERT_EQ(open(p, "qwen3")->sources_size(), 1);
  proto::DrainRequest request;
  request.set_node_id("a");
  const auto drained = loop_.run(rpc::call<proto::COORDINATOR_DRAIN>(p.client, request, 5s));
  ASSERT_TRUE(drained) << drained.error().message();
  EXPECT_EQ(drained->pullers(), 1u);
  ASSERT_EQ(drained->sole_copies_size(), 1);
  EXPECT_EQ(drained->sole_copies(0).version(), 41u);
  process_->kill();
  start();
  const Agent again = agent("a");
  ASSERT_TRUE(enroll(again));
  ASSERT_TRUE(announce(again, kId, kRoot));
  EXPECT_TRUE(beat(again)->drained());
  const Agent q = agent("q");
  EXPECT_THAT(open(q, "qwen3").error().message(), HasSubstr("only drained nodes hold it: a"));
  const auto status = loop_.run(rpc::call<proto::COORDINATOR_STATUS>(q.client, {}, 5s));
  ASSERT_TRUE(status);
  EXPECT_TRUE(status->nodes(0).drained());
  request.set_undo(true);
  ASSERT_TRUE(loop_.run(rpc::call<proto::COORDINATOR_DRAIN>(q.client, request, 5s)));
  EXPECT_EQ(open(q, "qwen3")->sources_size(), 1);
  request.set_node_id("nobody");
  EXPECT_EQ(loop_.run(rpc::call<proto::COORDINATOR_DRAIN>(q.client, request, 5s)).error().code(),
            ErrorCode::kNotFound);
}

TEST_F(CoordinatorDaemon, RanksOnTwoHostsAreCommittedTogether) {
  start();
  const Agent a = agent("a");
  const Agent b = agent("b");
  for (const Agent* node : {&a, &b}) {
    ASSERT_TRUE(enroll(*node));
    ASSERT_TRUE(announce(*node, kId, kRoot));
  }
  const auto say = [&](const Agent& node, std::uint32_t rank, proto::RankState state) {
    proto::RankReport report;
    report.set_node_id(node.identity.node_id);
    report.set_incarnation(node.identity.incarnation.to_bytes());
    report.set_instance("chat");
    report.set_generation(1);
    report.set_rank(rank);
    report.set_world(2);
    report.set_model("qwen3");
    report.set_version(41);
    if (state == proto::RANK_LOADED) *report.mutable_has() = rpc::to_proto(kId);
    report.set_state(state);
    return loop_.run(rpc::call<proto::COORDINATOR_REPORT_RANK>(node.client, std::move(report), 5s));
  };
  ASSERT_TRUE(say(a, 0, proto::RANK_ATTACHED));
  EXPECT_EQ(say(a, 0, proto::RANK_LOADED)->state(), proto::INSTANCE_LOADING);
  EXPECT_EQ(say(b, 1, proto::RANK_LOADED)->state(), proto::INSTANCE_COMMITTED);
  EXPECT_EQ(say(a, 0, proto::RANK_LOADED)->state(), proto::INSTANCE_COMMITTED);
  EXPECT_EQ(say(b, 1, proto::RANK_FAILED)->state(), proto::INSTANCE_UNFIT);
  EXPECT_THAT(say(a, 0, proto::RANK_LOADED)->why(), HasSubstr("rank 1 on b"));
  proto::RankReport theft;
  theft.set_node_id("a");
  theft.set_incarnation(a.identity.incarnation.to_bytes());
  EXPECT_EQ(
      loop_.run(rpc::call<proto::COORDINATOR_REPORT_RANK>(b.client, theft, 5s)).error().code(),
      ErrorCode::kDenied);
}

TEST_F(CoordinatorDaemon, AnAgentThatWaitsHearsOfARoundAndACommandOfItsEnd) {
  start();
  const Agent a = agent("a");
  ASSERT_TRUE(enroll(a));
  ASSERT_TRUE(announce(a, kId, kRoot));
  proto::RoundReport report = report_of(a);
  const auto say = [&] {
    report.set_sequence(report.sequence() + 1);
    return rpc::call<proto::COORDINATOR_ROUND>(a.client, report, 20s);
  };
  const auto first = loop_.run(say());
  ASSERT_TRUE(first) << first.error().message();
  EXPECT_EQ(first->rounds_size(), 0);
  report.set_seen(first->revision());
  report.set_wait_ms(5000);
  std::optional<Result<proto::RoundOrders>> heard;
  boost::asio::co_spawn(loop_.io(), say(),
                        [&](const std::exception_ptr&, Result<proto::RoundOrders> answer) {
                          heard = std::move(answer);
                        });
  proto::BeginUpdateRequest begin;
  *begin.mutable_id() = rpc::to_proto(kId);
  begin.set_gather_ms(50);
  const Agent command = agent("c");
  const auto begun = begin_update(command, begin, {&a});
  ASSERT_TRUE(begun) << begun.error().message();
  loop_.run_until([&] { return heard.has_value(); });
  ASSERT_TRUE(*heard);
  ASSERT_EQ((*heard)->rounds_size(), 1) << "it is told because there is something to tell";
  EXPECT_EQ((*heard)->rounds(0).round(), begun->round());
  EXPECT_TRUE((*heard)->rounds(0).gathering());
  proto::UpdateStatusRequest ask;
  ask.set_round(begun->round());
  ask.set_wait_ms(5000);
  const auto over =
      loop_.run(rpc::call<proto::COORDINATOR_UPDATE_STATUS>(command.client, ask, 20s));
  ASSERT_TRUE(over) << over.error().message();
  EXPECT_EQ(over->phase(), "over");
  EXPECT_EQ(over->members(0).state(), "left out");
  ask.set_round(begun->round() + 1);
  EXPECT_EQ(loop_.run(rpc::call<proto::COORDINATOR_UPDATE_STATUS>(command.client, ask, 5s))
                .error()
                .code(),
            ErrorCode::kNotFound);
}

TEST_F(CoordinatorDaemon, ThePartsOfAJointPublicationMakeItReadyAlsoAfterAKill) {
  start();
  Agent a = agent("a");
  ASSERT_TRUE(enroll(a));
  proto::PublishRequest claim;
  claim.set_node_id("a");
  claim.set_incarnation(a.identity.incarnation.to_bytes());
  *claim.mutable_id() = rpc::to_proto(kId);
  *claim.mutable_root() = rpc::to_proto(kRoot);
  for (std::uint8_t i = 0; i < 2; ++i) *claim.add_parts() = rpc::to_proto(Digest{7, i});
  const auto publish_parts = [&](const proto::PublishRequest& request) {
    return loop_.run(rpc::call<proto::COORDINATOR_PUBLISH>(a.client, request, 5s));
  };
  ASSERT_TRUE(publish_parts(claim));
  proto::PublishRequest bad = claim;
  bad.mutable_parts(1)->set_value("short");
  EXPECT_EQ(publish_parts(bad).error().code(), ErrorCode::kInvalid);
  bad = claim;
  while (bad.parts_size() <= 4096) *bad.add_parts() = rpc::to_proto(Digest{7, 1});
  EXPECT_THAT(publish_parts(bad).error().message(), HasSubstr("4097 parts; at most 4096"));

  process_->kill();
  start();
  a = agent("a");
  const Agent b = agent("b");
  const auto hold = [&](const Agent& holder, std::uint8_t part) {
    ASSERT_TRUE(enroll(holder));
    proto::AnnounceRequest request;
    request.set_node_id(holder.identity.node_id);
    request.set_incarnation(holder.identity.incarnation.to_bytes());
    auto& holding = *request.add_add();
    *holding.mutable_id() = rpc::to_proto(kId);
    *holding.mutable_root() = rpc::to_proto(kRoot);
    *holding.mutable_layout() = rpc::to_proto(Digest{7, part});
    holding.set_complete(true);
    holding.set_verified(true);
    ASSERT_TRUE(loop_.run(rpc::call<proto::COORDINATOR_ANNOUNCE>(holder.client, request, 5s)));
  };
  hold(a, 0);
  const Agent p = agent("p");
  EXPECT_FALSE(open(p, "qwen3"));
  hold(b, 1);
  const auto opened = open(p, "qwen3");
  ASSERT_TRUE(opened) << opened.error().message();
  EXPECT_EQ(opened->sources_size(), 2);
}

proto::JointReport joint_report(const rpc::Identity& from, std::uint32_t rank) {
  proto::JointReport report;
  report.set_node_id(from.node_id);
  report.set_incarnation(from.incarnation.to_bytes());
  *report.mutable_id() = rpc::to_proto(kId);
  report.set_world(2);
  report.add_ranks(rank);
  return report;
}

TEST_F(CoordinatorDaemon, AnAgentWaitsForTheRosterOfAJointPublication) {
  start();
  const Agent a = agent("a");
  const Agent b = agent("b");
  const auto say = [&](const Agent& from, proto::JointReport report, std::uint32_t wait_ms) {
    report.set_wait_ms(wait_ms);
    return rpc::call<proto::COORDINATOR_REPORT_JOINT>(from.client, std::move(report), 20s);
  };
  const proto::JointReport of_a = joint_report(a.identity, 0);
  EXPECT_EQ(loop_.run(say(a, of_a, 5000)).error().code(), ErrorCode::kUnavailable)
      << "it must register";
  ASSERT_TRUE(enroll(a));
  ASSERT_TRUE(enroll(b));
  const auto early = loop_.run(say(a, of_a, 20));
  ASSERT_TRUE(early) << early.error().message();
  EXPECT_EQ(early->number(), 0u);
  EXPECT_THAT(early->missing(), ::testing::ElementsAre(1));
  EXPECT_EQ(early->missing_total(), 1u);

  std::optional<Result<proto::JointRoster>> heard;
  boost::asio::co_spawn(loop_.io(), say(a, of_a, 5000),
                        [&](const std::exception_ptr&, Result<proto::JointRoster> answer) {
                          heard = std::move(answer);
                        });
  // Over the connection of a, so that it arrives after the call that waits.
  EXPECT_EQ(loop_.run(say(a, joint_report(b.identity, 1), 0)).error().code(), ErrorCode::kDenied)
      << "a speaks for b";
  EXPECT_FALSE(heard);
  EXPECT_EQ(loop_.run(say(b, joint_report(b.identity, 0), 5000)).error().code(), ErrorCode::kDenied)
      << "an error is not waited for";
  const auto last = loop_.run(say(b, joint_report(b.identity, 1), 5000));
  ASSERT_TRUE(last) << last.error().message();
  loop_.run_until([&] { return heard.has_value(); });
  ASSERT_TRUE(*heard);
  EXPECT_EQ((*heard)->SerializeAsString(), last->SerializeAsString());
  EXPECT_GT(last->number(), 0u);
  ASSERT_EQ(last->hosts_size(), 2);
  EXPECT_EQ(last->hosts(0).node().node_id(), "a");
  EXPECT_EQ(last->hosts(0).node().control_endpoint(), "127.0.0.1:7400");
  EXPECT_EQ(last->hosts(0).node().incarnation(), a.identity.incarnation.to_bytes());
  EXPECT_THAT(last->hosts(0).ranks(), ::testing::ElementsAre(0));
  EXPECT_THAT(last->hosts(1).ranks(), ::testing::ElementsAre(1));

  proto::JointReport leave = of_a;
  leave.set_leave(true);
  const auto left = loop_.run(say(a, leave, 5000));
  ASSERT_TRUE(left) << left.error().message();
  EXPECT_EQ(left->number(), 0u);
  EXPECT_EQ(loop_.run(say(b, joint_report(b.identity, 1), 0))->number(), 0u) << "it is dissolved";
}

TEST_F(CoordinatorDaemon, AnUpdateWaitsForAgentsThatHaveYetToReport) {
  start({"--dead-after", "4000"});  // as long as it waits for b
  const Agent a = agent("a");
  ASSERT_TRUE(enroll(a));
  ASSERT_TRUE(announce(a, kId, kRoot));
  const auto say = [&](const Agent& agent) {
    return loop_.run(rpc::call<proto::COORDINATOR_ROUND>(agent.client, report_of(agent), 5s));
  };
  ASSERT_TRUE(say(a));
  proto::BeginUpdateRequest begin;
  *begin.mutable_id() = rpc::to_proto(kId);
  const Agent b = agent("b");
  // Over the same connection: had it begun before b reports, that would be heard before.
  const auto begun = begin_update(b, begin, {&a, &b}, [&](const bool& over) {
    ASSERT_TRUE(enroll(b));
    ASSERT_TRUE(say(b));
    EXPECT_FALSE(over);
  });
  ASSERT_TRUE(begun) << begun.error().message();
  proto::UpdateStatusRequest ask;
  ask.set_round(begun->round());
  const auto status = loop_.run(rpc::call<proto::COORDINATOR_UPDATE_STATUS>(b.client, ask, 5s));
  ASSERT_TRUE(status) << status.error().message();
  EXPECT_EQ(status->members_size(), 2);
}

TEST_F(CoordinatorDaemon, TheSecretIsRequiredAndNeverShown) {
  const std::string secret = "a secret of the cluster";
  rekindle::testing::write_file(temp_ / "secret", secret);
  ::chmod((temp_ / "secret").c_str(), 0600);
  start({"--secret", (temp_ / "secret").string()});
  Agent without{make_identity(proto::ROLE_AGENT, "a"), {}};
  EXPECT_EQ(connect(without).error().code(), ErrorCode::kDenied);
  Agent wrong{make_identity(proto::ROLE_AGENT, "a", "another secret, as long"), {}};
  EXPECT_EQ(connect(wrong).error().code(), ErrorCode::kDenied);
  const Agent right = agent("a", secret);
  ASSERT_TRUE(enroll(right));
  ASSERT_TRUE(announce(right, kId, kRoot));
  const Agent p = agent("p", secret);
  const auto opened = open(p, "qwen3");
  ASSERT_TRUE(opened);
  const rpc::GrantCheck check{p.identity.incarnation, right.identity.incarnation, kRoot};
  const std::string key = p.client->peer().public_key;
  EXPECT_TRUE(rpc::check_grant(opened->sources(0).grant(), key, secret, check));
  EXPECT_FALSE(rpc::check_grant(opened->sources(0).grant(), "", "", check));
  process_->signal(SIGTERM);
  ASSERT_TRUE(process_->wait());
  EXPECT_EQ(process_->err().find(secret), std::string::npos);
}

}  // namespace
}  // namespace rekindle::coordinator
