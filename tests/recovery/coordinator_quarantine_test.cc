#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/recovery/coordinator_fixture.h"

namespace rekindle::coordinator {
namespace {

using namespace std::chrono_literals;
using namespace testing;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

const ModelVersion kV1{"qwen3", 1};

TEST(CoordinatorQuarantine, WhoFoundAllHoldersBadIsToldWhichAndHowLong) {
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
  const auto refused = world.open(p, "qwen3");
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), ErrorCode::kUnavailable) << "it may come back";
  EXPECT_THAT(refused.error().message(), AllOf(HasSubstr("wrong bytes"), HasSubstr("10000 ms"),
                                               HasSubstr("a, b"), HasSubstr("rekindle verify")));
  world.pass(11s, {a, b});
  EXPECT_TRUE(world.open(p, "qwen3"));
}

TEST(CoordinatorQuarantine, OnePullersWordLocksNobodyElseOut) {
  CoreWorld world;
  const NodeInfo a = world.holder("a", kV1);
  const NodeInfo b = world.holder("b", kV1);
  const NodeInfo other = world.node("other");
  const auto running = world.open(other, "qwen3");
  const NodeInfo broken = world.node("broken");
  const auto pull = world.open(broken, "qwen3");
  ASSERT_TRUE(pull && running);
  SourceReport bad_a = report(a);
  SourceReport bad_b = report(b);
  bad_a.quarantine = bad_b.quarantine = true;
  EXPECT_THAT(world.progress(broken, *pull, {bad_a, bad_b})->sources, IsEmpty());
  EXPECT_EQ(world.progress(other, *running)->sources.size(), 2u) << "it goes on";
  const auto opened = world.open(world.node("q"), "qwen3");
  ASSERT_TRUE(opened) << opened.error().message();
  EXPECT_EQ(opened->sources.size(), 2u);
}

TEST(CoordinatorQuarantine, AQuarantinedSourceIsOfferedOnlyWhereNoOtherHasAllOfIt) {
  CoreWorld world;
  const NodeInfo a = world.holder("a", kV1);
  const NodeInfo p = world.node("p");
  const auto pull = world.open(p, "qwen3");
  SourceReport bad = report(a);
  bad.quarantine = true;
  ASSERT_TRUE(world.progress(p, *pull, {bad}));
  const NodeInfo growing = world.node("growing");
  ASSERT_TRUE(world.enroll(growing));
  ASSERT_TRUE(world.announce(growing, {CoreWorld::holding(kV1, 1, 1, /*complete=*/false)}));
  const auto both = world.open(world.node("q"), "qwen3");
  EXPECT_EQ(both->sources.size(), 2u) << "a part is not all of it";
  const NodeInfo b = world.holder("b", kV1);
  const auto others = world.open(world.node("r"), "qwen3");
  EXPECT_THAT(CoreWorld::names(others->sources), ::testing::UnorderedElementsAre("b", "growing"));
  EXPECT_EQ(world.core->pullers_of(a.incarnation), 1u) << "q";
  ASSERT_TRUE(world.core->drain("b", true, world.now));
  EXPECT_THAT(CoreWorld::names(world.open(world.node("s"), "qwen3")->sources),
              ::testing::UnorderedElementsAre("a", "growing"))
      << "rather than one that shall be left alone";
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
