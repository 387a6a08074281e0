// Sessions in a broadcast round that brings one of them a wrong byte.
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/device/round_session_fixture.h"

namespace rekindle::device {
namespace {

using testing::Flip;
using testing::kBucket;
using testing::Member;
using testing::RoundSessionTest;

class RoundSessionVerify : public RoundSessionTest {
 protected:
  // Three ranks. The third rank owns nothing, and its host has a copy.
  Members begin(const std::vector<bucket::NamedBox>& wanted) {
    wanted_ = wanted;
    flip_ = Flip{2, 1, 77};
    auto members = join_all(3);
    members[2].session->tell({}, true);
    spread(members, *communicators_[0]->make_id());
    for (auto& member : members) member.take_all();
    return members;
  }
  // Without boxes: whole tensors. These boxes cut through tiles.
  static std::vector<bucket::NamedBox> shard() {
    return {{"a", {0, 250}, {700, 262}}, {"c", {1, 5}, {8, 60'000}}};
  }
};

TEST_F(RoundSessionVerify, B7AWrongByteNeverReachesTheWorker) {
  auto members = begin({});
  for (auto& member : members) expect_all_by_round(member);
}

TEST_F(RoundSessionVerify, B7AWrongByteOfAShardNeverReachesTheWorker) {
  auto members = begin(shard());
  for (auto& member : members) expect_all_by_round(member);
}

TEST_F(RoundSessionVerify, B7WhoseHostIsWrongTooFailsAloneAndNamesDeviceTensorAndVersion) {
  wrong_copy_ = 2;
  auto members = begin({});
  expect_all_by_round(members[0]);
  expect_all_by_round(members[1]);
  const auto over = members[2].heard->over();
  EXPECT_FALSE(over.error) << "the round went well";
  ASSERT_TRUE(over.worker_lost);
  members[2].taken.get();
  const auto end = members[2].wait();
  ASSERT_TRUE(end.error);
  ASSERT_TRUE(members[2].worker->failed());
  for (const Error& error : {*over.worker_lost, *end.error, *members[2].worker->failed()}) {
    EXPECT_EQ(error.code(), ErrorCode::kCorrupt);
    for (const char* const part : {"double:2", "m@41", "tensor 'a'", "upload from host memory"}) {
      EXPECT_NE(error.message().find(part), std::string::npos) << error.message();
    }
  }
  expect_nothing_used();
}

TEST_F(RoundSessionVerify, B7WithoutTheDigestsOfTilesNothingIsSpread) {
  leaves_ = std::vector<Digest>();
  auto members = join_all(2);
  spread(members, *communicators_[0]->make_id());
  for (auto& member : members) {
    EXPECT_EQ(member.heard->over().error->code(), ErrorCode::kInvalid);
    member.session->tell({}, true);
    member.take_all();
  }
  for (auto& member : members) expect_all(member);
}

// Uploads after a round are verified only if the session asks for it.
class RoundTailVerify : public RoundSessionTest {
 protected:
  // Makes the leaf of the last tile match no bytes.
  void spoil_last_leaf() {
    leaves_ = sample_.leaves();
    leaves_->back() = Digest{};
  }
  // Stops the round when each worker has one bucket.
  Members stop_midway() {
    auto members = begin_round();
    const auto kept = take_one_each(members);
    for (auto& member : members) member.session->stop("another rank has failed");
    for (std::size_t i = 0; i < members.size(); ++i) {
      EXPECT_TRUE(members[i].heard->over().error);
      members[i].worker->release(kept[i]);
      members[i].take_all();
    }
    return members;
  }
  void expect_wrong(Member& member) {
    member.taken.get();
    const auto end = member.wait();
    ASSERT_TRUE(end.error);
    EXPECT_EQ(end.error->code(), ErrorCode::kCorrupt) << end.error->message();
    EXPECT_EQ(end.refilled, 1u);
    ASSERT_TRUE(member.worker->failed());
    EXPECT_NE(member.worker->failed()->message().find("tensor '"), std::string::npos)
        << member.worker->failed()->message();
  }
};

TEST_F(RoundTailVerify, StoppedBeforeItBeganASessionVerifiesWhatItUploads) {
  for (const bool verify : {false, true}) {
    verify_upload_ = verify;
    spoil_last_leaf();
    auto members = join_all(1);
    members[0].session->stop("nobody else wants the same");
    members[0].session->tell({}, true);
    members[0].take_all();
    if (verify) {
      expect_wrong(members[0]);
    } else {
      expect_all(members[0]);
    }
  }
}

TEST_F(RoundTailVerify, StoppedMidwayTheRestIsVerifiedAndArrives) {
  verify_upload_ = true;
  auto members = stop_midway();
  for (auto& member : members) expect_all(member);
  expect_nothing_used();
}

TEST_F(RoundTailVerify, StoppedMidwayWhatDoesNotFitItsLeafNeverReachesTheWorker) {
  for (const bool verify : {false, true}) {
    verify_upload_ = verify;
    spoil_last_leaf();
    auto members = stop_midway();
    for (auto& member : members) {
      if (verify) {
        expect_wrong(member);
      } else {
        expect_all(member);
      }
    }
  }
  expect_nothing_used();
}

}  // namespace
}  // namespace rekindle::device
