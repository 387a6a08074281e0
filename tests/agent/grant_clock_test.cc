#include "recovery/agent/grant_clock.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/process.h"

namespace rekindle::agent {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;
using ::testing::StartsWith;

const TimePoint kNow{1h};

TEST(HighestEpoch, C1IsKeptOverRestarts) {
  const rekindle::testing::TempDir temp;
  {
    HighestEpoch epoch;
    ASSERT_TRUE(epoch.keep_in(temp / "epoch", kNow));
    EXPECT_EQ(epoch.highest(), 0u);
    epoch.hear(7, kNow);
    epoch.hear(5, kNow + 1s);
    EXPECT_EQ(epoch.highest(), 7u);
    EXPECT_EQ(epoch.replaced_at(6), kNow);
    EXPECT_FALSE(epoch.replaced_at(7));
  }
  HighestEpoch next;
  ASSERT_TRUE(next.keep_in(temp / "epoch", kNow + 1min));
  EXPECT_EQ(next.highest(), 7u);
  EXPECT_FALSE(std::filesystem::exists(temp / "epoch.new"));
}

TEST(HighestEpoch, C1WhatWasHeardBeforeTheFileIsKept) {
  const rekindle::testing::TempDir temp;
  HighestEpoch epoch;
  epoch.hear(9, kNow);
  ASSERT_TRUE(epoch.keep_in(temp / "epoch", kNow));
  const auto kept = [&] { return rekindle::testing::read_file(temp / "epoch"); };
  EXPECT_THAT(kept(), StartsWith("rekindle-epoch 9 0 blake3:"));
  epoch.confirm(9, kNow);
  EXPECT_THAT(kept(), StartsWith("rekindle-epoch 9 blake3:"));
}

TEST(HighestEpoch, C1ManyHellosRaiseItNoFurtherThanACoordinatorMayFollow) {
  constexpr std::uint64_t kStep = std::uint64_t{1} << 32;
  const rekindle::testing::TempDir temp;
  {
    HighestEpoch epoch;
    ASSERT_TRUE(epoch.keep_in(temp / "epoch", kNow));
    epoch.confirm(7, kNow);
    for (std::uint64_t i = 1; i <= 5; ++i) epoch.hear(7 + i * (kStep / 2), kNow);
    EXPECT_EQ(epoch.highest(), 7 + kStep / 2);
    epoch.hear(7 + kStep, kNow);
    EXPECT_EQ(epoch.highest(), 7 + kStep / 2);
  }
  // A restart is no confirmation.
  HighestEpoch next;
  ASSERT_TRUE(next.keep_in(temp / "epoch", kNow));
  EXPECT_EQ(next.highest(), 7 + kStep / 2);
  next.hear(7 + kStep, kNow);
  next.hear(7 + kStep - 1, kNow);
  EXPECT_EQ(next.highest(), 7 + kStep - 1);
  // The coordinator of epoch 7 leads above it, and that is the new measure.
  next.confirm(7 + kStep, kNow);
  EXPECT_EQ(next.highest(), 7 + kStep);
  next.hear(7 + kStep + 5, kNow);
  EXPECT_EQ(next.highest(), 7 + kStep + 5);
}

TEST(HighestEpoch, AnAbsurdOneIsIgnored) {
  HighestEpoch epoch;
  epoch.hear(7, kNow);
  epoch.hear(std::uint64_t{1} << 60, kNow);
  EXPECT_EQ(epoch.highest(), 7u);
}

TEST(HighestEpoch, TheFirstCoordinatorIsTheMeasure) {
  HighestEpoch epoch;
  epoch.confirm(std::uint64_t{1} << 40, kNow);
  EXPECT_EQ(epoch.highest(), std::uint64_t{1} << 40);
  epoch.confirm(std::uint64_t{1} << 50, kNow);
  EXPECT_EQ(epoch.highest(), std::uint64_t{1} << 40);
}

TEST(HighestEpoch, B10ADamagedFileIsKeptAsideAndNotBelieved) {
  const rekindle::testing::TempDir temp;
  for (const char* text : {"", "7\n", "rekindle-epoch x\n", "rekindle-epoch 7",
                           "rekindle-epoch 7 \n", "rekindle-epoch 7 8\n"}) {
    rekindle::testing::write_file(temp / "epoch", text);
    HighestEpoch epoch;
    const auto kept = epoch.keep_in(temp / "epoch", kNow);
    ASSERT_TRUE(kept) << text << ": " << kept.error().message();
    EXPECT_EQ(epoch.highest(), 0u) << text;
    EXPECT_FALSE(std::filesystem::exists(temp / "epoch"));
    EXPECT_EQ(rekindle::testing::read_file(temp / "epoch.damaged"), text);
  }
}

TEST(HighestEpoch, B10AfterADamagedFileTheNextEpochIsKeptAsInANewStore) {
  const rekindle::testing::TempDir temp;
  rekindle::testing::write_file(temp / "epoch", "rekindle-epoch x\n");
  {
    HighestEpoch epoch;
    epoch.hear(3, kNow);
    ASSERT_TRUE(epoch.keep_in(temp / "epoch", kNow));
    EXPECT_EQ(epoch.highest(), 3u);
    EXPECT_TRUE(std::filesystem::exists(temp / "epoch")) << "the one that was heard already";
    epoch.confirm(7, kNow);
  }
  HighestEpoch next;
  ASSERT_TRUE(next.keep_in(temp / "epoch", kNow));
  EXPECT_EQ(next.highest(), 7u);
}

TEST(HighestEpoch, B10NoChangedByteOfTheFileLowersOrRaisesIt) {
  const rekindle::testing::TempDir temp;
  {
    HighestEpoch epoch;
    ASSERT_TRUE(epoch.keep_in(temp / "epoch", kNow));
    epoch.confirm(41, kNow);
    epoch.hear(42, kNow);
  }
  const std::string good = rekindle::testing::read_file(temp / "epoch");
  for (std::size_t at = 0; at < good.size(); ++at) {
    for (const int bit : {0, 1, 2, 3, 4, 5, 6, 7}) {
      std::string bad = good;
      bad[at] = static_cast<char>(bad[at] ^ (1 << bit));
      rekindle::testing::write_file(temp / "epoch", bad);
      HighestEpoch epoch;
      ASSERT_TRUE(epoch.keep_in(temp / "epoch", kNow));
      EXPECT_EQ(epoch.highest(), 0u) << bad;
      EXPECT_EQ(rekindle::testing::read_file(temp / "epoch.damaged"), bad);
    }
  }
}

TEST(HighestEpoch, AFileOfAnEarlierReleaseIsTakenAndGetsADigest) {
  const rekindle::testing::TempDir temp;
  for (const char* text : {"rekindle-epoch 9\n", "rekindle-epoch 9 4\n"}) {
    rekindle::testing::write_file(temp / "epoch", text);
    HighestEpoch epoch;
    ASSERT_TRUE(epoch.keep_in(temp / "epoch", kNow));
    EXPECT_EQ(epoch.highest(), 9u);
    EXPECT_THAT(rekindle::testing::read_file(temp / "epoch"), HasSubstr(" blake3:"));
    EXPECT_FALSE(std::filesystem::exists(temp / "epoch.damaged"));
  }
}

TEST(GrantEpoch, C1AGrantGivenAfterItsCoordinatorWasReplacedIsRefused) {
  GrantClock clock;
  const Incarnation issuer = Incarnation::random();
  clock.epochs().hear(3, kNow);
  clock.observe(issuer, "", 1'000'000, kNow);
  // Given now, for a minute.
  EXPECT_TRUE(clock.check(issuer, 3, 1'060'000, kNow));
  clock.epochs().hear(4, kNow + 10s);
  EXPECT_TRUE(clock.check(issuer, 3, 1'060'000, kNow + 20s)) << "given before: its pull goes on";
  // Given 15 s after this agent has heard of epoch 4.
  EXPECT_EQ(clock.check(issuer, 3, 1'085'000, kNow + 25s).error().code(), ErrorCode::kStale);
  EXPECT_TRUE(clock.check(issuer, 4, 1'085'000, kNow + 25s));
  EXPECT_TRUE(clock.check(issuer, 5, 1'085'000, kNow + 25s)) << "it has yet to hear of it";
  EXPECT_TRUE(clock.check(issuer, 0, 4'000'000, kNow + 25s)) << "a source's own";
  EXPECT_EQ(clock.check(issuer, 3, 1'060'000, kNow + 61s).error().code(), ErrorCode::kDenied);
}

TEST(GrantEpoch, C1ASecondChangeOfTheCoordinatorGivesTheFirstOnesGrantsNoMoreTime) {
  GrantClock clock;
  const Incarnation issuer = Incarnation::random();
  clock.epochs().hear(3, kNow);
  clock.observe(issuer, "", 1'000'000, kNow);
  clock.epochs().hear(4, kNow + 10s);
  clock.epochs().hear(5, kNow + 40s);
  // Given 25 s after epoch 4 was heard of.
  EXPECT_EQ(clock.check(issuer, 3, 1'095'000, kNow + 45s).error().code(), ErrorCode::kStale);
  EXPECT_TRUE(clock.check(issuer, 4, 1'095'000, kNow + 45s)) << "given before epoch 5";
  EXPECT_TRUE(clock.check(issuer, 3, 1'068'000, kNow + 45s)) << "given before epoch 4";
}

}  // namespace
}  // namespace rekindle::agent
