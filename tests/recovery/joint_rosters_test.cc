// Which rank of a joint publication is at which agent.
#include <algorithm>
#include <map>
#include <random>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/recovery/coordinator_fixture.h"

namespace rekindle::coordinator {
namespace {

using namespace testing;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

using Ranks = std::vector<std::uint32_t>;

class JointRostersTest : public ::testing::Test {
 protected:
  NodeInfo member(const std::string& name) {
    NodeInfo info = world_.node(name);
    EXPECT_TRUE(world_.enroll(info));
    return info;
  }
  Result<void> report(const NodeInfo& node, Ranks ranks, std::uint32_t world = 4,
                      const ModelVersion& id = kV1) {
    return world_.core->report_joint(
        {node.node_id, node.incarnation, id, world, std::move(ranks), /*leave=*/false}, world_.now);
  }
  Result<void> leave(const NodeInfo& node, const ModelVersion& id = kV1) {
    return world_.core->report_joint({node.node_id, node.incarnation, id, 0, {}, /*leave=*/true},
                                     world_.now);
  }
  // "": it succeeds.
  std::string refusal(const NodeInfo& node, Ranks ranks, std::uint32_t world, ErrorCode code) {
    const auto answer = report(node, std::move(ranks), world);
    if (answer) return "";
    EXPECT_EQ(answer.error().code(), code);
    return answer.error().message();
  }
  JointRoster roster(const ModelVersion& id = kV1) { return rosters().roster_of(id); }
  const JointRosters& rosters() { return world_.core->joint_rosters(); }

