#include "recovery/pull/transfer_policy.h"

#include <gtest/gtest.h>

namespace rekindle::pull {
namespace {

using AfterLoss = SourceState::AfterLoss;
using Loss = SourceState::Loss;
using Phase = SourceState::Phase;

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
  EXPECT_EQ(state.phase(), Phase::kSlow);
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
  EXPECT_EQ(state.phase(), Phase::kIdle);
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

}  // namespace
}  // namespace rekindle::pull
