#include "recovery/agent/local_commands.h"

#include <gtest/gtest.h>

#include "recovery/rpc/rpc.h"

namespace rekindle::agent {
namespace {

PlanSummary plan_of(std::size_t wanted, std::size_t missing, std::size_t name_bytes) {
  PlanSummary plan;
  plan.id = {"m", 7};
  plan.tensors = static_cast<std::uint32_t>(wanted);
  for (std::size_t i = 0; i < wanted; ++i) {
    std::string name = std::to_string(i);
    name.resize(name_bytes, 'x');
    plan.wanted.push_back({std::move(name), "BF16", "[1024, 1024]", "[0:1024, 0:1024]", 2u << 20});
  }
  for (std::size_t i = 0; i < missing; ++i) {
    plan.missing.push_back(std::string(name_bytes, 'y') + std::to_string(i));
  }
  plan.wanted_total = plan.wanted.size();
  plan.missing_total = plan.missing.size();
  return plan;
}

TEST(LocalWire, APlanThatFitsIsWhole) {
  const PlanSummary plan = plan_of(5000, 100, 80);
  const PlanSummary got = from_proto(to_proto(plan));
  ASSERT_EQ(got.wanted.size(), 5000u);
  EXPECT_EQ(got.wanted[4999].name, plan.wanted[4999].name);
  EXPECT_EQ(got.wanted[4999].bytes, plan.wanted[4999].bytes);
  EXPECT_EQ(got.missing, plan.missing);
  EXPECT_EQ(got.wanted_total, 5000u);
  EXPECT_EQ(got.missing_total, 100u);
}

// A layout like Kimi-K2's has 140,000 tensors. Names may be much longer than there.
TEST(LocalWire, AVeryLargePlanFitsAFrameAndItsTotalsAreExact) {
  for (const std::size_t name_bytes : {1ul, 60ul, 500ul}) {
    const auto response = to_proto(plan_of(140'000, 140'000, name_bytes));
    EXPECT_LT(response.ByteSizeLong(), rpc::kMaxFrameBytes / 4 * 3) << name_bytes;
    const PlanSummary got = from_proto(response);
    EXPECT_EQ(got.wanted_total, 140'000u);
    EXPECT_EQ(got.missing_total, 140'000u);
    EXPECT_FALSE(got.wanted.empty());
    EXPECT_FALSE(got.missing.empty());
  }
}

}  // namespace
}  // namespace rekindle::agent
