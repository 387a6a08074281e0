#include "recovery/coordinator/core/pull_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

// The open pulls and their queue, each by itself.
namespace rekindle::coordinator {
namespace {

using namespace std::chrono_literals;
using ::testing::ElementsAre;

constexpr TimePoint kStart{1h};
const ModelVersion kVersion{"m", 1};

Incarnation incarnation(int number) {
  Incarnation result;
  result.bytes.back() = static_cast<std::uint8_t>(number);
  return result;
}
PullId pull_id(int number) {
  PullId result;
  result.bytes.back() = static_cast<std::uint8_t>(number);
  return result;
}
Pull pull_of(int puller, const ModelVersion& id = kVersion) {
  Pull pull;
  pull.puller.incarnation = incarnation(puller);
  pull.id = id;
  pull.last_progress = kStart;
  return pull;
}

class PullTableTest : public ::testing::Test {
 protected:
  Pull& add(int number) { return table_.add(pull_id(number), pull_of(number)); }
  PullTable table_{10s, 3};
  const Incarnation source_ = incarnation(100);
};

TEST_F(PullTableTest, CountsEachShareOnce) {
  Pull& first = add(1);
  Pull& second = add(2);
  table_.take_share(first, source_);
  table_.take_share(first, source_);
  table_.take_share(second, source_);
  EXPECT_EQ(table_.pullers_of(source_), 2u);
  EXPECT_EQ(table_.readers_of(source_, kVersion), 2u);
  EXPECT_EQ(table_.readers_of(source_, {"m", 2}), 0u);
  table_.drop_share(first, source_);
  table_.drop_share(first, source_);
  EXPECT_EQ(table_.pullers_of(source_), 1u);
}

TEST_F(PullTableTest, KeepsTheNamedSharesOnly) {
  Pull& pull = add(1);
  for (const int number : {100, 101, 102}) table_.take_share(pull, incarnation(number));
  const std::vector<Incarnation> kept{incarnation(101)};
  table_.keep_shares_of(pull, kept);
  EXPECT_THAT(pull.sources, ElementsAre(incarnation(101)));
  EXPECT_EQ(table_.pullers_of(source_), 0u);
}

TEST_F(PullTableTest, APullEndsWithItsLeaseAndGivesItsSharesBack) {
  table_.take_share(add(1), source_);
  table_.expire(kStart + 9999ms);
  EXPECT_NE(table_.find(pull_id(1)), nullptr);
  table_.shift(1s);
  table_.expire(kStart + 10s);
  EXPECT_NE(table_.find(pull_id(1)), nullptr) << "a pause of the coordinator does not count";
  table_.expire(kStart + 11s);
  EXPECT_EQ(table_.find(pull_id(1)), nullptr);
  EXPECT_EQ(table_.pullers_of(source_), 0u);
}

TEST_F(PullTableTest, OnlyItsPullerClosesAPull) {
  table_.take_share(add(1), source_);
  EXPECT_EQ(table_.close(pull_id(1), incarnation(2), kStart).error().code(), ErrorCode::kDenied);
  EXPECT_TRUE(table_.close(pull_id(1), incarnation(1), kStart));
  EXPECT_EQ(table_.pullers_of(source_), 0u);
}

TEST_F(PullTableTest, RemembersAClosedPullForAMinute) {
  EXPECT_TRUE(table_.close(pull_id(1), incarnation(1), kStart)) << "it was never opened here";
  EXPECT_TRUE(table_.was_closed_by(pull_id(1), incarnation(1)));
  EXPECT_FALSE(table_.was_closed_by(pull_id(1), incarnation(2)));
  table_.expire(kStart + 60s);
  EXPECT_FALSE(table_.was_closed_by(pull_id(1), incarnation(1)));
}

TEST_F(PullTableTest, APullThatIsOpenedAgainReplacesItself) {
  table_.take_share(add(1), source_);
  add(2);
  table_.drop_like(incarnation(1), kVersion, "tp=1/2");
  EXPECT_EQ(table_.all().size(), 2u) << "another shard";
  table_.drop_like(incarnation(1), kVersion, "");
  EXPECT_EQ(table_.all().size(), 1u);
  EXPECT_EQ(table_.pullers_of(source_), 0u);
}

TEST_F(PullTableTest, IsFullAtItsLimit) {
  for (const int number : {1, 2, 3}) {
    EXPECT_FALSE(table_.full());
    add(number);
  }
  EXPECT_TRUE(table_.full());
}

TEST(PullQueue, KeepsTheOrderInWhichPullsCame) {
  PullQueue queue(10);
  for (const int number : {1, 2, 3}) queue.enter(pull_of(number), 1s, kStart);
  queue.enter(pull_of(9, {"other", 1}), 1s, kStart);
  queue.enter(pull_of(2), 1s, kStart + 1s);
  EXPECT_EQ(queue.place_of(pull_of(2), {}).ahead, 1u) << "asking again keeps the place";
  EXPECT_EQ(queue.place_of(pull_of(2), {}).behind, 1u);
  EXPECT_EQ(queue.place_of(pull_of(4), {}).ahead, 3u) << "all are ahead of a new one";
  queue.leave(pull_of(1));
  EXPECT_EQ(queue.place_of(pull_of(2), {}).ahead, 0u);
}

TEST(PullQueue, PartiesWithFewerOpenPullsComeFirst) {
  PullQueue queue(10);
  Pull late = pull_of(3);
  for (const int number : {1, 2}) {
    Pull waiting = pull_of(number);
    waiting.puller.party = "hog";
    queue.enter(waiting, 1s, kStart);
  }
  queue.enter(late, 1s, kStart);
  EXPECT_EQ(queue.place_of(late, {{"hog", 1}}).ahead, 0u);
  EXPECT_EQ(queue.place_of(late, {{"hog", 1}}).behind, 2u);
  EXPECT_EQ(queue.place_of(late, {{"hog", 1}, {"", 1}}).ahead, 2u);
}

TEST(PullQueue, APullThatDoesNotAskAgainLosesItsPlace) {
  PullQueue queue(10);
  queue.enter(pull_of(1), 1s, kStart);
  queue.expire(kStart + 2999ms);
  EXPECT_EQ(queue.size(), 1u) << "it may be late by two seconds";
  queue.shift(1s);
  queue.expire(kStart + 3s);
  EXPECT_EQ(queue.size(), 1u) << "a pause of the coordinator does not count";
  queue.expire(kStart + 4s);
  EXPECT_EQ(queue.size(), 0u);
}

TEST(PullQueue, PullsBeyondTheLimitWaitWithoutAPlace) {
  PullQueue queue(1);
  queue.enter(pull_of(1), 1s, kStart);
  queue.enter(pull_of(2), 1s, kStart);
  EXPECT_EQ(queue.size(), 1u);
  EXPECT_EQ(queue.place_of(pull_of(2), {}).ahead, 1u);
}

}  // namespace
}  // namespace rekindle::coordinator
