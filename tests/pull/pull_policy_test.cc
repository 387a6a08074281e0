#include "recovery/pull/pull_policy.h"

#include <chrono>
#include <initializer_list>

#include <gtest/gtest.h>

namespace rekindle::pull {
namespace {

using namespace std::chrono_literals;
using After = PullRounds::After;
using AfterLoss = SourceState::AfterLoss;
using Join = RailKeeper::Join;
using Loss = SourceState::Loss;
using Next = PullRounds::Next;
using SourcePhase = SourceState::Phase;
using Search = PullRounds::Search;

const Error kReset(ErrorCode::kPeerLost, "reset");
const Error kWrong(ErrorCode::kCorrupt, "wrong bytes");
const Error kSlower(ErrorCode::kUnavailable, "others are faster");
constexpr SourceState::Means kTcpPeer{.is_peer = true};
constexpr SourceState::Means kVerbsPeer{.is_peer = true, .has_another_transport = true};

SourceState connected() {
  SourceState state;
  state.connect();
  state.connected();
  return state;
}

TEST(SourceState, APeerIsConnectedAgainOnceAndThenLost) {
  SourceState state = connected();
  EXPECT_EQ(state.on_paths_lost(kReset, kTcpPeer), AfterLoss::kReconnect);
  state.connect();
  EXPECT_TRUE(state.connecting());
  state.connected();
  EXPECT_EQ(state.on_paths_lost(kReset, kTcpPeer), AfterLoss::kLose);
  EXPECT_EQ(state.reconnects(), 1);
}

TEST(SourceState, ATransportThatBreaksTwiceIsReplacedByAnother) {
  SourceState state = connected();
  EXPECT_EQ(state.on_paths_lost(kReset, kVerbsPeer), AfterLoss::kReconnect);
  EXPECT_EQ(state.on_paths_lost(kReset, kVerbsPeer), AfterLoss::kReconnectOverAnother);
  EXPECT_EQ(state.on_paths_lost(kReset, kTcpPeer), AfterLoss::kLose);
}

TEST(SourceState, LocalBytesAndWrongBytesAreNotConnectedAgain) {
  SourceState state = connected();
  EXPECT_EQ(state.on_paths_lost(kReset, {}), AfterLoss::kLose);
  EXPECT_EQ(state.on_paths_lost(kWrong, kVerbsPeer), AfterLoss::kLose);
}

TEST(SourceState, ASlowSourceWaitsUntilItIsNeeded) {
  SourceState state = connected();
  EXPECT_FALSE(state.revive());
  EXPECT_EQ(state.on_paths_lost(kSlower, kTcpPeer), AfterLoss::kWait);
  EXPECT_EQ(state.phase(), SourcePhase::kSlow);
  EXPECT_EQ(state.reconnects(), 0);
  EXPECT_TRUE(state.revive());
  EXPECT_FALSE(state.revive());
}

TEST(SourceState, AConnectThatEndsLateDoesNotBringALostSourceBack) {
  SourceState state;
  state.connect();
  state.lose(Loss::kWrongBytes, "wrong");
  state.connected();
  EXPECT_TRUE(state.lost());
  state.lose(Loss::kFailed, "its connection ended");
  EXPECT_TRUE(state.quarantined()) << "a later loss is no pardon";
}

TEST(SourceState, TheNextTransferStartsAfreshWithSourcesThatAreNotLost) {
  SourceState state = connected();
  (void)state.on_paths_lost(kReset, kTcpPeer);
  state.restart();
  EXPECT_EQ(state.phase(), SourcePhase::kIdle);
  EXPECT_EQ(state.on_paths_lost(kReset, kTcpPeer), AfterLoss::kReconnect);
  state.lose(Loss::kFailed, "gone");
  state.restart();
  EXPECT_TRUE(state.lost());
}

TEST(TransferPolicy, StarvationCountsWhenNoPathsAreOnTheirWay) {
  TransferPolicy policy;
  policy.paths_added();
  EXPECT_FALSE(policy.starved(0)) << "it had not heard of the paths";
  EXPECT_TRUE(policy.starved(1));
  EXPECT_TRUE(policy.next(false, false).cancel_batch);
  policy.connect_begins();
  EXPECT_FALSE(policy.next(false, false).cancel_batch) << "a connect may bring more";
  policy.paths_added();
  policy.connect_ended();
  EXPECT_FALSE(policy.next(false, false).cancel_batch);
}

TEST(TransferPolicy, ItEndsWithTheBatchAndTheLastConnect) {
  TransferPolicy policy;
  policy.connect_begins();
  const auto waits = policy.next(true, false);
  EXPECT_FALSE(waits.ended);
  EXPECT_TRUE(waits.stop_connecting);
  EXPECT_FALSE(waits.join_rails);
  policy.connect_ended();
  EXPECT_TRUE(policy.next(true, false).ended);
}

TEST(TransferPolicy, ACancelStopsConnectsAndTheBatch) {
  TransferPolicy policy;
  EXPECT_TRUE(policy.next(false, false).join_rails);
  const auto step = policy.next(false, true);
  EXPECT_TRUE(step.stop_connecting && step.cancel_batch);
  EXPECT_FALSE(step.ended || step.join_rails);
}

class SourceStandingTest : public ::testing::Test {
 protected:
  const Incarnation source_ = Incarnation::random();
  SourceFaults faults_;
};

TEST_F(SourceStandingTest, APeerThatCannotBeReachedIsAskedThreeTimes) {
  faults_.failed(source_, ErrorCode::kTimeout);
  faults_.failed(source_, ErrorCode::kPeerLost);
  EXPECT_FALSE(faults_.banned(source_));
  faults_.failed(source_, ErrorCode::kUnavailable);
  EXPECT_TRUE(faults_.banned(source_));
}

TEST_F(SourceStandingTest, APeerThatAnswersNonsenseIsAskedOnce) {
  faults_.failed(source_, ErrorCode::kCorrupt);
  EXPECT_TRUE(faults_.banned(source_));
}

TEST_F(SourceStandingTest, ASourceThatDeliversMayBeLostOftenOneThatDoesNotThreeTimes) {
  for (int i = 0; i < 10; ++i) faults_.lost(source_, Loss::kFailed, true);
  EXPECT_FALSE(faults_.banned(source_));
  faults_.lost(source_, Loss::kFailed, false);
  faults_.lost(source_, Loss::kFailed, false);
  EXPECT_TRUE(faults_.banned(source_)) << "the last loss with bytes counts as the first";
}

TEST_F(SourceStandingTest, AGrantThatRanOutIsNotTheSourcesFault) {
  for (int i = 0; i < 10; ++i) faults_.lost(source_, Loss::kGrantRefused, false);
  EXPECT_FALSE(faults_.banned(source_));
}

TEST_F(SourceStandingTest, WrongSlicesAddUpOverTransfers) {
  EXPECT_FALSE(faults_.add_wrong("a", 1));
  EXPECT_FALSE(faults_.add_wrong("a", 0)) << "nothing new";
  EXPECT_FALSE(faults_.add_wrong("b", 1)) << "another source";
  EXPECT_TRUE(faults_.add_wrong("a", 1));
  faults_.lost(source_, Loss::kWrongBytes, true);
  EXPECT_TRUE(faults_.banned(source_));
}

const TimePoint kStart{1h};

TEST(Silence, EndsItsPatienceAfterTheLastByte) {
  Silence silence(4000ms, kStart);
  EXPECT_FALSE(silence.over(kStart + 3999ms));
  EXPECT_TRUE(silence.over(kStart + 4000ms));
  silence.heard(kStart + 3s);
  EXPECT_FALSE(silence.over(kStart + 4000ms));
  EXPECT_EQ(silence.left(kStart + 4s), 3000ms);
  EXPECT_TRUE(silence.over(kStart + 7s));
}

TEST(Silence, AnOlderByteDoesNotSetItBack) {
  Silence silence(4000ms, kStart);
  silence.heard(kStart + 2s);
  silence.heard(TimePoint{});  // the engine: no byte yet
  EXPECT_EQ(silence.left(kStart + 2s), 4000ms);
}

TEST(Silence, AStepGetsTheTimeThatItWantsOrTheRest) {
  const Silence silence(4000ms, kStart);
  EXPECT_EQ(silence.at_most(1500ms, kStart), 1500ms);
  EXPECT_EQ(silence.at_most(1500ms, kStart + 3200ms), 800ms);
  EXPECT_EQ(silence.at_most(1500ms, kStart + 9s), 1ms);  // a deadline, not "none"
}

TEST(Silence, APauseOfThePullerDoesNotCount) {
  Silence silence(4000ms, kStart);
  silence.forgive(60s);
  EXPECT_FALSE(silence.over(kStart + 61s));
}

TEST(Silence, AStepThatComesLateHasAtLeastItsTime) {
  Silence silence(4000ms, kStart);
  silence.leave(1000ms, kStart + 1s);
  EXPECT_EQ(silence.left(kStart + 1s), 3000ms) << "there is more left";
  silence.leave(1000ms, kStart + 3900ms);
  EXPECT_EQ(silence.left(kStart + 3900ms), 1000ms);
  EXPECT_TRUE(silence.over(kStart + 4900ms));
}

TEST(PullRounds, APlanWithNothingInItIsTheEnd) { EXPECT_EQ(PullRounds::next({}), Next::kDone); }

TEST(PullRounds, MissingBoxesAreLookedForBeforeCompleteSourcesAreRead) {
  EXPECT_EQ(PullRounds::next({.has_slices = true}), Next::kTransfer);
  EXPECT_EQ(PullRounds::next({.has_missing = true}), Next::kFindSources);
  EXPECT_EQ(PullRounds::next({.has_slices = true, .has_missing = true}), Next::kFindSources);
}

TEST(PullRounds, FromGrowingSourcesAPartIsReadFirst) {
  EXPECT_EQ(PullRounds::next({.has_slices = true, .has_missing = true, .any_growing = true}),
            Next::kTransfer);
  EXPECT_EQ(PullRounds::next({.has_slices = true, .any_growing = true, .nothing_readable = true}),
            Next::kFindSources);
  EXPECT_EQ(PullRounds::next({.has_missing = true, .any_growing = true}), Next::kFindSources);
}

TEST(PullRounds, TheFallbackIsReadWhenNoSourceIsWorthWaitingFor) {
  EXPECT_EQ(PullRounds::search({.has_fallback = true}), Search::kReadFallback);
  EXPECT_EQ(PullRounds::search({.has_fallback = true, .worth_waiting = true}), Search::kAskAgain);
  EXPECT_EQ(PullRounds::search({.has_fallback = true, .worth_waiting = true, .silent = true}),
            Search::kReadFallback);
}

TEST(PullRounds, WithoutAFallbackTheSearchEndsWithTheSilence) {
  EXPECT_EQ(PullRounds::search({}), Search::kAskAgain);
  EXPECT_EQ(PullRounds::search({.worth_waiting = true, .silent = true}), Search::kGiveUp);
}

TEST(PullRounds, TheFifthTransferInARowThatGainsNothingIsTheLast) {
  PullRounds rounds;
  for (int i = 0; i < 4; ++i) EXPECT_EQ(rounds.after({}), After::kGoOn) << i;
  EXPECT_EQ(rounds.after({.gained = true}), After::kGoOn);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(rounds.after({}), After::kGoOn) << i;
  EXPECT_EQ(rounds.after({}), After::kStop);
}

TEST(PullRounds, TransfersWithoutAGrantDoNotCountUntilTheSilenceIsOver) {
  PullRounds rounds;
  for (int i = 0; i < 100; ++i) {
    EXPECT_EQ(rounds.after({.grants_refused = true}), After::kAwaitGrants);
  }
  for (int i = 0; i < 4; ++i) (void)rounds.after({.grants_refused = true, .silent = true});
  EXPECT_EQ(rounds.after({.grants_refused = true, .silent = true}), After::kStop);
}

const TimePoint kJoined{1h};

transport::BatchProgress alive(
    std::initializer_list<std::pair<transport::SourceIndex, const char*>> paths) {
  transport::BatchProgress progress;
  for (const auto& [source, home] : paths) {
    progress.paths.push_back({.home = home, .alive = true, .source = source});
  }
  return progress;
}

TEST(RailKeeper, ARailIsLostWhileItsSourceGoesOnOverOthers) {
  RailKeeper rails;
  EXPECT_TRUE(rails.update(alive({{0, "mlx0"}, {0, "mlx1"}, {1, "mlx0"}})).empty());
  EXPECT_EQ(rails.alive(0), (std::vector<std::string>{"mlx0", "mlx1"}));
  const auto lost = rails.update(alive({{0, "mlx1"}}));
  ASSERT_EQ(lost.size(), 1u) << "source 1 is gone altogether: that is another event";
  EXPECT_EQ(lost[0].source, 0u);
  EXPECT_EQ(lost[0].rail, "mlx0");
  EXPECT_TRUE(rails.alive(1).empty());
  EXPECT_TRUE(rails.update(alive({{0, "mlx1"}})).empty()) << "told once";
}

TEST(RailKeeper, AJoinIsTriedEachSecondOneAtATime) {
  RailKeeper rails;
  EXPECT_FALSE(rails.begin_join(0, kJoined)) << "it has just been connected";
  EXPECT_FALSE(rails.begin_join(0, kJoined + 999ms));
  EXPECT_TRUE(rails.begin_join(0, kJoined + 1s));
  EXPECT_TRUE(rails.joining(0));
  EXPECT_FALSE(rails.begin_join(0, kJoined + 9s)) << "one is under way";
  rails.end_join(0, Join::kNothingMissing, kJoined + 9s);
  EXPECT_FALSE(rails.joining(0));
  EXPECT_FALSE(rails.begin_join(0, kJoined + 9999ms));
  EXPECT_TRUE(rails.begin_join(0, kJoined + 10s));
}

TEST(RailKeeper, ThePauseDoublesWhileJoinsFailAndStartsAgainAfterOneThatWorked) {
  RailKeeper rails;
  TimePoint now = kJoined;
  (void)rails.begin_join(0, now);
  now += 1s;
  for (const auto pause : {2s, 4s, 8s, 16s, 16s}) {
    ASSERT_TRUE(rails.begin_join(0, now));
    rails.end_join(0, Join::kFailed, now);
    EXPECT_FALSE(rails.begin_join(0, now + pause - 1ms));
    now += pause;
  }
  ASSERT_TRUE(rails.begin_join(0, now));
  rails.end_join(0, Join::kJoined, now);
  EXPECT_TRUE(rails.begin_join(0, now + 1s));
}

}  // namespace
}  // namespace rekindle::pull
