#include "recovery/coordinator/core/candidacy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

// When a coordinator campaigns, leads and steps down.
namespace rekindle::coordinator {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;
using LeaseState = LeaderLease::State;
using State = Candidacy::State;

constexpr BootTime kTtl = 5s;
constexpr BootTime kBooted = 1h;

Result<bool> no_answer() { return fail(ErrorCode::kUnavailable, "etcd does not answer"); }

TEST(LeaderLease, IsRenewedThreeTimesPerTtl) {
  LeaderLease lease(kTtl, kBooted);
  EXPECT_EQ(lease.next_request_in(kBooted), kTtl / 3);
  EXPECT_EQ(lease.answered(kBooted + 2s, true, kBooted + 2s), LeaseState::kHeld);
  EXPECT_TRUE(lease.check(kBooted + 6999ms));
  EXPECT_FALSE(lease.check(kBooted + 7s));
}

TEST(LeaderLease, CountsFromBeforeTheRequest) {
  LeaderLease lease(kTtl, kBooted);
  EXPECT_EQ(lease.answered(kBooted + 1s, true, kBooted + 3s), LeaseState::kHeld);
  EXPECT_FALSE(lease.check(kBooted + 6s)) << "the answer took two seconds";
}

TEST(LeaderLease, AnEarlierAnswerDoesNotShortenIt) {
  LeaderLease lease(kTtl, kBooted);
  lease.answered(kBooted + 2s, true, kBooted + 2s);
  lease.answered(kBooted + 1s, true, kBooted + 3s);
  EXPECT_TRUE(lease.check(kBooted + 6500ms));
}

TEST(LeaderLease, WithoutAnAnswerItAsksMoreOftenAndEndsAfterTheTtl) {
  LeaderLease lease(kTtl, kBooted);
  EXPECT_EQ(lease.answered(kBooted + 1s, no_answer(), kBooted + 2s), LeaseState::kAway);
  EXPECT_EQ(lease.next_request_in(kBooted + 2s), 300ms);
  EXPECT_EQ(lease.next_request_in(kBooted + 4900ms), 100ms) << "the end of the lease comes first";
  EXPECT_EQ(lease.request_limit(kBooted + 2s), 1s);
  EXPECT_EQ(lease.request_limit(kBooted + 4900ms), 100ms);
  EXPECT_EQ(lease.advance(kBooted + 4999ms), LeaseState::kAway);
  EXPECT_EQ(lease.advance(kBooted + 5s), LeaseState::kOver);
  EXPECT_THAT(lease.why_over(), HasSubstr("has not reached etcd for 5 s"));
}

TEST(LeaderLease, AnAnswerBringsItBackBeforeItsEnd) {
  LeaderLease lease(kTtl, kBooted);
  lease.answered(kBooted + 1s, no_answer(), kBooted + 2s);
  EXPECT_EQ(lease.answered(kBooted + 4s, true, kBooted + 4s), LeaseState::kHeld);
  EXPECT_TRUE(lease.check(kBooted + 8s));
}

TEST(LeaderLease, NothingBringsItBackAfterItsEnd) {
  LeaderLease lease(kTtl, kBooted);
  EXPECT_EQ(lease.answered(kBooted + 1s, false, kBooted + 1s), LeaseState::kOver);
  EXPECT_EQ(lease.answered(kBooted + 2s, true, kBooted + 2s), LeaseState::kOver);
  EXPECT_EQ(lease.why_over(), "the lease in etcd has run out");
}

TEST(LeaderLease, ASuspendedHostFindsItOver) {
  LeaderLease lease(kTtl, kBooted);
  EXPECT_FALSE(lease.check(kBooted + 10h)) << "asked before each answer";
  EXPECT_EQ(lease.advance(kBooted + 10h), LeaseState::kOver);
}

TEST(Candidacy, LeadsOnceTheLeaseIsConfirmed) {
  Candidacy candidacy;
  EXPECT_EQ(candidacy.state(), State::kStandingBy);
  EXPECT_FALSE(candidacy.campaigned({}));
  EXPECT_EQ(candidacy.state(), State::kConfirming);
  candidacy.confirmed(no_answer());
  EXPECT_EQ(candidacy.state(), State::kStandingBy) << "it may not lead";
  EXPECT_EQ(candidacy.pause(), 300ms);
  candidacy.campaigned({});
  candidacy.confirmed(true);
  EXPECT_EQ(candidacy.state(), State::kLeading);
  EXPECT_EQ(candidacy.pause(), 0ms);
}

TEST(Candidacy, SaysOnceByWhomItIsKeptWaiting) {
  Candidacy candidacy;
  const auto lost = [&](const char* leader) {
    return candidacy.campaigned(fail(ErrorCode::kUnavailable, "{} leads", leader));
  };
  EXPECT_EQ(lost("a"), "a leads");
  EXPECT_EQ(lost("a"), std::nullopt);
  EXPECT_EQ(lost("b"), "b leads");
  EXPECT_EQ(candidacy.state(), State::kStandingBy);
  EXPECT_EQ(candidacy.pause(), 300ms);
}

class Leader : public ::testing::Test {
 protected:
  void SetUp() override {
    candidacy_.campaigned({});
    candidacy_.confirmed(true);
  }
  Candidacy candidacy_;
};

TEST_F(Leader, StandsByAgainAfterATermThatTheLeaseEnded) {
  candidacy_.term_ended({});
  EXPECT_EQ(candidacy_.state(), State::kStandingBy);
  EXPECT_EQ(candidacy_.pause(), 0ms);
}

TEST_F(Leader, GivesOthersASecondAfterAFailedTerm) {
  candidacy_.term_ended(fail(ErrorCode::kStale, "another coordinator leads now"));
  EXPECT_EQ(candidacy_.state(), State::kStandingBy);
  EXPECT_EQ(candidacy_.pause(), 1s);
}

TEST_F(Leader, EndsWithAnErrorThatWouldRepeatItself) {
  candidacy_.term_ended(fail(ErrorCode::kCorrupt, "a damaged state"));
  EXPECT_EQ(candidacy_.state(), State::kOver);
  EXPECT_EQ(candidacy_.outcome().error().code(), ErrorCode::kCorrupt);
}

TEST_F(Leader, EndsItsTermBeforeItStops) {
  candidacy_.stop();
  EXPECT_EQ(candidacy_.state(), State::kLeading);
  candidacy_.term_ended({});
  EXPECT_EQ(candidacy_.state(), State::kOver);
  EXPECT_TRUE(candidacy_.outcome());
}

TEST(Candidacy, DoesNotLeadOnceItIsToStop) {
  Candidacy candidacy;
  candidacy.campaigned({});
  candidacy.stop();
  EXPECT_EQ(candidacy.state(), State::kConfirming) << "the driver gives the lease back";
  candidacy.confirmed(true);
  EXPECT_EQ(candidacy.state(), State::kOver);
}

TEST(Candidacy, StopsAtOnceWhileItStandsBy) {
  Candidacy candidacy;
  candidacy.stop();
  EXPECT_EQ(candidacy.state(), State::kOver);
}

}  // namespace
}  // namespace rekindle::coordinator
