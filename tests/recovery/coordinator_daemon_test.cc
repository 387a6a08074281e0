#include <functional>
#include <optional>
#include <vector>

#include <sys/stat.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "recovery/coordinator/state_directory.h"
#include "recovery/rpc/convert.h"
#include "recovery/rpc/coordinator_client.h"
#include "recovery/rpc/grants.h"
#include "tests/recovery/rpc_fixture.h"
#include "tests/recovery/rpc_raw.h"
#include "tests/support/process.h"

// The real coordinator process over real sockets.
namespace rekindle::coordinator {
namespace {

using rekindle::testing::eventually;
using rekindle::testing::Process;
using rekindle::testing::TempDir;
using rpc::CoordinatorClient;
using rpc::testing::Loop;
using rpc::testing::make_identity;
using ::testing::HasSubstr;
using namespace std::chrono_literals;

class CoordinatorDaemon : public ::testing::Test {
 protected:
  std::unique_ptr<Process> spawn(std::vector<std::string> extra = {},
                                 const std::string& listen = "127.0.0.1:0") {
    rekindle::testing::Spawn spawn;
    spawn.argv = {COORDINATOR_MAIN, listen, (temp_ / "state").string()};
    spawn.argv.insert(spawn.argv.end(), extra.begin(), extra.end());
    return std::make_unique<Process>(std::move(spawn));
  }
  void start(std::vector<std::string> extra = {}) {
    process_ = spawn(std::move(extra), address_.empty() ? "127.0.0.1:0" : address_);
    address_ = process_->value_after("ready ");
    ASSERT_FALSE(address_.empty()) << process_->err();
  }

  struct Agent {
    rpc::Identity identity;
    CoordinatorClient client;

    proto::NodeAddress address() const {
      proto::NodeAddress node;
      node.set_node_id(identity.node_id);
      node.set_incarnation(identity.incarnation.to_bytes());
      node.set_control_endpoint("0.0.0.0:7400");
      return node;
    }
  };
  Result<void> connect(Agent& agent) {
    TRY(agent.client, loop_.run(CoordinatorClient::connect(address_, agent.identity, 5s)));
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
    return loop_.run(agent.client.register_node(std::move(request), 5s));
  }
  static rpc::Task<Result<proto::HeartbeatResponse>> heartbeat(const Agent& agent) {
    proto::HeartbeatRequest request;
    request.set_node_id(agent.identity.node_id);
    request.set_incarnation(agent.identity.incarnation.to_bytes());
    return agent.client.heartbeat(std::move(request), 5s);
  }
  Result<proto::HeartbeatResponse> beat(const Agent& agent) { return loop_.run(heartbeat(agent)); }
  Result<proto::PublishResponse> publish(const Agent& agent, const ModelVersion& id,
                                         const Digest128& root) {
    proto::PublishRequest request;
    request.set_node_id(agent.identity.node_id);
    request.set_incarnation(agent.identity.incarnation.to_bytes());
    *request.mutable_id() = rpc::to_proto(id);
    *request.mutable_root() = rpc::to_proto(root);
    return loop_.run(agent.client.publish(std::move(request), 5s));
  }
  Result<proto::AnnounceResponse> announce(const Agent& agent, const ModelVersion& id,
                                           const Digest128& root) {
    proto::AnnounceRequest request;
    request.set_node_id(agent.identity.node_id);
    request.set_incarnation(agent.identity.incarnation.to_bytes());
    request.set_full(true);
    auto& holding = *request.add_add();
    *holding.mutable_id() = rpc::to_proto(id);
    *holding.mutable_root() = rpc::to_proto(root);
    *holding.mutable_layout() = rpc::to_proto(Digest128{9, 9});
    holding.set_complete(true);
    holding.set_whole(true);
    return loop_.run(agent.client.announce(std::move(request), 5s));
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
    auto call = rpc::call<proto::BeginUpdateResponse>(
        command.client.client(), proto::COORDINATOR_BEGIN_UPDATE, std::move(request), 20s);
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
    return loop_.run(agent.client.open_pull(std::move(request), 5s));
  }

