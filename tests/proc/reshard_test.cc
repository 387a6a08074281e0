// Any layout is read from any other: what three hosts hold in thirds is pulled in halves, eighths
// and whole, through real agents, and compared with what a host that has all of it gives.
#include <gtest/gtest.h>

#include "tests/support/fleet.h"

namespace rekindle::testing {
namespace {

class Reshard : public ::testing::Test {
 protected:
  void SetUp() override {
    fleet_.start_coordinator();
    make_checkpoint(fleet_.dir("model"), 4, 1536, 11);
    write_file(fleet_.dir("rules.json"),
               R"({"name": "rows", "rules": [{"match": "**.weight", "kind": "split", "dim": 0}]})");
    fleet_.start_agent("whole");
    fleet_.publish("whole", "m@1", fleet_.dir("model"));
  }

  Fleet::Answer pull(const std::string& shard, std::vector<std::string> more) {
    std::vector<std::string> arguments = {"pull", "m@1"};
    if (!shard.empty()) {
      arguments.insert(arguments.end(),
                       {"--shard", shard, "--spec", fleet_.dir("rules.json").string()});
    }
    arguments.insert(arguments.end(), more.begin(), more.end());
    return fleet_.run_command(arguments);
  }

  Fleet fleet_;
};

TEST_F(Reshard, ThirdsBecomeHalvesEighthsAndTheWhole) {
  const std::vector<std::string> shards = {"tp=0/2", "tp=1/2", "tp=2/8", "tp=7/8", ""};
  for (const auto& shard : shards) {
    const auto expected = pull(shard, {"--to", fleet_.dir("expected-" + shard).string()});
    ASSERT_EQ(expected.exit_code, 0) << expected.err;
  }
  for (const std::string rank : {"0", "1", "2"}) {
    fleet_.start_agent("third-" + rank);
    const auto answer =
        pull("tp=" + rank + "/3", {"--store", fleet_.agent("third-" + rank).store.string()});
    ASSERT_EQ(answer.exit_code, 0) << answer.err;
  }
  fleet_.agent("whole").process->kill();
  for (const auto& shard : shards) {
    SCOPED_TRACE("shard " + shard);
    const auto answer = pull(shard, {"--to", fleet_.dir("got-" + shard).string()});
    ASSERT_EQ(answer.exit_code, 0) << answer.err;
    EXPECT_EQ(compare_checkpoints(fleet_.dir("expected-" + shard), fleet_.dir("got-" + shard)), "");
  }
}

// Whoever has verified a part of a tile keeps its proof, so that it can give the part, or a smaller
// one, to others, although nobody has the rest of the tile any more.
TEST_F(Reshard, PartsOfTilesComeFromWhoeverHoldsThem) {
  const std::vector<std::string> shards = {"tp=0/2", "tp=1/8", "tp=3/16"};
  for (const auto& shard : shards) {
    const auto expected = pull(shard, {"--to", fleet_.dir("expected-" + shard).string()});
    ASSERT_EQ(expected.exit_code, 0) << expected.err;
  }
  const auto pull_to_agent = [&](const std::string& shard, const std::string& name) {
    fleet_.start_agent(name);
    const auto answer = pull(shard, {"--store", fleet_.agent(name).store.string()});
    ASSERT_EQ(answer.exit_code, 0) << answer.err;
  };
  pull_to_agent("tp=0/4", "quarter-0");
  pull_to_agent("tp=1/4", "quarter-1");
  fleet_.agent("whole").process->kill();

  const auto check = [&](const std::string& shard) {
    SCOPED_TRACE("shard " + shard);
    const auto plan = pull(shard, {"--dry-run"});
    ASSERT_EQ(plan.exit_code, 0) << plan.err;
    EXPECT_EQ(plan.json.at("wire_bytes"), plan.json.at("wanted_bytes"));
    const auto answer = pull(shard, {"--to", fleet_.dir("got-" + shard).string()});
    ASSERT_EQ(answer.exit_code, 0) << answer.err;
    EXPECT_EQ(compare_checkpoints(fleet_.dir("expected-" + shard), fleet_.dir("got-" + shard)), "");
  };
  check("tp=0/2");  // two quarters
  check("tp=1/8");  // the half of one
  // A copy that was put together from parts proves its own.
  pull_to_agent("tp=0/2", "half");
  fleet_.agent("quarter-0").process->kill();
  fleet_.agent("quarter-1").process->kill();
  check("tp=1/8");
  pull_to_agent("tp=1/8", "eighth");
  fleet_.agent("half").process->kill();
  check("tp=3/16");
  // The proofs survive a restart of the agent.
  fleet_.agent("eighth").process->kill();
  fleet_.start_agent("eighth");
  check("tp=3/16");
}

}  // namespace
}  // namespace rekindle::testing
