// Sessions in a broadcast round: the spread bytes, and the bytes that are kept in the segments.
#include <string>
#include <thread>
#include <vector>

#include <unistd.h>

#include <gtest/gtest.h>

#include "tests/device/round_session_fixture.h"

namespace rekindle::device {
namespace {

using namespace std::chrono_literals;
using testing::kBucket;
using testing::RoundSessionTest;

TEST_F(RoundSessionTest, EveryRankGetsAllAndKeepsItsCommunicatorForTheNext) {
  for (const bool again : {false, true}) {
    auto members = join_all();
    const auto first = members[0].heard->joined();
    EXPECT_EQ(first.payload_bytes, sample_.contents().total_bytes());
    EXPECT_EQ(first.bucket_bytes, kBucket);
    EXPECT_EQ(first.contents, members[1].heard->joined().contents);
    const std::vector<std::string> kept{"c-1"};
    EXPECT_EQ(first.communicators, again ? kept : std::vector<std::string>{});
    spread(members, again ? "" : *communicators_[0]->make_id());
    for (auto& member : members) member.take_all();
    for (auto& member : members) expect_all_by_round(member);
  }
  expect_nothing_used();
}

TEST_F(RoundSessionTest, RanksWithoutACopyGetItFromOneThatVerifiesItMeanwhile) {
  owners_ = 1;
  auto members = join_all(3);
  const auto id = *communicators_[0]->make_id();
  for (std::size_t i = 0; i < 3; ++i) members[i].session->spread(order_for(i, 3, id));
  for (auto& member : members) member.take_all();
  const auto tiles = sample_.contents().tiles().tile_count();
  for (TileIndex tile = 0; tile < tiles; ++tile) {
    members[0].session->tell({{tile, tile + 1}}, false);
    std::this_thread::sleep_for(1ms);
  }
  for (auto& member : members) expect_all_by_round(member);
}

TEST_F(RoundSessionTest, WhatPassesIsKeptInTheSegmentsOfAHostThatLacksIt) {
  owners_ = 1;
  lacks_ = true;
  times_.keep_bytes_per_second = std::uint64_t{1} << 60;
  auto members = join_all();
  const auto id = *communicators_[0]->make_id();
  members[0].session->tell({}, true);
  members[0].session->spread(order_for(0, 2, id));
  auto keeps = order_for(1, 2, id);
  keeps.keep_count = 1;
  members[1].session->spread(keeps);
  for (auto& member : members) member.take_all();
  for (auto& member : members) expect_all_by_round(member);
  EXPECT_TRUE(members[0].heard->over().kept.empty());
  const auto over = members[1].heard->over();
  EXPECT_EQ(over.kept_bytes, sample_.contents().total_bytes());
  TileIndex tiles = 0;
  for (const auto& run : over.kept) {
    EXPECT_EQ(run.parts, run.of);
    tiles += run.end - run.begin;
  }
  EXPECT_EQ(tiles, sample_.contents().tiles().tile_count());
  expect_kept(1, over.kept_bytes);
  expect_nothing_used();
}

TEST_F(RoundSessionTest, NothingIsKeptWithoutARateOrAnOrder) {
  owners_ = 1;
  lacks_ = true;
  for (const bool ordered : {false, true}) {
    times_.keep_bytes_per_second = ordered ? 0 : std::uint64_t{1} << 60;
    auto members = join_all();
    const auto id = *communicators_[0]->make_id();
    members[0].session->tell({}, true);
    for (std::size_t i = 0; i < 2; ++i) {
      auto order = order_for(i, 2, id);
      order.keep_count = ordered ? 1 : 0;
      members[i].session->spread(order);
    }
    for (auto& member : members) member.take_all();
    for (auto& member : members) expect_all_by_round(member);
    EXPECT_EQ(members[1].heard->over().kept_bytes, 0u);
    expect_kept(1, 0);
  }
}

// The rate allows everything, the link nothing: only bytes for other hosts take it.
TEST_F(RoundSessionTest, NothingIsKeptWhereBytesForOtherHostsFillTheLink) {
  owners_ = 1;
  lacks_ = true;
  times_.keep_bytes_per_second = std::uint64_t{1} << 60;
  times_.link_bytes_per_second = 1;
  for (const std::uint32_t here : {1u, 2u}) {
    auto members = join_all();
    const auto id = *communicators_[0]->make_id();
    members[0].session->tell({}, true);
    for (std::size_t i = 0; i < 2; ++i) {
      auto order = order_for(i, 2, id);
      order.keep_count = static_cast<std::uint32_t>(i);
      order.ranks_here = here;
      members[i].session->spread(order);
    }
    for (auto& member : members) member.take_all();
    for (auto& member : members) expect_all_by_round(member);
    const auto kept = members[1].heard->over().kept_bytes;
    EXPECT_EQ(kept, here == 1 ? 0 : sample_.contents().total_bytes());
  }
}

TEST_F(RoundSessionTest, Row43StoppedMidwayWhatWasKeptIsSaidAndRight) {
  owners_ = 1;
  lacks_ = true;
  times_.keep_bytes_per_second = std::uint64_t{1} << 60;
  auto members = join_all();
  const auto id = *communicators_[0]->make_id();
  members[0].session->tell({}, true);
  members[0].session->spread(order_for(0, 2, id));
  auto keeps = order_for(1, 2, id);
  keeps.keep_count = 1;
  members[1].session->spread(keeps);
  const auto taken = take_one_each(members);
  for (auto& member : members) member.session->stop("another rank has failed");
  const auto over = members[1].heard->over();
  ASSERT_TRUE(over.error);
  EXPECT_GT(over.kept_bytes, 0u);
  EXPECT_LT(over.kept_bytes, sample_.contents().total_bytes());
  expect_kept(1, over.kept_bytes);
  // The copy becomes complete, and the remaining buckets come from it.
  for (std::size_t i = 0; i < lent_[1].size(); ++i) {
    const auto& segment = sample_.segments[i];
    ASSERT_EQ(::pwrite(lent_[1][i].get(), segment.data(), segment.size(), 0),
              static_cast<ssize_t>(segment.size()));
  }
  members[1].session->tell({}, true);
  for (std::size_t i = 0; i < members.size(); ++i) {
    members[i].worker->release(taken[i]);
    members[i].take_all();
  }
  for (auto& member : members) expect_all(member);
  expect_nothing_used();
}

}  // namespace
}  // namespace rekindle::device