  TempDir temp_;
  Loop loop_;
  std::string address_;
  std::unique_ptr<Process> process_;
};

const ModelVersion kId{"qwen3", 41};
const Digest128 kRoot{1, 2};

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
  EXPECT_TRUE(rpc::check_grant(grant, "", {p.identity.incarnation, a.identity.incarnation, kRoot}));
  const auto beaten = beat(a);
  ASSERT_TRUE(beaten);
  EXPECT_GT(grant.expiry_ms(), beaten->coordinator_time_ms());
  const auto status = loop_.run(p.client.status(5s));
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
  const CoordinatorClient own = liar.client;
  liar.identity.incarnation = a.identity.incarnation;  // in the bodies, not in its hello
  EXPECT_EQ(beat(liar).error().code(), ErrorCode::kDenied);
  EXPECT_EQ(enroll(liar).error().code(), ErrorCode::kDenied);
  EXPECT_EQ(publish(liar, kId, kRoot).error().code(), ErrorCode::kDenied);
  EXPECT_EQ(announce(liar, kId, kRoot).error().code(), ErrorCode::kDenied);
  EXPECT_EQ(open(liar, "qwen3").error().code(), ErrorCode::kDenied);
}

TEST_F(CoordinatorDaemon, Row25AKilledCoordinatorComesBackWithAHigherEpochAndItsVersions) {
  start();
  Agent a = agent("a");
  ASSERT_TRUE(enroll(a));
  ASSERT_TRUE(publish(a, kId, kRoot));
  Agent p = agent("p");
  ASSERT_TRUE(announce(a, kId, kRoot));
  const auto opened = open(p, "qwen3");
  ASSERT_TRUE(opened);
  process_->kill();
  start();  // the same address
  ASSERT_TRUE(connect(a));
  ASSERT_TRUE(connect(p));
  const auto registered = enroll(a, 1);
  ASSERT_TRUE(registered);
  EXPECT_GT(registered->epoch(), 1u);
  EXPECT_EQ(publish(a, kId, {5, 5}).error().code(), ErrorCode::kDenied) << "the claim survived";
  proto::PullProgressRequest progress;
  progress.set_pull_id(opened->pull_id());
  *progress.mutable_puller() = p.address();
  *progress.mutable_id() = rpc::to_proto(kId);
  const auto early = loop_.run(p.client.pull_progress(progress, 5s));
  ASSERT_TRUE(early) << early.error().message();
  EXPECT_TRUE(early->grace());
  ASSERT_TRUE(announce(a, kId, kRoot));
  EXPECT_EQ(loop_.run(p.client.pull_progress(progress, 5s))->sources_size(), 1);
}

TEST_F(CoordinatorDaemon, Row26KilledAtAnyDurableStepItComesBackBeforeOrAfterIt) {
  for (const char* step :
       {"half_written", "before_sync", "before_rename", "before_directory_sync", "saved"}) {
    SCOPED_TRACE(step);
    std::filesystem::remove_all(temp_ / "state");
    address_.clear();
    // The first save is the epoch of the start, the second the claim.
    start({"--failpoints", fmt::format("coordinator.state.{}=kill@2", step)});
    const Agent a = agent("a");
    ASSERT_TRUE(enroll(a));
    EXPECT_EQ(publish(a, kId, kRoot).error().code(), ErrorCode::kPeerLost);
    const auto exit = process_->wait();
    ASSERT_TRUE(exit);
    EXPECT_EQ(exit->signal, SIGKILL);
    {
      auto directory = StateDirectory::open(temp_ / "state");
      ASSERT_TRUE(directory) << directory.error().message();
      const auto state = directory->load();
      ASSERT_TRUE(state) << state.error().message();
      EXPECT_EQ(state->epoch, 1u);
      if (!state->versions.empty()) {
        EXPECT_EQ(state->versions.at(kId).root, kRoot);
      }
    }
    address_.clear();
    start();
    Agent again{a.identity, {}};
    ASSERT_TRUE(connect(again));
    ASSERT_EQ(enroll(again, 1)->epoch(), 2u);
    ASSERT_TRUE(publish(again, kId, kRoot)) << "the publisher tries again";
    EXPECT_EQ(publish(again, kId, {5, 5}).error().code(), ErrorCode::kDenied);
  }
}

TEST_F(CoordinatorDaemon, AFullDiskRefusesThePublishAndServingGoesOn) {
  start({"--failpoints", "coordinator.state.before_sync=error:ENOSPC@2"});
  const Agent a = agent("a");
  ASSERT_TRUE(enroll(a));
  const auto refused = publish(a, kId, kRoot);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), ErrorCode::kExhausted);
  EXPECT_TRUE(beat(a));
  EXPECT_TRUE(publish(a, kId, kRoot)) << "space is back";
}