  CoreWorld world_;
  const NodeInfo a_ = member("a");
  const NodeInfo b_ = member("b");
  const NodeInfo c_ = member("c");
};

TEST_F(JointRostersTest, ItIsCompleteOnceEveryRankHasDeclaredAndNamesTheHostsByTheirLowestRank) {
  ASSERT_TRUE(report(b_, {2, 0}));
  EXPECT_EQ(roster().number, 0u);
  EXPECT_THAT(roster().hosts, IsEmpty());
  EXPECT_THAT(roster().missing, ElementsAre(1, 3));
  EXPECT_EQ(roster().missing_total, 2u);
  const auto before = rosters().revision();
  ASSERT_TRUE(report(a_, {3, 1}));
  const JointRoster complete = roster();
  EXPECT_GT(complete.number, 0u);
  EXPECT_GT(rosters().revision(), before) << "calls that wait must look";
  EXPECT_THAT(complete.missing, IsEmpty());
  EXPECT_EQ(complete.missing_total, 0u);
  ASSERT_THAT(complete.hosts, SizeIs(2));
  EXPECT_EQ(complete.hosts[0].node.node_id, "b");
  EXPECT_EQ(complete.hosts[0].node.incarnation, b_.incarnation);
  EXPECT_EQ(complete.hosts[0].node.control_endpoint, "b:7400");
  EXPECT_THAT(complete.hosts[0].ranks, ElementsAre(0, 2));
  EXPECT_EQ(complete.hosts[1].node.node_id, "a");
  EXPECT_THAT(complete.hosts[1].ranks, ElementsAre(1, 3));
}

TEST_F(JointRostersTest, TheLastReportOfANodeReplacesItsEarlierOne) {
  ASSERT_TRUE(report(a_, {0, 1}));
  ASSERT_TRUE(report(a_, {1}));
  EXPECT_THAT(roster().missing, ElementsAre(0, 2, 3));
  ASSERT_TRUE(report(b_, {0}));
  ASSERT_TRUE(report(a_, {1, 2, 3}));
  EXPECT_NE(roster().number, 0u);
  // The only reporter may also change the world.
  ASSERT_TRUE(report(c_, {0}, 8, kV2));
  ASSERT_TRUE(report(c_, {0}, 1, kV2));
  EXPECT_NE(roster(kV2).number, 0u);
}

TEST_F(JointRostersTest, AReportThatIsRepeatedChangesNothing) {
  ASSERT_TRUE(report(a_, {0, 1}));
  ASSERT_TRUE(report(b_, {2, 3}));
  const auto number = roster().number;
  const auto revision = rosters().revision();
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(report(b_, {3, 2}));
    ASSERT_TRUE(report(a_, {0, 1}));
  }
  EXPECT_EQ(roster().number, number);
  EXPECT_EQ(rosters().revision(), revision);
}

TEST_F(JointRostersTest, AReportThatContradictsItselfIsRefusedAndChangesNothing) {
  ASSERT_TRUE(report(a_, {0}));
  constexpr auto kInvalid = ErrorCode::kInvalid;
  EXPECT_EQ(refusal(a_, {0, 4}, 4, kInvalid),
            "joint publication of qwen3@1: node 'a' reports rank 4 of a world of 4; ranks count "
            "from 0");
  EXPECT_EQ(refusal(a_, {0, 1, 0}, 4, kInvalid),
            "joint publication of qwen3@1: node 'a' reports rank 0 twice");
  EXPECT_EQ(refusal(a_, {0}, 0, kInvalid),
            "joint publication of qwen3@1: node 'a' reports a world of 0 ranks; 1 to 65536 are "
            "allowed");
  EXPECT_THAT(refusal(a_, {0}, 65'537, kInvalid), HasSubstr("a world of 65537 ranks"));
  EXPECT_THAT(refusal(a_, {}, 4, kInvalid), HasSubstr("node 'a' reports no rank"));
  EXPECT_THAT(roster().missing, ElementsAre(1, 2, 3));
  EXPECT_EQ(refusal(b_, {65'535}, 65'536, ErrorCode::kDenied),
            "joint publication of qwen3@1: rank 65535 on node 'b' says the world has 65536 ranks, "
            "rank 0 on node 'a' says 4; start all with the same world");
}

TEST_F(JointRostersTest, ARankHasOnePlace) {
  ASSERT_TRUE(report(a_, {0, 1}));
  ASSERT_TRUE(report(b_, {2}));
  EXPECT_EQ(refusal(b_, {1, 2}, 4, ErrorCode::kDenied),
            "joint publication of qwen3@1: rank 1 on node 'b' has declared on node 'a' already; "
            "each rank has one place");
  EXPECT_THAT(roster().missing, ElementsAre(3)) << "the refused report changes nothing";
  ASSERT_TRUE(report(a_, {0}));
  EXPECT_TRUE(report(b_, {1, 2})) << "rank 1 has left a";
}

TEST_F(JointRostersTest, ARankOfADeadNodeMayMove) {
  ASSERT_TRUE(report(a_, {0, 1}));
  ASSERT_TRUE(report(b_, {2}));
  world_.pass(1s, {b_, c_});
  EXPECT_NE(refusal(c_, {0, 1}, 4, ErrorCode::kDenied), "") << "a is only suspect";
  world_.pass(2s, {b_, c_});
  EXPECT_THAT(roster().missing, ElementsAre(0, 1, 3));
  EXPECT_TRUE(report(c_, {0, 1, 3}));
  EXPECT_NE(roster().number, 0u);
}

TEST_F(JointRostersTest, AnAgentThatStartedAnewHasNoneOfItsEarlierRanks) {
  ASSERT_TRUE(report(a_, {0, 1}));
  ASSERT_TRUE(report(b_, {2}));
  world_.disconnect(a_);
  const NodeInfo again = member("a");
  ASSERT_TRUE(report(c_, {0}));
  EXPECT_THAT(roster().missing, ElementsAre(1, 3));
  ASSERT_TRUE(report(again, {1, 3}));
  ASSERT_NE(roster().number, 0u);
  EXPECT_EQ(roster().hosts[1].node.incarnation, again.incarnation);
  EXPECT_EQ(report(a_, {1, 3}).error().code(), ErrorCode::kUnavailable) << "its earlier life";
}

TEST_F(JointRostersTest, ACompleteRosterThatLosesANodeIsDissolvedAndTheNextHasAnotherNumber) {
  ASSERT_TRUE(report(a_, {0, 1}));
  ASSERT_TRUE(report(b_, {2, 3}));
  const auto first = roster().number;
  const auto revision = rosters().revision();
  world_.pass(3s, {b_, c_});  // a is dead
  EXPECT_EQ(roster().number, 0u);
  EXPECT_GT(rosters().revision(), revision);
  // b was told the number and may not know that the roster is over, so it counts only once it has
  // reported again.
  ASSERT_TRUE(report(c_, {0, 1}));
  EXPECT_THAT(roster().missing, ElementsAre(2, 3));
  ASSERT_TRUE(report(b_, {2, 3}));
  const auto second = roster().number;
  EXPECT_NE(second, 0u);
  EXPECT_NE(second, first);

  ASSERT_TRUE(leave(c_));
  EXPECT_EQ(roster().number, 0u);
  ASSERT_TRUE(report(c_, {0, 1}));
  ASSERT_TRUE(report(b_, {2, 3}));
  const auto third = roster().number;
  EXPECT_THAT((std::set{first, second, third}), SizeIs(3));

  ASSERT_TRUE(report(b_, {2})) << "a rank has left";
  EXPECT_EQ(roster().number, 0u);
  ASSERT_TRUE(report(b_, {2, 3}));
  ASSERT_TRUE(report(c_, {0, 1}));
  EXPECT_THAT((std::set{first, second, third, roster().number}), SizeIs(4));
}

TEST_F(JointRostersTest, AnAgentThatLeavesWithoutAPartLeavesTheOthersAlone) {
  ASSERT_TRUE(leave(a_));
  EXPECT_EQ(rosters().size(), 0u);
  ASSERT_TRUE(report(a_, {0, 1, 2, 3}));
  const auto number = roster().number;
  ASSERT_TRUE(leave(b_));
  EXPECT_EQ(roster().number, number);
}

TEST_F(JointRostersTest, AReportThatIsNotRepeatedLapsesAfter15Seconds) {
  ASSERT_TRUE(report(a_, {0, 1}));
  world_.pass(10s, {a_, b_});
  ASSERT_TRUE(report(b_, {2}));
  world_.pass(4900ms, {a_, b_});
  EXPECT_THAT(roster().missing, ElementsAre(3));
  world_.pass(100ms, {a_, b_});
  EXPECT_THAT(roster().missing, ElementsAre(0, 1, 3)) << "a's ranks do not wait any more";
  world_.pass(10s, {a_, b_});
  EXPECT_EQ(rosters().size(), 0u);
}

TEST_F(JointRostersTest, ACompleteRosterStaysFor15SecondsAfterTheLastReportOfAnyNode) {
  ASSERT_TRUE(report(a_, {0, 1}));
  world_.pass(10s, {a_, b_});
  ASSERT_TRUE(report(b_, {2, 3}));
  const auto number = roster().number;
  world_.pass(14900ms, {a_, b_});
  EXPECT_EQ(roster().number, number);
  ASSERT_TRUE(report(b_, {2, 3}));
  world_.pass(14900ms, {a_, b_});
  EXPECT_EQ(roster().number, number);
  world_.pass(100ms, {a_, b_});
  EXPECT_EQ(roster().number, 0u);
  EXPECT_EQ(rosters().size(), 0u);
}

TEST_F(JointRostersTest, TimeThatTheCoordinatorSleptCountsAgainstNobody) {
  ASSERT_TRUE(report(a_, {0, 1}));
  world_.now += 5min;
  ASSERT_TRUE(report(b_, {2, 3}));
  EXPECT_NE(roster().number, 0u);
}

TEST_F(JointRostersTest, ANewLifeOfTheCoordinatorKnowsNoRosterAndGivesOtherNumbers) {
  ASSERT_TRUE(report(a_, {0, 1}));
  ASSERT_TRUE(report(b_, {2, 3}));
  const auto first = roster().number;
  world_.restart();
  EXPECT_EQ(roster().number, 0u);
  EXPECT_EQ(report(a_, {0, 1}).error().code(), ErrorCode::kUnavailable) << "it must register";
  ASSERT_TRUE(world_.enroll(a_));
  ASSERT_TRUE(world_.enroll(b_));
  ASSERT_TRUE(report(a_, {0, 1}));
  ASSERT_TRUE(report(b_, {2, 3}));
  EXPECT_NE(roster().number, 0u);
  EXPECT_NE(roster().number, first);
}

TEST_F(JointRostersTest, VersionsDoNotMixAndAtMost1024AreGathered) {
  for (std::uint64_t version = 1; version <= 1024; ++version) {
    ASSERT_TRUE(report(a_, {0}, 2, {"qwen3", version}));
  }
  const auto refused = report(b_, {0}, 2, {"qwen3", 1025});
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), ErrorCode::kExhausted);
  EXPECT_THAT(refused.error().message(),
              AllOf(HasSubstr("qwen3@1025"), HasSubstr("'b'"), HasSubstr("1024")));
  ASSERT_TRUE(report(b_, {1}, 2, {"qwen3", 7})) << "those that are known go on";
  EXPECT_NE(roster({"qwen3", 7}).number, 0u);
  EXPECT_EQ(roster({"qwen3", 8}).number, 0u);
  ASSERT_TRUE(leave(a_, {"qwen3", 8}));
  world_.pass(100ms, {a_, b_});
  EXPECT_TRUE(report(b_, {0}, 2, {"qwen3", 1025}));
}

TEST_F(JointRostersTest, AtMost16MissingRanksAreNamed) {
  ASSERT_TRUE(report(a_, {1}, 65'536));
  EXPECT_THAT(roster().missing, ElementsAre(0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16));
  EXPECT_EQ(roster().missing_total, 65'535u);
}

// A model that keeps only the last report of each node and derives the rest.
struct Model {
  struct Said {
    std::uint32_t world = 0;
    std::set<std::uint32_t> ranks;
  };
  std::map<std::string, Said> said;
  bool complete = false;

  bool accepts(const std::string& name, const Said& news) const {
    return std::ranges::all_of(said, [&](const auto& entry) {
      if (entry.first == name) return true;
      std::set<std::uint32_t> both = entry.second.ranks;
      both.insert(news.ranks.begin(), news.ranks.end());
      return entry.second.world == news.world &&
             both.size() == entry.second.ranks.size() + news.ranks.size();
    });
  }
  void lose(const std::string& name) {
    if (!said.contains(name)) return;
    if (std::exchange(complete, false)) return said.clear();
    said.erase(name);
  }
  // True if a new roster has become complete.
  bool take(const std::string& name, const Said& news) {
    const auto had = said.find(name);
    if (had != said.end() && had->second.world == news.world && had->second.ranks == news.ranks) {
      return false;
    }
    lose(name);
    said[name] = news;
    std::size_t count = 0;
    for (const auto& [ignored, other] : said) count += other.ranks.size();
    complete = count == news.world;
    return complete;
  }
};

TEST_F(JointRostersTest, RandomReportsGiveTheRostersOfASimpleModel) {
  const auto seed = std::random_device{}();
  SCOPED_TRACE(fmt::format("seed {}", seed));
  std::mt19937 random(seed);
  const auto pick = [&](std::uint32_t below) {
    return static_cast<std::uint32_t>(random() % below);
  };
  const std::vector<NodeInfo> nodes{a_, b_, c_};
  Model model;
  std::set<std::uint64_t> numbers;
  std::uint64_t number = 0;
  std::size_t completed = 0;
  for (int step = 0; step < 3000; ++step) {
    const std::uint32_t who = pick(3);
    const NodeInfo& node = nodes[who];
    if (pick(8) == 0) {
      ASSERT_TRUE(leave(node));
      model.lose(node.node_id);
    } else {
      Model::Said news{pick(20) == 0 ? 4u : 3u, {}};
      news.ranks.insert(who);
      while (pick(4) == 0) news.ranks.insert(pick(3));
      const auto answer = report(node, Ranks(news.ranks.begin(), news.ranks.end()), news.world);
      ASSERT_EQ(answer.has_value(), model.accepts(node.node_id, news));
      if (answer && model.take(node.node_id, news)) {
        number = roster().number;
        ASSERT_TRUE(numbers.insert(number).second) << "a number is given once";
        ++completed;
      }
    }
    ASSERT_EQ(roster().number, model.complete ? number : 0);
    ASSERT_EQ(roster().hosts.size(), model.complete ? model.said.size() : 0);
    std::size_t declared = 0;
    for (const auto& [name, said] : model.said) declared += said.ranks.size();
    if (model.said.empty()) continue;
    ASSERT_EQ(roster().missing_total, model.said.begin()->second.world - declared);
  }
  EXPECT_GT(completed, 50u);
}

}  // namespace
}  // namespace rekindle::coordinator
