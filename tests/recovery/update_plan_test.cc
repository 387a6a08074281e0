// What an update would do: each expectation is counted by hand.
#include "recovery/coordinator/core/update_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/recovery/coordinator_fixture.h"
#include "tests/support/numbered_digest.h"

namespace rekindle::coordinator {
namespace {

using namespace testing;

constexpr std::uint64_t kWanted = 1200;

class UpdatePlans : public ::testing::Test {
 protected:
  // A rank of the group on a node, which serves version 1.
  void add_rank(const std::string& node, const std::string& instance, const std::string& device,
                std::uint8_t contents = 5) {
    RoundMember member;
    member.session = ++session_;
    member.group = "g";
    member.instance = instance;
    member.id = kV1;
    member.device = device;
    member.contents = test::numbered_digest(contents, 5);
    member.payload_bytes = kWanted;
    member.takes_pieces = true;
    reports_[node].push_back(member);
  }
  // Beyond the grace of a coordinator that has just started.
  void say_all() {
    std::vector<NodeInfo> infos;
    for (const auto& [name, info] : nodes_) infos.push_back(info);
    world_.pass(3s, infos);
    for (const auto& [name, info] : nodes_) {
      RoundReport report;
      report.node_id = name;
      report.incarnation = info.incarnation;
      report.sequence = 1;
      report.members = reports_[name];
      report.described = described_[name];
      ASSERT_TRUE(world_.core->report_round(report, world_.now));
    }
  }
  void add_node(const std::string& name, bool holds = false) {
    const NodeInfo info = world_.node(name);
    ASSERT_TRUE(world_.enroll(info));
    std::vector<Holding> holdings{CoreWorld::holding(kV1)};
    if (holds) holdings.push_back(CoreWorld::holding(kV2, 2));
    ASSERT_TRUE(world_.announce(info, holdings));
    nodes_.emplace(name, info);
  }
  Result<UpdatePlan> plan() { return world_.core->plan_update(kV2, "g", world_.now); }
  const UpdatePlan::Host& host(const UpdatePlan& plan, const std::string& name) {
    for (const auto& host : plan.hosts) {
      if (host.node_id == name) return host;
    }
    throw std::out_of_range("no host " + name);
  }

