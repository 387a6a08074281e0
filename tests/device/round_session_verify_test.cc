// Sessions in a broadcast round that brings one of them a wrong byte.
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/device/round_session_fixture.h"

namespace rekindle::device {
namespace {

using testing::Flip;
using testing::kBucket;
using testing::RoundSessionTest;

class RoundSessionVerify : public RoundSessionTest {
 protected:
  // Of three ranks; the third one owns nothing, and its host has a copy.
  Members begin(const std::vector<bucket::NamedBox>& wanted) {
    wanted_ = wanted;
    flip_ = Flip{2, 1, 77};
    auto members = join_all(3);
    members[2].session->tell({}, true);
    spread(members, *communicators_[0]->make_id());
    for (auto& member : members) member.take_all();
    return members;
  }
  // Without boxes all tensors, whole; these cut through tiles.
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

}  // namespace
}  // namespace rekindle::device
