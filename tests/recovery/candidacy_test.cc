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
constexpr BootTime kStart = 1h;

Result<bool> no_answer() { return fail(ErrorCode::kUnavailable, "etcd does not answer"); }

TEST(LeaderLease, IsRenewedThreeTimesPerTtl) {
  LeaderLease lease(kTtl, kStart);
  EXPECT_EQ(lease.next_request_in(kStart), kTtl / 3);
  EXPECT_EQ(lease.answered(kStart + 2s, true, kStart + 2s), LeaseState::kHeld);
  EXPECT_TRUE(lease.check(kStart + 6999ms));
  EXPECT_FALSE(lease.check(kStart + 7s));
}

TEST(LeaderLease, CountsFromBeforeTheRequest) {
  LeaderLease lease(kTtl, kStart);
  EXPECT_EQ(lease.answered(kStart + 1s, true, kStart + 3s), LeaseState::kHeld);
  EXPECT_FALSE(lease.check(kStart + 6s)) << "the answer took two seconds";
}

TEST(LeaderLease, AnEarlierAnswerDoesNotShortenIt) {
  LeaderLease lease(kTtl, kStart);
  lease.answered(kStart + 2s, true, kStart + 2s);
  lease.answered(kStart + 1s, true, kStart + 3s);
  EXPECT_TRUE(lease.check(kStart + 6500ms));
}

TEST(LeaderLease, WithoutAnAnswerItAsksMoreOftenAndEndsAfterTheTtl) {
  LeaderLease lease(kTtl, kStart);
  EXPECT_EQ(lease.answered(kStart + 1s, no_answer(), kStart + 2s), LeaseState::kAway);
  EXPECT_EQ(lease.next_request_in(kStart + 2s), 300ms);
  EXPECT_EQ(lease.next_request_in(kStart + 4900ms), 100ms) << "the end of the lease comes first";
  EXPECT_EQ(lease.request_limit(kStart + 2s), 1s);
  EXPECT_EQ(lease.request_limit(kStart + 4900ms), 100ms);
  EXPECT_EQ(lease.advance(kStart + 4999ms), LeaseState::kAway);
  EXPECT_EQ(lease.advance(kStart + 5s), LeaseState::kOver);
  EXPECT_THAT(lease.why_over(), HasSubstr("has not reached etcd for 5 s"));
}

TEST(LeaderLease, AnAnswerBringsItBackBeforeItsEnd) {
  LeaderLease lease(kTtl, kStart);
  lease.answered(kStart + 1s, no_answer(), kStart + 2s);
  EXPECT_EQ(lease.answered(kStart + 4s, true, kStart + 4s), LeaseState::kHeld);
  EXPECT_TRUE(lease.check(kStart + 8s));
}

TEST(LeaderLease, NothingBringsItBackAfterItsEnd) {
  LeaderLease lease(kTtl, kStart);
  EXPECT_EQ(lease.answered(kStart + 1s, false, kStart + 1s), LeaseState::kOver);
  EXPECT_EQ(lease.answered(kStart + 2s, true, kStart + 2s), LeaseState::kOver);
  EXPECT_EQ(lease.why_over(), "the lease in etcd has run out");
}

TEST(LeaderLease, ASuspendedHostFindsItOver) {
  LeaderLease lease(kTtl, kStart);
  EXPECT_FALSE(lease.check(kStart + 10h)) << "asked before each answer";
  EXPECT_EQ(lease.advance(kStart + 10h), LeaseState::kOver);
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