TEST_F(CoordinatorDaemon, Row28ASecondCoordinatorOnTheDirectoryIsRefused) {
  start();
  const auto second = spawn();
  const auto exit = second->wait();
  ASSERT_TRUE(exit);
  EXPECT_EQ(exit->code, 1);
  EXPECT_THAT(second->err(), HasSubstr("in use by another coordinator (pid "));
  EXPECT_TRUE(enroll(agent("a"))) << "the first is unharmed";
}

TEST_F(CoordinatorDaemon, APortInUseIsNamed) {
  start();
  rekindle::testing::Spawn spawn;
  spawn.argv = {COORDINATOR_MAIN, address_, (temp_ / "other").string()};
  Process second(std::move(spawn));
  ASSERT_TRUE(second.wait());
  EXPECT_THAT(second.err(), HasSubstr(address_));
  EXPECT_THAT(second.err(), HasSubstr("another process uses this port"));
}

TEST_F(CoordinatorDaemon, SigtermEndsItCleanlyWithCallersConnected) {
  start();
  const Agent a = agent("a");
  ASSERT_TRUE(enroll(a));
  process_->signal(SIGTERM);
  const auto exit = process_->wait();
  ASSERT_TRUE(exit);
  EXPECT_EQ(exit->code, 0);
  EXPECT_EQ(beat(a).error().code(), ErrorCode::kPeerLost);
}

TEST_F(CoordinatorDaemon, Row31APausedCoordinatorKillsNobody) {
  start();
  const Agent a = agent("a");
  ASSERT_TRUE(enroll(a));
  ASSERT_TRUE(announce(a, kId, kRoot));
  process_->signal(SIGSTOP);
  loop_.run(rpc::testing::sleep_for(3s));  // longer than the TTL
  process_->signal(SIGCONT);
  const auto status = loop_.run(a.client.status(5s));
  ASSERT_TRUE(status) << status.error().message();
  EXPECT_NE(status->nodes(0).state(), "dead");
  EXPECT_TRUE(status->grace());
  EXPECT_EQ(status->versions(0).state(), "ready");
  EXPECT_TRUE(beat(a)) << "without registering again";
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
  const auto drained = loop_.run(p.client.drain(request, 5s));
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
  const auto status = loop_.run(q.client.status(5s));
  ASSERT_TRUE(status);
  EXPECT_TRUE(status->nodes(0).drained());
  request.set_undo(true);
  ASSERT_TRUE(loop_.run(q.client.drain(request, 5s)));
  EXPECT_EQ(open(q, "qwen3")->sources_size(), 1);
  request.set_node_id("nobody");
  EXPECT_EQ(loop_.run(q.client.drain(request, 5s)).error().code(), ErrorCode::kNotFound);
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
    return loop_.run(node.client.report_rank(std::move(report), 5s));
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
  EXPECT_EQ(loop_.run(b.client.report_rank(theft, 5s)).error().code(), ErrorCode::kDenied);
}

TEST_F(CoordinatorDaemon, Row34AThousandAgentsJoinAtOnce) {
  rpc::testing::allow_many_descriptors();
  start({"--dead-after", "60000"});  // nobody sends the source's heartbeats meanwhile
  const Agent source = agent("source");
  ASSERT_TRUE(enroll(source));
  ASSERT_TRUE(announce(source, kId, kRoot));
  constexpr int kAgents = 1000;
  std::vector<CoordinatorClient> clients(kAgents);
  int joined = 0;
  int answered = 0;
  int ended = 0;
  const auto join = [&](int i) -> rpc::Task<void> {
    const Agent agent{make_identity(proto::ROLE_AGENT, fmt::format("n{}", i)), {}};
    auto client = co_await CoordinatorClient::connect(address_, agent.identity, 20s);
    if (!client) co_return;
    clients[static_cast<std::size_t>(i)] = *client;
    proto::RegisterRequest enroll_request;
    *enroll_request.mutable_node() = agent.address();
    if (co_await client->register_node(enroll_request, 20s)) ++joined;
    proto::OpenPullRequest open_request;
    *open_request.mutable_puller() = agent.address();
    open_request.set_model("qwen3");
    open_request.set_latest(true);
    const auto opened = co_await client->open_pull(open_request, 20s);
    if (opened && (opened->sources_size() > 0 || opened->retry_after_ms() > 0)) ++answered;
  };
  for (int i = 0; i < kAgents; ++i) {
    boost::asio::co_spawn(loop_.executor(), join(i), [&](std::exception_ptr) { ++ended; });
  }
  loop_.run_until([&] { return ended == kAgents; });
  EXPECT_EQ(joined, kAgents);
  EXPECT_EQ(answered, kAgents);
}

