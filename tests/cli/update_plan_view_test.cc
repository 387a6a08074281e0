#include "tools/cli/update_plan_view.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace rekindle::cli {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr std::uint64_t kGiB = std::uint64_t{1} << 30;

proto::UpdatePlan two_hosts() {
  proto::UpdatePlan plan;
  auto& party = *plan.add_parties();
  party.set_bytes(4 * kGiB);
  party.set_owners_fetch(true);
  for (const char* node : {"a", "b\x1b"}) {
    auto& rank = *party.add_ranks();
    rank.set_node_id(node);
    rank.set_instance("i");
    rank.set_owner(true);
    rank.set_uploads(2 * kGiB);
    auto& host = *plan.add_hosts();
    host.set_node_id(node);
    host.set_fetches(2 * kGiB);
    host.set_receives(2 * kGiB);
    host.set_sends(2 * kGiB);
    host.set_busiest_upload(2 * kGiB);
  }
  auto& trainer = *plan.add_hosts();
  trainer.set_node_id("t");
  trainer.set_gives(4 * kGiB);
  return plan;
}

TEST(UpdatePlanView, NamesTheSlowestLink) {
  const auto network = slowest_link(two_hosts(), {kGiB, kGiB});
  EXPECT_DOUBLE_EQ(network.seconds, 4);
  EXPECT_EQ(network.name, "the network into a");
  const auto gpu = slowest_link(two_hosts(), {4 * kGiB, kGiB});
  EXPECT_DOUBLE_EQ(gpu.seconds, 2);
  EXPECT_EQ(gpu.name, "the PCIe link of a GPU of a");
  EXPECT_DOUBLE_EQ(slowest_link({}, {1, 1}).seconds, 0);
}

TEST(UpdatePlanView, ShowsOwnersAndLinksAsPrintableText) {
  const std::string text = plan_text({"m", 2}, two_hosts(), {kGiB, kGiB});
  EXPECT_THAT(text, AllOf(HasSubstr("update m@2 would bring it to 2 worker(s); 0 have it"),
                          HasSubstr("uploaded, once fetched, by rank 0 of i on a (2.00 GiB)"),
                          HasSubstr("expected: 4.00 s, by the network into a")));
  EXPECT_EQ(text.find('\x1b'), std::string::npos);
}

TEST(UpdatePlanView, ShowsWhatRanksWantBeyondTheirParty) {
  proto::UpdatePlan plan = two_hosts();
  for (auto& rank : *plan.mutable_parties(0)->mutable_ranks()) {
    rank.set_rest(kGiB);
    rank.set_uploads(3 * kGiB);
  }
  EXPECT_THAT(
      plan_text({"m", 2}, plan, {kGiB, kGiB}),
      HasSubstr("2 rank(s) of 4.00 GiB in common, and 2.00 GiB that not all of them want; "));
  EXPECT_EQ(to_json(plan, {kGiB, kGiB})["parties"][0]["ranks"][1]["rest"], kGiB);
}

TEST(UpdatePlanView, TheJsonHasEveryRankAndHost) {
  const Json json = to_json(two_hosts(), {kGiB, kGiB});
  EXPECT_EQ(json["parties"][0]["ranks"].size(), 2u);
  EXPECT_EQ(json["hosts"][2]["gives"], 4 * kGiB);
  EXPECT_EQ(json["expected_seconds"], 4);
}

}  // namespace
}  // namespace rekindle::cli
