// Rounds in which a worker, a device process, an agent or the coordinator dies or stops.
#include <csignal>

#include "tests/gpu/round_workers.h"

namespace rekindle::testing {
namespace {

class RoundFaults : public FaultyRounds {
 protected:
  Member& one() { return *members_[0]; }
  Member& other() { return *members_[1]; }
  void expect_finishes(Member& member) {
    expect_takes(member, new_.sums());
    EXPECT_TRUE(is_ok(member.client->ask("loaded")));
  }
};

TEST_F(RoundFaults, Row39AWorkerThatIsKilledDoesNotDisturbTheRound) {
  into_the_middle({"a", "a"});
  other().client->process().kill();
  expect_finishes(one());
  const auto update = finish(*update_);
  EXPECT_NE(update.exit_code, 0);
  EXPECT_EQ(ready_in(update.json), 1) << update.json;
  EXPECT_EQ(broadcast_in(update.json), 1) << update.json;
  EXPECT_TRUE(eventually_no_sessions()) << devices();
}

TEST_F(RoundFaults, Row40AWorkerThatIsStoppedDoesNotDisturbTheRoundForLong) {
  into_the_middle({"a", "a"});
  other().client->process().signal(SIGSTOP);
  expect_finishes(one());
  other().client->process().kill();
  const auto update = finish(*update_);
  EXPECT_NE(update.exit_code, 0);
  EXPECT_EQ(ready_in(update.json), 1) << update.json;
  EXPECT_EQ(broadcast_in(update.json), 1) << update.json;
}

TEST_F(RoundFaults, Row42AnInstanceWithARankThatDiedIsNotReady) {
  start_agents({"a"});
  publish("m@1", old_);
  for (int i = 0; i < 2; ++i) {
    auto& member = add_member("a", i, "instance=pair world=2 rank=" + std::to_string(i));
    attach(member, 1);
  }
  for (auto& member : members_) ASSERT_TRUE(is_ok(member->client->ask("take all")));
  for (auto& member : members_) member->client->tell("loaded");
  for (auto& member : members_) ASSERT_TRUE(is_ok(member->client->answer()));
  publish("m@2", new_);
  for (auto& member : members_) wait(*member);
  const auto update = start_update("m@2");
  for (auto& member : members_) expect_hears_of(*member, 2);
  for (auto& member : members_) attach(*member, 2);
  for (auto& member : members_) member->client->tell("take all");
  for (auto& member : members_) ASSERT_TRUE(is_ok(member->client->answer()));
  one().client->tell("loaded");
  EXPECT_TRUE(eventually([&] {  // the agent has heard it
    Process events(fleet_.command({"events", "--store", fleet_.agent("a").store.string()}));
    EXPECT_TRUE(events.wait(kPatience));
    const std::string said = events.out();
    return said.find("\"event\":\"loaded\"", said.find("\"version\":2")) != std::string::npos;
  }));
  other().client->process().kill();
  const auto loaded = one().client->answer();
  EXPECT_EQ(loaded["code"], "UNAVAILABLE") << loaded;
  const auto answer = finish(*update);
  EXPECT_NE(answer.exit_code, 0);
  EXPECT_EQ(ready_in(answer.json), 0) << answer.json;
}

TEST_F(RoundFaults, Row43ADeviceProcessThatIsKilledEndsTheRoundAndTheOthersFinishFromTheirCopies) {
  into_the_middle({"a", "b"});
  ASSERT_EQ(::kill(device_process("b"), SIGKILL), 0);
  expect_finishes(one());
  const auto lost = other().client->ask("take all");
  EXPECT_EQ(lost["code"], "UNAVAILABLE") << lost;
  ASSERT_TRUE(eventually_serving(1, "b")) << devices("b");
  attach(other(), 2);
  expect_finishes(other());
  const auto update = finish(*update_);
  EXPECT_LT(broadcast_in(update.json), 2) << update.json;
}

TEST_F(RoundFaults, Row43ADeviceProcessThatIsStoppedEndsTheRoundAndTheOthersFinish) {
  into_the_middle({"a", "b"});
  const pid_t stopped = device_process("b");
  ASSERT_EQ(::kill(stopped, SIGSTOP), 0);
  expect_finishes(one());
  (void)::kill(stopped, SIGCONT);
  // It goes on from its own copy, unless its agent has given its device process up by now.
  if (!is_ok(other().client->ask("take all"))) {
    ASSERT_TRUE(eventually([&] { return devices("b").value("state", "") == "serving"; }));
    attach(other(), 2);
    ASSERT_TRUE(is_ok(other().client->ask("take all")));
  }
  EXPECT_EQ(sums_of(*other().client), new_.sums());
  EXPECT_TRUE(is_ok(other().client->ask("loaded")));
  const auto update = finish(*update_);
  EXPECT_LT(broadcast_in(update.json), 2) << update.json;
}

TEST_F(RoundFaults, Row43AnAgentThatIsKilledEndsTheRoundAndTheOthersFinish) {
  into_the_middle({"a", "b"});
  fleet_.agent("b").process->kill();
  expect_finishes(one());
  const auto update = finish(*update_);
  EXPECT_NE(update.exit_code, 0);
  EXPECT_EQ(ready_in(update.json), 1) << update.json;
}

// The one without a copy, when the one that has it goes: it fetches from a third.
TEST_F(RoundFaults, Row43SurvivorsWithoutACopyFetchWhatIsLeft) {
  start_agents({"c"});
  into_the_middle({"a", "b"});
  fleet_.publish("c", "m@2", [&] {
    new_.write(fleet_.dir("again"));
    return fleet_.dir("again");
  }());
  fleet_.agent("a").process->kill();
  expect_finishes(other());
}

// Hosts without a member have the version, and the hosts of the members fetch their shares. With
// slow links between the hosts: tests/net/rounds.sh.
class FetchingFaults : public RoundFaults {
 protected:
  void into_the_middle_of(const std::vector<std::string>& holders) {
    start_agents(holders);
    into_the_middle({"a", "b"}, holders);
  }
};

TEST_F(FetchingFaults, Row43ASourceThatIsKilledEndsNoRoundIfThereIsAnother) {
  into_the_middle_of({"s", "t"});
  fleet_.agent("s").process->kill();
  expect_finish({0, 1});
  const auto update = finish(*update_);
  EXPECT_EQ(update.exit_code, 0) << update.err << update.json;
  EXPECT_EQ(broadcast_in(update.json), 2) << update.json;
}

TEST_F(FetchingFaults, Row39AnOwnersWorkerThatIsKilledDoesNotDisturbTheRound) {
  into_the_middle_of({"s"});
  other().client->process().kill();
  expect_finishes(one());
  const auto update = finish(*update_);
  EXPECT_NE(update.exit_code, 0);
  EXPECT_EQ(ready_in(update.json), 1) << update.json;
  EXPECT_EQ(broadcast_in(update.json), 1) << update.json;
}

TEST_F(FetchingFaults, Row43AnOwnersAgentThatIsKilledEndsTheRoundAndTheOthersFetchItsShare) {
  into_the_middle_of({"s", "t"});
  fleet_.agent("b").process->kill();
  expect_finishes(one());
  const auto update = finish(*update_);
  EXPECT_NE(update.exit_code, 0);
  EXPECT_EQ(ready_in(update.json), 1) << update.json;
}

TEST_F(RoundFaults, ACoordinatorThatIsKilledTakesNothingAway) {
  into_the_middle({"a", "a"});
  fleet_.coordinator().kill();
  for (auto& member : members_) {
    member->client->tell("take all");
  }
  for (auto& member : members_) {
    const auto taken = member->client->answer();
    ASSERT_TRUE(is_ok(taken)) << taken;
    EXPECT_EQ(sums_of(*member->client), new_.sums());
    EXPECT_TRUE(is_ok(member->client->ask("loaded")));
  }
}

}  // namespace
}  // namespace rekindle::testing