TEST_F(CoordinatorDaemon, Row50OutOfDescriptorsItShedsAndRecovers) {
  rekindle::testing::Spawn spawn;
  spawn.argv = {COORDINATOR_MAIN, "127.0.0.1:0", (temp_ / "state").string()};
  spawn.limits = {{RLIMIT_NOFILE, {40, 40}}};
  process_ = std::make_unique<Process>(std::move(spawn));
  address_ = process_->value_after("ready ");
  ASSERT_FALSE(address_.empty()) << process_->err();
  const Agent a = agent("a");
  ASSERT_TRUE(enroll(a));
  {
    // More greeted connections than it has descriptors: idle ones without a hello would make room.
    std::vector<Agent> crowd;
    bool refused = false;
    for (int i = 0; i < 60 && !refused; ++i) {
      crowd.push_back({make_identity(proto::ROLE_AGENT, fmt::format("n{}", i)), {}});
      refused = !connect(crowd.back());
    }
    EXPECT_TRUE(refused);
    EXPECT_TRUE(process_->wait_for_err("rpc.shed")) << process_->err();
    EXPECT_TRUE(beat(a)) << "who is connected is served";
  }
  Agent b{make_identity(proto::ROLE_AGENT, "b"), {}};
  EXPECT_TRUE(eventually([&] { return connect(b).has_value(); })) << "it recovers";
  EXPECT_TRUE(enroll(b));
}

TEST_F(CoordinatorDaemon, AnAgentThatWaitsHearsOfARoundAndACommandOfItsEnd) {
  start();
  const Agent a = agent("a");
  ASSERT_TRUE(enroll(a));
  ASSERT_TRUE(announce(a, kId, kRoot));
  proto::RoundReport report = report_of(a);
  const auto say = [&] {
    report.set_sequence(report.sequence() + 1);
    return rpc::call<proto::RoundOrders>(a.client.client(), proto::COORDINATOR_ROUND, report, 20s);
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
  const auto over = loop_.run(rpc::call<proto::RoundStatus>(
      command.client.client(), proto::COORDINATOR_UPDATE_STATUS, ask, 20s));
  ASSERT_TRUE(over) << over.error().message();
  EXPECT_EQ(over->phase(), "over");
  EXPECT_EQ(over->members(0).state(), "left out");
  ask.set_round(begun->round() + 1);
  EXPECT_EQ(loop_
                .run(rpc::call<proto::RoundStatus>(command.client.client(),
                                                   proto::COORDINATOR_UPDATE_STATUS, ask, 5s))
                .error()
                .code(),
            ErrorCode::kNotFound);
}

TEST_F(CoordinatorDaemon, AnUpdateWaitsForAgentsThatHaveYetToReport) {
  start({"--dead-after", "4000"});  // as long as it waits for b
  const Agent a = agent("a");
  ASSERT_TRUE(enroll(a));
  ASSERT_TRUE(announce(a, kId, kRoot));
  const auto say = [&](const Agent& agent) {
    return loop_.run(rpc::call<proto::RoundOrders>(agent.client.client(), proto::COORDINATOR_ROUND,
                                                   report_of(agent), 5s));
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
  const auto status = loop_.run(
      rpc::call<proto::RoundStatus>(b.client.client(), proto::COORDINATOR_UPDATE_STATUS, ask, 5s));
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
  EXPECT_TRUE(rpc::check_grant(opened->sources(0).grant(), secret, check));
  EXPECT_FALSE(rpc::check_grant(opened->sources(0).grant(), "", check));
  process_->signal(SIGTERM);
  ASSERT_TRUE(process_->wait());
  EXPECT_EQ(process_->err().find(secret), std::string::npos);
}

}  // namespace
}  // namespace rekindle::coordinator
