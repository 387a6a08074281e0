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

}  // namespace
}  // namespace rekindle::testing