  CoreWorld world_;
  std::map<std::string, NodeInfo> nodes_;
  std::map<std::string, std::vector<RoundMember>> reports_;
  std::map<std::string, std::vector<DescribedContents>> described_;
  std::uint64_t session_ = 0;
};

// Two hosts with two ranks each fetch a half each from a third one.
TEST_F(UpdatePlans, HostsWithoutTheVersionFetchTheSharesOfTheirRanks) {
  for (const char* name : {"a", "b"}) {
    add_node(name);
    for (const char* device : {"GPU-0", "GPU-1"}) {
      add_rank(name, std::string("i") + name + device, std::string(device) + name);
    }
  }
  add_node("t", true);
  say_all();
  const auto made = plan();
  ASSERT_TRUE(made) << made.error().message();
  ASSERT_EQ(made->parties.size(), 1u);
  EXPECT_TRUE(made->parties[0].owners_fetch);
  ASSERT_EQ(made->parties[0].ranks.size(), 4u);
  for (const auto& rank : made->parties[0].ranks) EXPECT_EQ(rank.uploads, kWanted / 4);
  for (const char* name : {"a", "b"}) {
    EXPECT_EQ(host(*made, name).fetches, kWanted / 2);
    EXPECT_EQ(host(*made, name).receives, kWanted / 2);
    EXPECT_EQ(host(*made, name).sends, kWanted / 2);
    EXPECT_EQ(host(*made, name).gives, 0u);
    EXPECT_EQ(host(*made, name).busiest_upload, kWanted / 4);
  }
  EXPECT_EQ(host(*made, "t").gives, kWanted);
}

TEST_F(UpdatePlans, AHostWithTheVersionUploadsItAndNobodyFetches) {
  add_node("a", true);
  add_node("b");
  add_rank("a", "ia", "GPU-a");
  add_rank("b", "ib", "GPU-b");
  say_all();
  const auto made = plan();
  ASSERT_TRUE(made);
  EXPECT_FALSE(made->parties[0].owners_fetch);
  EXPECT_EQ(host(*made, "a").busiest_upload, kWanted);
  EXPECT_EQ(host(*made, "a").sends, kWanted);
  EXPECT_EQ(host(*made, "b").receives, kWanted);
  EXPECT_EQ(host(*made, "b").sends, 0u);
  EXPECT_EQ(host(*made, "b").fetches, 0u);
}

TEST_F(UpdatePlans, RanksThatWantSomethingElseOrAreOnTheSameDeviceAreAlone) {
  add_node("a", true);
  add_rank("a", "i", "GPU-0", 5);
  add_rank("a", "j", "GPU-1", 6);
  add_rank("a", "k", "GPU-0", 5);
  say_all();
  const auto made = plan();
  ASSERT_TRUE(made);
  EXPECT_EQ(made->parties.size(), 3u);
  for (const auto& party : made->parties) {
    ASSERT_EQ(party.ranks.size(), 1u);
    EXPECT_EQ(party.ranks[0].uploads, kWanted);
  }
}

// Two of three ranks have 800 of their 1,200 bytes in common.
TEST_F(UpdatePlans, RanksWithPiecesInCommonShareThemAndUploadTheRest) {
  add_node("a", true);
  add_node("b");
  add_rank("a", "i", "GPU-0", 5);
  add_rank("b", "i", "GPU-1", 6);
  add_rank("a", "j", "GPU-2", 7);
  described_["a"] = {{test::numbered_digest(5, 5), {{1, 800}, {10, 400}}},
                     {test::numbered_digest(7, 5), {{30, 1200}}}};
  described_["b"] = {{test::numbered_digest(6, 5), {{20, 400}, {1, 800}}}};
  say_all();
  const auto made = plan();
  ASSERT_TRUE(made);
  ASSERT_EQ(made->parties.size(), 2u);
  const auto& party = made->parties[0];
  EXPECT_EQ(party.bytes, 800u);
  ASSERT_EQ(party.ranks.size(), 2u);
  EXPECT_TRUE(party.ranks[0].owner);
  EXPECT_EQ(party.ranks[0].uploads, 1200u);
  EXPECT_EQ(party.ranks[1].uploads, 400u) << "the common part comes by NCCL";
  for (const auto& rank : party.ranks) EXPECT_EQ(rank.rest, 400u);
  EXPECT_EQ(host(*made, "b").receives, 800u);
  EXPECT_EQ(host(*made, "b").fetches, 400u);
  EXPECT_EQ(host(*made, "a").fetches, 0u);
  EXPECT_EQ(host(*made, "a").gives, 400u);
}

TEST_F(UpdatePlans, CountRanksThatAreReadyAndThoseOfSilentAgents) {
  add_node("a", true);
  add_rank("a", "i", "GPU-0");
  reports_["a"].back().id = kV2;
  add_rank("a", "j", "GPU-1");
  reports_["a"].back().payload_bytes = 0;
  say_all();
  const auto made = plan();
  ASSERT_TRUE(made);
  EXPECT_EQ(made->ready, 1u);
  EXPECT_EQ(made->unknown, 1u);
  EXPECT_TRUE(made->parties.empty());
}

TEST_F(UpdatePlans, OfAVersionOrAGroupThatIsNotThereAreRefused) {
  add_node("a");
  add_rank("a", "i", "GPU-0");
  say_all();
  EXPECT_EQ(plan().error().code(), ErrorCode::kNotFound);
  EXPECT_EQ(world_.core->plan_update(kV1, "other", world_.now).error().code(),
            ErrorCode::kNotFound);
}

}  // namespace
}  // namespace rekindle::coordinator
