// The rungs of the recovery ladder, as a worker meets them, each by name. Which sources a pull
// falls to on the way is tests/proc/source_faults_test.cc.
#include <csignal>

#include "tests/proc/worker_fixture.h"

namespace rekindle::testing {
namespace {

class Ladder : public WithWorkers {
 protected:
  void SetUp() override {
    make_checkpoint(fleet_.dir("model"), 8, 1024, 7);
    fleet_.start_coordinator();
  }
  void publish_on(const std::string& agent, std::vector<std::string> more = {}) {
    fleet_.start_agent(agent, std::move(more));
    fleet_.publish(agent, "m@1", fleet_.dir("model"));
  }
  // What the bytes should be: from the host that published them.
  std::string expected() {
    const auto one = worker("a");
    const auto sum = sum_of(*one);
    EXPECT_EQ(sum.size(), 32u) << one->out() << one->err();
    return sum;
  }
};

TEST_F(Ladder, Rung1LocalSegmentsNeedNeitherPeersNorTheCoordinator) {
  publish_on("a");
  const auto sum = expected();
  fleet_.coordinator().kill();
  const auto one = worker("a");
  EXPECT_TRUE(one->wait_for_out("attached m@1 local")) << one->out() << one->err();
  EXPECT_EQ(sum_of(*one), sum);
}

TEST_F(Ladder, Rung2ARestartedAgentServesWhatItAdoptsBeforeTheNetworkIsThere) {
  publish_on("a");
  const auto sum = expected();
  fleet_.agent("a").process->kill();
  fleet_.coordinator().kill();
  Spawn spawn{.argv = {REKINDLE_BINARY, "agent", "--node-id", "a", "--listen", "127.0.0.1:0",
                       "--store", fleet_.agent("a").store.string(), "--coordinator",
                       fleet_.coordinator_address()}};
  Process again(std::move(spawn));
  ASSERT_TRUE(again.wait_for_out("listening")) << again.err();
  const auto one = worker("a");
  EXPECT_EQ(sum_of(*one), sum) << one->out() << one->err();
  // Local once all of it has been verified in the background.
  EXPECT_TRUE(one->out().find("attached m@1 adopted") != std::string::npos ||
              one->out().find("attached m@1 local") != std::string::npos)
      << one->out();
}

TEST_F(Ladder, Rung3PeersBytesAreHandedOverWhileTheRestStillComes) {
  if (!user_namespaces()) GTEST_SKIP() << "no user namespaces: nothing here is another host";
  publish_on("a", {"--max-rate", "16MB"});
  const auto sum = expected();
  fleet_.start_agent("b", {}, "127.0.0.1:0", on_host(fleet_.dir("."), 2));
  const auto one = worker("b");
  EXPECT_TRUE(one->wait_for_out("attached m@1 peers")) << one->out() << one->err();
  EXPECT_EQ(sum_of(*one), sum);
  EXPECT_NE(one->out().find("took a part"), std::string::npos) << one->out();
}

TEST_F(Ladder, Rung4TheFallbackDirectoryBringsWhatNobodyHoldsAnyMore) {
  publish_on("a");
  const auto sum = expected();
  fleet_.start_agent("b");
  fleet_.agent("a").process->kill();
  const auto one = worker("b", {},
                          {{"WORKER_FALLBACK", fleet_.dir("model").string()},
                           {"REKINDLE_INSTANCE", "i"},
                           {"REKINDLE_MODEL", "m@1"}});
  EXPECT_EQ(sum_of(*one), sum) << one->out() << one->err();
  EXPECT_EQ(instance_at("b", "i")["sessions"][0]["rung"], "fallback") << instance_at("b", "i");
}

TEST_F(Ladder, Rung5WithoutAnySourceTheWorkerHearsNoSourceAndWhichTensors) {
  publish_on("a");
  fleet_.start_agent("b");
  fleet_.agent("a").process->kill();
  const auto one = worker("b");
  const std::string why = one->value_after("lost NOT_FOUND: ");
  EXPECT_NE(why.find("NO_SOURCE"), std::string::npos) << one->out() << one->err();
  const auto exit = one->wait();
  ASSERT_TRUE(exit);
  EXPECT_EQ(exit->code, 3);
}

TEST_F(Ladder, PhasesOfAnAttachAreInStatusAndInTheEvents) {
  publish_on("a", {"--max-rate", "64MB"});
  fleet_.start_agent("b");
  const auto first = rank_on("b", 0, 1);
  ASSERT_EQ(sum_of(*first).size(), 32u) << first->out() << first->err();
  const auto now = instance_at("b", "i");
  ASSERT_EQ(now["sessions"].size(), 1u) << now;
  EXPECT_GT(now["sessions"][0]["phases_us"]["wire"].get<std::uint64_t>(), 0u) << now;
  first->kill();
  ASSERT_TRUE(eventually_state("b", "UNFIT"));
  const auto second = rank_on("b", 0, 1);
  ASSERT_EQ(sum_of(*second).size(), 32u) << second->out() << second->err();

  std::vector<std::string> kinds;
  nlohmann::json last;
  for (const auto& event : events_of("b")) {
    kinds.push_back(event["event"]);
    if (event["event"] == "committed") last = event;
  }
  const auto place = [&](const std::string& kind, std::size_t from) {
    return static_cast<std::size_t>(
        std::find(kinds.begin() + static_cast<std::ptrdiff_t>(from), kinds.end(), kind) -
        kinds.begin());
  };
  std::size_t at = 0;
  // A phase that is over in a moment has no event of its own.
  for (const char* const kind : {"attach", "loaded", "committed", "ready"}) {
    const auto found = place(kind, at);
    EXPECT_LT(found, kinds.size()) << kind << " in " << nlohmann::json(kinds);
    at = found;
  }
  EXPECT_LT(place("unfit", at), place("attach", at)) << nlohmann::json(kinds);
  EXPECT_LT(place("ready", at + 1), kinds.size()) << nlohmann::json(kinds);
  EXPECT_GT(last["phases_us"]["detect"].get<std::uint64_t>(), 0u)
      << "the death of its predecessor: " << last;
}

TEST_F(Ladder, EventsAreFollowedIntoTheAgentsNextLife) {
  publish_on("a");
  Process follower({.argv = {REKINDLE_BINARY, "events", "--follow", "--json", "--store",
                             fleet_.agent("a").store.string()}});
  {
    const auto one = rank_on("a", 0, 1);
    ASSERT_EQ(sum_of(*one).size(), 32u);
    ASSERT_TRUE(follower.wait_for_out("\"event\":\"committed\"")) << follower.err();
  }
  fleet_.agent("a").process->kill();
  ASSERT_TRUE(follower.wait_for_err("waiting for it")) << follower.err();
  fleet_.start_agent("a");
  const auto two = worker("a", {}, {{"REKINDLE_INSTANCE", "other"}});
  ASSERT_EQ(sum_of(*two).size(), 32u);
  EXPECT_TRUE(follower.wait_for_out("\"event\":\"ready\",\"instance\":\"other\""))
      << follower.out();
  follower.signal(SIGTERM);
  const auto exit = follower.wait();
  ASSERT_TRUE(exit);
  EXPECT_EQ(exit->code, 0);
}

}  // namespace
}  // namespace rekindle::testing
