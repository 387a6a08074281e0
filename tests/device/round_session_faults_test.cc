// Sessions in a broadcast round that is stopped, or whose members die, hang or do not come.
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/device/round_session_fixture.h"

namespace rekindle::device {
namespace {

using namespace std::chrono_literals;
using testing::kBucket;
using testing::RoundSessionTest;

TEST_F(RoundSessionTest, StoppedBeforeItBeganItIsServedAsAlways) {
  auto members = join_all(1);
  // The session keeps this until it has its orders.
  members[0].session->tell({}, true);
  members[0].session->stop("nobody else wants the same");
  members[0].take_all();
  expect_all(members[0]);
  EXPECT_FALSE(members[0].heard->is_over());
}

TEST_F(RoundSessionTest, AnOrderAfterTheStopIsAnswered) {
  auto members = join_all(1);
  members[0].session->stop("over");
  members[0].session->spread(order_for(0, 2, "x"));
  EXPECT_EQ(members[0].heard->over().error->code(), ErrorCode::kStale);
  members[0].session->tell({}, true);
  members[0].take_all();
  expect_all(members[0]);
}

TEST_F(RoundSessionTest, WhatCannotBeSpreadIsSaidAndServedAsAlways) {
  owners_ = 1;
  const auto good = order_for(0, 2, "no id of a meeting");
  auto large = good;
  large.bucket_bytes = 2 * kBucket;
  auto lost = good;
  // No communicator is kept, either.
  lost.id.clear();
  for (const auto& order : {good, large, lost}) {
    auto member = join(0);
    member.session->tell({}, true);
    member.session->spread(order);
    const auto over = member.heard->over();
    ASSERT_TRUE(over.error);
    EXPECT_EQ(over.error->message().find('\n'), std::string::npos);
    EXPECT_EQ(over.bytes, 0u);
    member.take_all();
    expect_all(member);
  }
}

TEST_F(RoundSessionTest, WhenTheOthersDoNotComeItIsServedAsAlways) {
  times_.meet = 200ms;
  auto members = join_all(1);
  members[0].session->tell({}, true);
  members[0].session->spread(order_for(0, 2, *communicators_[0]->make_id()));
  EXPECT_EQ(members[0].heard->over().error->code(), ErrorCode::kTimeout);
  members[0].take_all();
  expect_all(members[0]);
  EXPECT_TRUE(communicators_[0]->kept("double:0").empty());
}

TEST_F(RoundSessionTest, StoppedMidwayTheRestComesFromTheSegments) {
  auto members = begin_round();
  const auto kept = take_one_each(members);
  for (auto& member : members) member.session->stop("another rank has failed");
  for (std::size_t i = 0; i < members.size(); ++i) {
    const auto over = members[i].heard->over();
    ASSERT_TRUE(over.error);
    EXPECT_EQ(over.error->code(), ErrorCode::kStale);
    EXPECT_EQ(over.error->message(), "another rank has failed");
    EXPECT_LT(over.bytes, sample_.contents().total_bytes());
    // The bucket still belongs to the worker.
    members[i].worker->read(kept[i]);
    members[i].worker->release(kept[i]);
    members[i].take_all();
  }
  for (auto& member : members) expect_all(member);
  EXPECT_TRUE(communicators_[0]->kept("double:0").empty());
  expect_nothing_used();
}

TEST_F(RoundSessionTest, AfterTheStopARankWithoutACopyWaitsForItsTiles) {
  owners_ = 1;
  auto members = begin_round();
  const auto kept = take_one_each(members);
  for (auto& member : members) member.session->stop("another rank has failed");
  for (std::size_t i = 0; i < members.size(); ++i) {
    ASSERT_TRUE(members[i].heard->over().error);
    members[i].worker->release(kept[i]);
    members[i].take_all();
  }
  expect_all(members[0]);
  members[1].session->tell({}, true);
  expect_all(members[1]);
}

TEST_F(RoundSessionTest, Row39WorkerThatDiesInARoundDisturbsNobody) {
  auto members = begin_round(3);
  const auto kept = take_one_each(members);
  members[1].worker->close();
  const std::vector<std::size_t> survivors{0, 2};
  for (const std::size_t i : survivors) members[i].worker->release(kept[i]);
  for (const std::size_t i : survivors) members[i].take_all();
  for (const std::size_t i : survivors) expect_all_by_round(members[i]);
  const auto over = members[1].heard->over();
  EXPECT_FALSE(over.error) << over.error->message();
  ASSERT_TRUE(over.worker_lost) << "not all that was spread was given";
  EXPECT_EQ(over.worker_lost->code(), ErrorCode::kPeerLost);
  EXPECT_LT(over.bytes, sample_.contents().total_bytes());
  EXPECT_EQ(members[1].wait().error->code(), ErrorCode::kPeerLost);
  EXPECT_EQ(communicators_[1]->kept("double:1").size(), 1u);
  expect_nothing_used();
}

TEST_F(RoundSessionTest, Row40WorkerThatHangsInARoundIsDoneWithoutByItsDeadline) {
  auto members = join_all(1);
  times_.round_release = 300ms;
  members.push_back(join(1));
  spread(members, *communicators_[0]->make_id());
  const auto kept = take_one_each(members);
  members[0].worker->release(kept[0]);
  members[0].take_all();
  expect_all_by_round(members[0]);
  EXPECT_FALSE(members[1].heard->over().error);
  EXPECT_EQ(members[1].heard->over().worker_lost->code(), ErrorCode::kTimeout);
  while (members[1].worker->next()) {
  }
  EXPECT_TRUE(members[1].worker->failed());
  // Until then the worker may read its buckets.
  members[1].worker.reset();
  EXPECT_EQ(members[1].wait().error->code(), ErrorCode::kTimeout);
}

TEST_F(RoundSessionTest, Row40WorkerThatBreaksTheRulesInARoundDisturbsNobody) {
  auto members = begin_round();
  const auto kept = take_one_each(members);
  members[0].worker->release(kept[0]);
  members[0].take_all();
  members[1].worker->say(bucket::ReleasedMessage{99, 0});
  members[1].take_all();
  expect_all_by_round(members[0]);
  members[1].taken.get();
  EXPECT_EQ(members[1].worker->failed()->code(), ErrorCode::kInvalid);
  EXPECT_EQ(members[1].wait().error->code(), ErrorCode::kInvalid);
}

TEST_F(RoundSessionTest, EndedWhileItSpreadsItGoesOnAndDiscards) {
  for (const bool at_once : {true, false}) {
    auto members = join_all();
    if (!at_once) spread(members, *communicators_[0]->make_id());
    std::vector<bucket::FilledMessage> kept;
    if (!at_once) kept = take_one_each(members);
    if (at_once) spread(members, *communicators_[0]->make_id());
    members[1].session->end(Error(ErrorCode::kStale, "the worker's session has ended"), true);
    if (!at_once) members[0].worker->release(kept[0]);
    members[0].take_all();
    members[1].take_all();
    expect_all_by_round(members[0]);
    EXPECT_FALSE(members[1].heard->over().error);
    EXPECT_EQ(members[1].wait().error->code(), ErrorCode::kStale);
    members[1].taken.get();
    EXPECT_TRUE(members[1].worker->failed());
  }
  expect_nothing_used();
}

TEST_F(RoundSessionTest, Row43RankThatGoesLeavesTheOthersToTheirSegments) {
  times_.round_fill = 400ms;
  auto members = begin_round();
  const auto kept = take_one_each(members);
  // As when its process ends.
  members[1].session.reset();
  EXPECT_EQ(members[1].wait().error->code(), ErrorCode::kStale);
  members[0].worker->release(kept[0]);
  members[0].take_all();
  const auto over = members[0].heard->over();
  ASSERT_TRUE(over.error);
  EXPECT_EQ(over.error->code(), ErrorCode::kTimeout) << over.error->message();
  EXPECT_EQ(over.error->message().find('\n'), std::string::npos);
  expect_all(members[0]);
}

}  // namespace
}  // namespace rekindle::device
