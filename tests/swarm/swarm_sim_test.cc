// A fleet that fills itself, in virtual time: its cost, and its fate when hosts die.
#include <gtest/gtest.h>

#include "tests/swarm/swarm_world.h"

namespace rekindle::swarm::testing {
namespace {

using namespace std::chrono_literals;

void expect_sound(const World& world) {
  EXPECT_TRUE(world.all_done()) << world.states();
  EXPECT_EQ(world.double_fetches(), 0);
  EXPECT_EQ(world.unverified_reads(), 0);
}

Duration single_pull() {
  World world({.joiners = 1});
  world.run(600s);
  EXPECT_TRUE(world.all_done());
  EXPECT_EQ(world.sent_by_source(), world.checkpoint_bytes());
  return world.last_done();
}

TEST(Swarm, SevenJoinersAreDoneSoonAfterOneWouldBeAndTheSourceSendsLittleMoreThanOnce) {
  const Duration alone = single_pull();
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    World world({.joiners = 7, .seed = seed});
    world.run(600s);
    expect_sound(world);
    const double times = seconds(world.last_done()) / seconds(alone);
    const double egress =
        static_cast<double>(world.sent_by_source()) / static_cast<double>(world.checkpoint_bytes());
    RecordProperty("times_of_a_single_pull_" + std::to_string(seed), std::to_string(times));
    RecordProperty("egress_" + std::to_string(seed), std::to_string(egress));
    EXPECT_LE(times, 1.2) << world.states();
    EXPECT_LE(egress, 1.2) << world.states();
  }
}

TEST(Swarm, TwiceTheJoinersTakeHardlyLonger) {
  const Duration alone = single_pull();
  World world({.joiners = 15});
  world.run(600s);
  expect_sound(world);
  EXPECT_LE(world.last_done() * 10, alone * 16) << world.states();
}

TEST(Swarm, WhenHalfOfTheJoinersAreKilledTheOthersFinish) {
  const Duration alone = single_pull();
  for (const Duration when : {1s, 4s, 8s}) {
    SCOPED_TRACE(::testing::Message() << "killed after " << seconds(when) << " s");
    World world({.joiners = 7, .seed = 3, .die = {5, 6, 7}, .dies_at = when});
    world.run(600s);
    expect_sound(world);
    EXPECT_LE(world.last_done(), 2 * alone) << world.states();
  }
}

// Two joiners send at 1 % of the others' speed. That costs little more than if they sent nothing.
TEST(Swarm, Row12NeighboursAtOnePercentSpeedHoldNobodyUp) {
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    World without({.joiners = 7, .seed = seed, .silent = {2, 5}});
    without.run(600s);
    expect_sound(without);
    World world({.joiners = 7, .seed = seed, .upload = {{2, 0.01}, {5, 0.01}}});
    world.run(600s);
    expect_sound(world);
    EXPECT_GT(world.sent_by(2), 0u) << "nobody has tried";
    EXPECT_LE(world.last_done() * 2, without.last_done() * 3) << world.states();
    EXPECT_LE(world.sent_by_source() * 2, without.sent_by_source() * 3) << world.states();
    RecordProperty("times_" + std::to_string(seed),
                   std::to_string(seconds(world.last_done()) / seconds(without.last_done())));
    RecordProperty("without_s_" + std::to_string(seed),
                   std::to_string(seconds(without.last_done())));
  }
}

TEST(Swarm, Row3AFrozenNeighbourHoldsNobodyUp) {
  const Duration alone = single_pull();
  for (const Duration when : {2s, 6s}) {
    SCOPED_TRACE(::testing::Message() << "frozen after " << seconds(when) << " s");
    World world({.joiners = 7, .seed = 4, .freeze = {3, 6}, .freezes_at = when});
    world.run(600s);
    expect_sound(world);
    EXPECT_LE(world.last_done(), 2 * alone) << world.states();
  }
}

TEST(Swarm, WhoHasNoShareOfTheSourceIsFilledByTheOthers) {
  World world({.joiners = 7, .source_serves = 3});
  world.run(600s);
  expect_sound(world);
  EXPECT_LE(world.sent_by_source(), 2 * world.checkpoint_bytes());
}

TEST(Swarm, WhatTheSourceGaveBeforeItDiedReachesEverybody) {
  World world({.joiners = 7, .source_dies_at = 4s});
  world.run(600s);
  EXPECT_TRUE(world.all_done()) << world.states();  // failed, in bounded time
  EXPECT_EQ(world.unverified_reads(), 0);
  EXPECT_GT(world.held_by_anyone(), 0u);
  EXPECT_EQ(world.held_by_everyone(), world.held_by_anyone()) << world.states();
}

}  // namespace
}  // namespace rekindle::swarm::testing
