#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tools/cli/status_view.h"

namespace rekindle::cli {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

proto::RoundStatus::Member& add_member(proto::RoundStatus& round, const std::string& node,
                                       const std::string& state, std::uint64_t spread) {
  auto& member = *round.add_members();
  member.set_node_id(node);
  member.set_instance("i");
  member.set_rank(1);
  member.set_state(state);
  member.set_bytes(std::uint64_t{32} << 30);
  member.set_spread_bytes(spread);
  member.set_party(1);
  return member;
}

proto::RoundStatus two_ready() {
  proto::RoundStatus round;
  round.set_round(7);
  round.mutable_id()->set_model("m");
  round.mutable_id()->set_version(2);
  round.set_group("g");
  round.set_phase("over");
  round.set_elapsed_ms(510);
  round.set_gather_ms(120);
  round.set_spread_ms(350);
  round.set_load_ms(40);
  add_member(round, "a", "ready", std::uint64_t{32} << 30);
  add_member(round, "b", "ready", std::uint64_t{32} << 30);
  return round;
}

TEST(RoundsView, AnUpdateThatReachedAllIsOneLine) {
  EXPECT_EQ(
      update_text(two_ready()),
      "update m@2: 2 of 2 workers ready, 2 by broadcast, 64.0 GiB in 0.51 s (gather 0.12, meet "
      "0.00, spread 0.35, load 0.04)\n");
}

TEST(RoundsView, WhoIsNotReadyOrCameByOtherMeansHasALineWithWhy) {
  proto::RoundStatus round = two_ready();
  add_member(round, "c", "ready", std::uint64_t{8} << 30).set_why("no progress for 5000 ms");
  auto& late = add_member(round, "d\x1b[2J", "left out", 0);
  late.set_bytes(0);
  late.set_why("has not attached to m@2 in 5000 ms");
  auto& nameless = add_member(round, "e", "failed", 0);
  nameless.set_instance("pid-3-GPU");
  nameless.set_bytes(0);
  const std::string text = update_text(round);
  EXPECT_THAT(text, HasSubstr("3 of 5 workers ready, 2 by broadcast, 96.0 GiB in"));
  EXPECT_THAT(
      text,
      HasSubstr("\n  rank 1 of i on c: ready, 8.00 GiB of 32.0 GiB by broadcast: no progress"));
  EXPECT_THAT(text, HasSubstr(": left out: has not attached to m@2 in 5000 ms\n"));
  EXPECT_THAT(text, HasSubstr("\n  pid-3-GPU on e: failed\n"));
  EXPECT_THAT(text, Not(HasSubstr("\x1b")));
}

void add_phase(proto::RoundStatus::Member& member, const std::string& name, std::uint64_t us) {
  auto& phase = *member.add_phases();
  phase.set_name(name);
  phase.set_elapsed_us(us);
}

TEST(RoundsView, PhasesHaveMedianPercentileAndTheSlowestRank) {
  proto::RoundStatus round = two_ready();
  for (int i = 0; i < 18; ++i) add_member(round, "a", "ready", std::uint64_t{32} << 30);
  for (int i = 0; i < 20; ++i) {
    auto& member = *round.mutable_members(i);
    member.set_rank(static_cast<std::uint32_t>(i));
    add_phase(member, "apply", 1000 * static_cast<std::uint64_t>(i + 1));
  }
  add_phase(*round.mutable_members(3), "declare", 1'500'000);
  const std::string text = update_text(round);
  EXPECT_THAT(text, ::testing::ContainsRegex("PHASE +MEDIAN s +P95 s +SLOWEST s +RANK"));
  EXPECT_THAT(text, ::testing::ContainsRegex("declare +1.500 +1.500 +1.500 +rank 3 of i on a\n"
                                             ".*apply +0.010 +0.019 +0.020 +rank 19 of i on a"));
  const Json json = to_json(round);
  ASSERT_EQ(json["phases"].size(), 2u);
  EXPECT_EQ(json["phases"][1]["phase"], "apply");
  EXPECT_EQ(json["phases"][1]["median_us"], 10'000);
  EXPECT_EQ(json["phases"][1]["p95_us"], 19'000);
  EXPECT_EQ(json["phases"][1]["slowest_us"], 20'000);
  EXPECT_EQ(json["phases"][1]["slowest"], "rank 19 of i on a");
  EXPECT_EQ(json["members"][3]["phases_us"]["declare"], 1'500'000);
}

TEST(RoundsView, JsonHasAllOfIt) {
  auto round = two_ready();
  round.mutable_members(1)->set_kept_bytes(99);
  const Json json = to_json(round);
  EXPECT_EQ(json["members"][1]["kept_bytes"], 99);
  EXPECT_EQ(json["round"], 7);
  EXPECT_EQ(json["model"], "m");
  EXPECT_EQ(json["ready"], 2);
  EXPECT_EQ(json["by_broadcast"], 2);
  EXPECT_EQ(json["spread_ms"], 350);
  EXPECT_EQ(json["members"][1]["node"], "b");
  EXPECT_EQ(json["members"][1]["party"], 1);
}

TEST(RoundsView, TheStatusShowsRounds) {
  proto::ClusterStatusResponse status;
  EXPECT_THAT(to_text(status), Not(HasSubstr("ROUND")));
  *status.add_rounds() = two_ready();
  add_member(*status.mutable_rounds(0), "c", "failed", 0).set_why("the worker was killed");
  const std::string text = to_text(status);
  EXPECT_THAT(text,
              ::testing::ContainsRegex("7 +m@2 +g +over +2 of 3 +2 +0.51 s +rank 1 of i on c"));
  EXPECT_EQ(to_json(status)["rounds"][0]["round"], 7);
}

}  // namespace
}  // namespace rekindle::cli
