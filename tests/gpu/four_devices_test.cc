// Broadcasts among four devices, of one host or of two agents.
#include <csignal>

#include "tests/gpu/round_workers.h"

namespace rekindle::testing {
namespace {

class FourDevices : public FaultyRounds {
 protected:
  FourDevices() : FaultyRounds(4) {}
  void expect_brings_all(const std::vector<std::string>& agents) {
    for (std::size_t i = 0; i < agents.size(); ++i) {
      auto& member = add_member(agents[i], static_cast<int>(i));
      attach(member, 1);
      expect_takes(member, old_.sums());
      ASSERT_TRUE(is_ok(member.client->ask("loaded")));
    }
    publish("m@2", new_);
    const auto update = move_all(2);
    EXPECT_EQ(update.exit_code, 0) << update.err << update.json;
    EXPECT_EQ(ready_in(update.json), 4) << update.json;
    EXPECT_EQ(broadcast_in(update.json), 4) << update.json;
    for (auto& member : members_) EXPECT_EQ(sums_of(*member->client), new_.sums());
  }
};

TEST_F(FourDevices, OfAHostGetAVersionByBroadcast) {
  start_agents({"a"});
  publish("m@1", old_);
  expect_brings_all({"a", "a", "a", "a"});
}

TEST_F(FourDevices, OfTwoAgentsGetItFromTheOneThatHasIt) {
  start_agents({"a", "b"});
  publish("m@1", old_);
  expect_brings_all({"a", "a", "b", "b"});
}

TEST_F(FourDevices, Row39AWorkerThatIsKilledDoesNotDisturbTheOtherThree) {
  into_the_middle({"a", "a", "a", "a"});
  members_[2]->client->process().kill();
  expect_finish({0, 1, 3});
  const auto update = finish(*update_);
  EXPECT_NE(update.exit_code, 0);
  EXPECT_EQ(ready_in(update.json), 3) << update.json;
  EXPECT_EQ(broadcast_in(update.json), 3) << update.json;
  EXPECT_TRUE(eventually_no_sessions()) << devices();
}

TEST_F(FourDevices, Row43ADeviceProcessThatIsKilledEndsTheRoundAndAllFinish) {
  into_the_middle({"a", "a", "b", "b"});
  ASSERT_EQ(::kill(device_process("b"), SIGKILL), 0);
  expect_finish({0, 1});
  for (const std::size_t i : {2u, 3u}) {
    const auto lost = members_[i]->client->ask("take all");
    EXPECT_EQ(lost["code"], "UNAVAILABLE") << lost;
  }
  ASSERT_TRUE(eventually_serving(1, "b")) << devices("b");
  for (const std::size_t i : {2u, 3u}) attach(*members_[i], 2);
  expect_finish({2, 3});
  const auto update = finish(*update_);
  EXPECT_LT(broadcast_in(update.json), 4) << update.json;
}

TEST_F(FourDevices, Row43AnAgentThatIsKilledEndsTheRoundAndTheOthersFinish) {
  into_the_middle({"a", "a", "b", "b"});
  fleet_.agent("b").process->kill();
  expect_finish({0, 1});
  const auto update = finish(*update_);
  EXPECT_NE(update.exit_code, 0);
  EXPECT_EQ(ready_in(update.json), 2) << update.json;
}

}  // namespace
}  // namespace rekindle::testing
