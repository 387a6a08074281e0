#include <csignal>
#include <filesystem>
#include <memory>
#include <vector>

#include <sys/resource.h>

#include <boost/asio/co_spawn.hpp>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "proto/state.pb.h"
#include "recovery/coordinator/state_directory.h"
#include "recovery/coordinator/state_records.h"
#include "tests/recovery/coordinator_daemon_fixture.h"
#include "tests/recovery/rpc_raw.h"

// The real coordinator process that is killed, paused, ended, or at a limit.
namespace rekindle::coordinator {
namespace {

using namespace testing;
using rekindle::testing::eventually;
using ::testing::HasSubstr;

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
  const auto early = loop_.run(rpc::call<proto::COORDINATOR_PULL_PROGRESS>(p.client, progress, 5s));
  ASSERT_TRUE(early) << early.error().message();
  EXPECT_TRUE(early->grace());
  ASSERT_TRUE(announce(a, kId, kRoot));
  EXPECT_EQ(loop_.run(rpc::call<proto::COORDINATOR_PULL_PROGRESS>(p.client, progress, 5s))
                ->sources_size(),
            1);
}

TEST_F(CoordinatorDaemon, Row26KilledAtAnyDurableStepItComesBackBeforeOrAfterIt) {
  // The steps at which the claim's frame is appended; those of a new log come with a test of their
  // own (CoordinatorState).
  for (const char* step : {"half_written", "before_sync", "saved"}) {
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
      const auto records = directory->load();
      ASSERT_TRUE(records) << records.error().message();
      const auto parsed = StateRecords::parse(*records);
      ASSERT_TRUE(parsed) << parsed.error().message();
      const DurableState& state = parsed->state();
      EXPECT_EQ(state.epoch, 1u);
      // Between the two the kernel has the whole frame, which may or may not be on the disk.
      if (std::string_view(step) == "half_written") {
        EXPECT_TRUE(state.versions.empty());
      }
      if (std::string_view(step) == "saved") {
        ASSERT_TRUE(state.versions.contains(kId));
      }
      if (!state.versions.empty()) {
        EXPECT_EQ(state.versions.at(kId).root, kRoot);
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

TEST_F(CoordinatorDaemon, C3AStateThatNeedsANewerReleaseIsRefusedAndNotChanged) {
  start();
  process_->kill();
  const auto path = temp_ / "state" / "state";
  auto records = decode_log(rekindle::testing::read_file(path));
  ASSERT_TRUE(records);
  proto::StateMeta meta;
  ASSERT_TRUE(meta.ParseFromString((*records)["meta"]));
  meta.set_min_writer(kStateWriter + 1);
  meta.set_written_by("rekindle 9.8.7");
  const std::string bytes = encode_frame(1, {{"meta", meta.SerializeAsString()}});
  rekindle::testing::write_file(path, bytes);

  const auto refused = spawn();
  const auto exit = refused->wait();
  ASSERT_TRUE(exit);
  EXPECT_NE(exit->code, 0);
  EXPECT_EQ(refused->out(), "") << "it has led";
  EXPECT_THAT(refused->err(),
              HasSubstr(path.string() + ": the state was written by rekindle 9.8.7"));
  EXPECT_EQ(rekindle::testing::read_file(path), bytes);
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
  const auto status = loop_.run(rpc::call<proto::COORDINATOR_STATUS>(a.client, {}, 5s));
  ASSERT_TRUE(status) << status.error().message();
  EXPECT_NE(status->nodes(0).state(), "dead");
  EXPECT_TRUE(status->grace());
  EXPECT_EQ(status->versions(0).state(), "ready");
  EXPECT_TRUE(beat(a)) << "without registering again";
}

TEST_F(CoordinatorDaemon, Row34AThousandAgentsJoinAtOnce) {
  rpc::testing::allow_many_descriptors();
  start({"--dead-after", "60000"});  // nobody sends the source's heartbeats meanwhile
  const Agent source = agent("source");
  ASSERT_TRUE(enroll(source));
  ASSERT_TRUE(announce(source, kId, kRoot));
  constexpr int kAgents = 1000;
  std::vector<std::shared_ptr<rpc::RpcClient>> clients(kAgents);
  int joined = 0;
  int answered = 0;
  int ended = 0;
  const auto join = [&](int i) -> async::Task<void> {
    const Agent agent{make_identity(proto::ROLE_AGENT, fmt::format("n{}", i)), {}};
    const auto client = co_await rpc::RpcClient::connect(address_, agent.identity, 20s);
    if (!client) co_return;
    clients[static_cast<std::size_t>(i)] = *client;
    proto::RegisterRequest enroll_request;
    *enroll_request.mutable_node() = agent.address();
    if (co_await rpc::call<proto::COORDINATOR_REGISTER>(*client, enroll_request, 20s)) ++joined;
    proto::OpenPullRequest open_request;
    *open_request.mutable_puller() = agent.address();
    open_request.set_model("qwen3");
    open_request.set_latest(true);
    const auto opened =
        co_await rpc::call<proto::COORDINATOR_OPEN_PULL>(*client, open_request, 20s);
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

}  // namespace
}  // namespace rekindle::coordinator
