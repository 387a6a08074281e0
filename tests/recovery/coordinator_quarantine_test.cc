#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/recovery/coordinator_fixture.h"

namespace rekindle::coordinator {
namespace {

using namespace std::chrono_literals;
using namespace testing;
using ::testing::AllOf;
using ::testing::HasSubstr;

const ModelVersion kV1{"qwen3", 1};

TEST(CoordinatorQuarantine, WhenAllHoldersAreQuarantinedThePullerIsToldWhoAndHowLong) {
  CoreWorld world;
  const NodeInfo a = world.holder("a", kV1);
  const NodeInfo b = world.holder("b", kV1);
  const NodeInfo p = world.node("p");
  const auto pull = world.open(p, "qwen3");
  ASSERT_TRUE(pull);
  SourceReport bad_a = report(a);
  SourceReport bad_b = report(b);
  bad_a.quarantine = bad_b.quarantine = true;
  ASSERT_TRUE(world.progress(p, *pull, {bad_a, bad_b}));
  const auto refused = world.open(world.node("q"), "qwen3");
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), ErrorCode::kUnavailable) << "it may come back";
  EXPECT_THAT(refused.error().message(), AllOf(HasSubstr("wrong bytes"), HasSubstr("10000 ms"),
                                               HasSubstr("a, b"), HasSubstr("rekindle verify")));
  world.pass(11s, {a, b});
  EXPECT_TRUE(world.open(world.node("q"), "qwen3"));
}

TEST(CoordinatorQuarantine, WhatNobodyHoldsIsStillNotFound) {
  CoreWorld world;
  const NodeInfo a = world.holder("a", kV1);
  const NodeInfo p = world.node("p");
  const auto pull = world.open(p, "qwen3");
  ASSERT_TRUE(pull);
  SourceReport bad = report(a);
  bad.quarantine = true;
  ASSERT_TRUE(world.progress(p, *pull, {bad}));
  world.pass(5s, {a});  // the grace is over
  const auto absent = world.open(world.node("q"), "absent");
  ASSERT_FALSE(absent);
  EXPECT_EQ(absent.error().code(), ErrorCode::kNotFound);
}

}  // namespace
}  // namespace rekindle::coordinator
