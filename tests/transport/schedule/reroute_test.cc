#include "transport/schedule/reroute.h"

#include "tests/transport/schedule/schedule_fixture.h"

namespace rekindle::transport {
namespace {

class ReroutesTest : public ScheduleFixture {
 protected:
  ReroutesTest() {
    everybody_holds_everything(2);
    connect(0);
    connect(1);
  }
  bool may_serve(SourceIndex source) { return reroutes.may_serve(source, 3, infos[3]); }

  Reroutes reroutes{slices, sources};
};

TEST_F(ReroutesTest, ABadSliceGoesToAnotherSource) {
  EXPECT_EQ(reroutes.failed(3, 0, rule_on(OpStatus::kFault, false)), 1);
  EXPECT_FALSE(may_serve(0));
  EXPECT_TRUE(may_serve(1));
  EXPECT_FALSE(reroutes.next(0));
  EXPECT_EQ(reroutes.next(1), SliceIndex{3});
}

TEST_F(ReroutesTest, TheSourceThatFailedASliceGetsItAgainWhenNoOtherIsAlive) {
  reroutes.failed(3, 0, rule_on(Verdict::kRetry));
  sources.abort_path(1, ErrorCode::kPeerLost, "gone");
  EXPECT_EQ(reroutes.next(0), SliceIndex{3});
}

TEST_F(ReroutesTest, ASliceOfABrokenConnectionMayGoAnywhereAndCountsNoAttempt) {
  EXPECT_EQ(reroutes.failed(3, 0, rule_on(OpStatus::kPeerLost, false)), 0);
  EXPECT_TRUE(may_serve(0));
  EXPECT_EQ(reroutes.count(), 1u);
}

TEST_F(ReroutesTest, AttemptsCountUntilTheSliceIsAccepted) {
  EXPECT_EQ(reroutes.failed(3, 0, rule_on(OpStatus::kInvalid, false)), 1);
  EXPECT_EQ(reroutes.failed(3, 1, rule_on(Verdict::kUndecided)), 2);
  reroutes.accepted(3);
  EXPECT_TRUE(may_serve(0));
}

TEST_F(ReroutesTest, ASliceThatWasPostedMeanwhileLeavesTheQueue) {
  reroutes.put_back(3);
  reroutes.put_back(4);
  slices.post(3, 0);
  EXPECT_EQ(reroutes.next(0), SliceIndex{4});
  slices.reopen(3);
  slices.post(4, 0);
  EXPECT_FALSE(reroutes.next(0));
}

TEST(Ruling, EachStatusHasItsCost) {
  using Blame = Ruling::Blame;
  struct Case {
    OpStatus status;
    bool slow_path;
    Ruling expected;
  };
  for (const auto& [status, slow_path, expected] :
       std::vector<Case>{{OpStatus::kAborted, false, {false, false, Blame::kNobody}},
                         {OpStatus::kAborted, true, {true, false, Blame::kNobody}},
                         {OpStatus::kPeerLost, false, {false, false, Blame::kPath}},
                         {OpStatus::kTimeout, false, {true, true, Blame::kPath}},
                         {OpStatus::kFault, false, {true, true, Blame::kSource}},
                         {OpStatus::kInvalid, false, {true, true, Blame::kSource}},
                         {OpStatus::kStale, false, {false, true, Blame::kSourceIsLost}},
                         {OpStatus::kDenied, false, {false, true, Blame::kSourceIsLost}},
                         {OpStatus::kLocalFault, false, {false, true, Blame::kPath}}}) {
    SCOPED_TRACE(to_string(status));
    const Ruling ruling = rule_on(status, slow_path);
    EXPECT_EQ(ruling.elsewhere, expected.elsewhere);
    EXPECT_EQ(ruling.counts_as_attempt, expected.counts_as_attempt);
    EXPECT_EQ(ruling.blame, expected.blame);
  }
  EXPECT_EQ(rule_on(Verdict::kRetry).blame, Blame::kSource);
  EXPECT_EQ(rule_on(Verdict::kUndecided).blame, Blame::kNobody);
}

}  // namespace
}  // namespace rekindle::transport
