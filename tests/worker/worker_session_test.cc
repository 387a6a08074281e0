#include "recovery/worker/core/worker_session.h"

#include <random>

#include <gtest/gtest.h>

namespace rekindle::worker {
namespace {

using namespace std::chrono_literals;

constexpr TileIndex kTiles = 100;

TileSet tiles(std::initializer_list<std::pair<TileIndex, TileIndex>> runs) {
  TileSet set(kTiles);
  for (const auto& [begin, end] : runs) set.set_range(begin, end);
  return set;
}

class WorkerSessionTest : public ::testing::Test {
 protected:
  TimePoint now_{1000s};
  WorkerSession session_{7, now_, now_ + 10s, SessionTimes{.load = 60s}};

  void serve() {
    ASSERT_TRUE(session_.serve(now_, {{"m", 41}, Rung::kPeers, tiles({{10, 50}}), 4000}));
  }
  void finish() {
    serve();
    (void)session_.complete(now_);
  }
};

TEST_F(WorkerSessionTest, TellsEachTileOfTheLayoutOnceAndNoOther) {
  serve();
  EXPECT_EQ(session_.ready(tiles({{0, 12}, {48, 60}})), (TileRuns{{10, 12}, {48, 50}}));
  EXPECT_EQ(session_.ready(tiles({{0, 12}, {48, 60}})), TileRuns{});
  EXPECT_EQ(session_.ready(tiles({{0, 13}})), (TileRuns{{12, 13}}));
  EXPECT_EQ(session_.complete(now_), (TileRuns{{13, 48}}));
  EXPECT_EQ(session_.complete(now_), TileRuns{});
  EXPECT_EQ(session_.tiles().announced(), session_.tiles().held());
}

TEST_F(WorkerSessionTest, TellsNothingBeforeItIsServedOrAfterItHasEnded) {
  EXPECT_EQ(session_.ready(tiles({{0, kTiles}})), TileRuns{});
  serve();
  session_.end(now_, Error(ErrorCode::kStale, "retired"));
  EXPECT_EQ(session_.ready(tiles({{0, kTiles}})), TileRuns{});
  EXPECT_EQ(session_.complete(now_), TileRuns{});
}

TEST_F(WorkerSessionTest, LoadedCountsOnceEveryTileWasToldThoughTheCopyIsNotCommitted) {
  serve();
  (void)session_.ready(tiles({{0, kTiles}}));
  ASSERT_TRUE(session_.loaded(now_, 4000));
  EXPECT_EQ(session_.state(), SessionState::kLoaded);
  session_.commit(now_);
  EXPECT_EQ(session_.complete(now_), TileRuns{});
  EXPECT_TRUE(session_.is_complete());
  EXPECT_EQ(session_.state(), SessionState::kCommitted);
  EXPECT_EQ(session_.next_deadline(), std::nullopt);
}

TEST_F(WorkerSessionTest, LoadedBeforeEverythingIsHereIsInvalid) {
  serve();
  (void)session_.ready(tiles({{10, 49}}));
  const auto early = session_.loaded(now_, 4000);
  ASSERT_FALSE(early);
  EXPECT_EQ(early.error().code(), ErrorCode::kInvalid);
  (void)session_.complete(now_);
  EXPECT_TRUE(session_.loaded(now_, 4000));
}

TEST_F(WorkerSessionTest, LoadedWithOtherThanAllBytesIsInvalid) {
  finish();
  for (const std::uint64_t bytes : {0u, 3999u, 4001u}) {
    const auto wrong = session_.loaded(now_, bytes);
    ASSERT_FALSE(wrong);
    EXPECT_EQ(wrong.error().code(), ErrorCode::kInvalid);
    EXPECT_EQ(session_.state(), SessionState::kServing);
  }
  EXPECT_TRUE(session_.loaded(now_, 4000));
  EXPECT_TRUE(session_.loaded(now_, 4000)) << "again is fine";
  EXPECT_EQ(session_.state(), SessionState::kLoaded);
}

TEST_F(WorkerSessionTest, CommitsOnlyWhatHasLoaded) {
  finish();
  session_.commit(now_);
  EXPECT_EQ(session_.state(), SessionState::kServing);
  ASSERT_TRUE(session_.loaded(now_, 4000));
  session_.commit(now_);
  EXPECT_EQ(session_.state(), SessionState::kCommitted);
}

TEST_F(WorkerSessionTest, TheFirstReasonOfItsEndStaysAndAnswersWhatComesLater) {
  finish();
  session_.end(now_, Error(ErrorCode::kStale, "first"));
  session_.end(now_, Error(ErrorCode::kPeerLost, "second"));
  session_.commit(now_);
  const auto loaded = session_.loaded(now_, 4000);
  ASSERT_FALSE(loaded);
  EXPECT_EQ(loaded.error().message(), "first");
  EXPECT_EQ(session_.serve(now_, {}).error().code(), ErrorCode::kStale);
  EXPECT_TRUE(session_.ended());
}

TEST_F(WorkerSessionTest, ResolvingEndsByTheWorkersDeadline) {
  EXPECT_FALSE(session_.overdue(now_ + 9999ms));
  ASSERT_TRUE(session_.overdue(now_ + 10s));
  EXPECT_EQ(session_.overdue(now_ + 10s)->code(), ErrorCode::kTimeout);
  serve();
  EXPECT_FALSE(session_.overdue(now_ + 10s)) << "a pull has deadlines of its own";
}

TEST_F(WorkerSessionTest, AWorkerThatDoesNotLoadIsOverdueFromItsLastByteOn) {
  serve();
  now_ += 500s;
  (void)session_.complete(now_);
  EXPECT_FALSE(session_.overdue(now_ + 59s));
  EXPECT_TRUE(session_.overdue(now_ + 60s));
  ASSERT_TRUE(session_.loaded(now_ + 59s, 4000));
  EXPECT_FALSE(session_.overdue(now_ + 600s)) << "it waits for others now";
}

TEST_F(WorkerSessionTest, APauseOfTheAgentMovesDeadlines) {
  session_.excuse(5s);
  EXPECT_FALSE(session_.overdue(now_ + 14s));
  serve();
  (void)session_.complete(now_);
  session_.excuse(100s);
  EXPECT_FALSE(session_.overdue(now_ + 159s));
  EXPECT_TRUE(session_.overdue(now_ + 160s));
}

TEST_F(WorkerSessionTest, WhatARoundHasGivenIsAllThoughNoTileIsHere) {
  session_.enter_round();
  serve();
  EXPECT_FALSE(session_.has_all());
  EXPECT_EQ(session_.loaded(now_, 4000).error().code(), ErrorCode::kInvalid);
  session_.leave_round(now_, true);
  EXPECT_TRUE(session_.has_all());
  EXPECT_EQ(session_.phases().current(), Phase::kInstall);
  EXPECT_FALSE(session_.loaded(now_, 3999));
  ASSERT_TRUE(session_.loaded(now_, 4000));
  EXPECT_EQ(session_.complete(now_), TileRuns{}) << "the copy here was completed later";
  EXPECT_EQ(session_.state(), SessionState::kLoaded);
}

TEST_F(WorkerSessionTest, ARoundThatGaveNotAllLeavesTheRestToTiles) {
  session_.enter_round();
  serve();
  session_.leave_round(now_, false);
  EXPECT_EQ(session_.phases().current(), Phase::kWire);
  EXPECT_FALSE(session_.loaded(now_, 4000));
  (void)session_.complete(now_);
  EXPECT_TRUE(session_.loaded(now_, 4000));
}

TEST_F(WorkerSessionTest, TheTimeToLoadBeginsWhenTheRoundIsOver) {
  session_.enter_round();
  serve();
  EXPECT_EQ(session_.complete(now_), (TileRuns{{10, 50}})) << "its host has all of it";
  EXPECT_EQ(session_.phases().current(), Phase::kWire);
  EXPECT_FALSE(session_.overdue(now_ + 500s));
  now_ += 100s;
  session_.leave_round(now_, true);
  EXPECT_FALSE(session_.overdue(now_ + 59s));
  EXPECT_TRUE(session_.overdue(now_ + 60s));
}

using Step = WorkerSession::LoadedStep;
using Copy = WorkerSession::CopyKnown;

TEST_F(WorkerSessionTest, LoadedWaitsForTheCommitOfACopyThatArrives) {
  serve();
  EXPECT_EQ(session_.next_for_loaded(Copy::kArriving), Step::kAccept) << "to be refused";
  (void)session_.ready(tiles({{0, kTiles}}));
  EXPECT_EQ(session_.next_for_loaded(Copy::kArriving), Step::kWait);
  EXPECT_EQ(session_.next_for_loaded(Copy::kChanged), Step::kVerify);
  EXPECT_EQ(session_.next_for_loaded(Copy::kUnchanged), Step::kAccept);
}

TEST_F(WorkerSessionTest, LoadedWaitsForADeviceProcessThatIsInARound) {
  serve();
  session_.enter_round();
  EXPECT_EQ(session_.next_for_loaded(Copy::kArriving), Step::kWait);
  session_.leave_round(now_, false);
  EXPECT_EQ(session_.delivery(), Delivery::kRest);
  EXPECT_EQ(session_.next_for_loaded(Copy::kArriving), Step::kWait);
  session_.leave_device(now_, true);
  EXPECT_EQ(session_.delivery(), Delivery::kFilled);
  EXPECT_EQ(session_.next_for_loaded(Copy::kArriving), Step::kAccept);
  EXPECT_EQ(session_.next_for_loaded(Copy::kChanged), Step::kVerify)
      << "a part of the bytes came from the copy";
}

TEST_F(WorkerSessionTest, LoadedWaitsForTheRoundAlsoWhereTheHostHasEveryByte) {
  session_.enter_round();
  serve();
  (void)session_.complete(now_);
  EXPECT_EQ(session_.next_for_loaded(Copy::kUnchanged), Step::kWait)
      << "the round would take a rank that detaches now for lost";
  EXPECT_EQ(session_.next_for_loaded(Copy::kChanged), Step::kWait);
  session_.leave_round(now_, true);
  EXPECT_EQ(session_.next_for_loaded(Copy::kUnchanged), Step::kAccept);
}

TEST_F(WorkerSessionTest, ABroadcastNeedsNoCopyOfThisHost) {
  serve();
  session_.enter_round();
  session_.receive_broadcast(now_);
  session_.leave_round(now_, true);
  EXPECT_EQ(session_.delivery(), Delivery::kBroadcast);
  EXPECT_EQ(session_.next_for_loaded(Copy::kChanged), Step::kAccept);
}

TEST_F(WorkerSessionTest, ADeviceProcessThatFailsLeavesTheRestToTheWorker) {
  serve();
  session_.enter_round();
  session_.leave_device(now_, false);
  EXPECT_EQ(session_.delivery(), Delivery::kHost);
  EXPECT_EQ(session_.next_for_loaded(Copy::kArriving), Step::kAccept) << "to be refused";
  EXPECT_EQ(session_.loaded(now_, 4000).error().code(), ErrorCode::kInvalid);
}

TEST_F(WorkerSessionTest, ATimeoutNamesTheObstacle) {
  session_.wait_for(Error(ErrorCode::kUnavailable, "another pull fills the files"));
  EXPECT_EQ(session_.overdue(now_ + 10s)->message(), "another pull fills the files");
  EXPECT_EQ(session_.overdue(now_ + 10s)->code(), ErrorCode::kTimeout);
  session_.wait_for(std::nullopt);
  EXPECT_NE(session_.overdue(now_ + 10s)->message(), "another pull fills the files");
}

TEST_F(WorkerSessionTest, ReportsEachPhaseOnce) {
  EXPECT_EQ(session_.phases().to_report(), std::nullopt);
  serve();
  EXPECT_EQ(session_.phases().to_report(), Phase::kWire);
  EXPECT_EQ(session_.phases().to_report(), std::nullopt);
  (void)session_.complete(now_);
  EXPECT_EQ(session_.phases().to_report(), Phase::kInstall);
}

TEST_F(WorkerSessionTest, PhasesAddUpToTheWholeTime) {
  now_ += 2s;
  session_.phases().enter(Phase::kRegister, now_);
  now_ += 3s;
  serve();
  session_.phases().enter(Phase::kPlan, now_);  // ignored: an earlier phase
  now_ += 5s;
  (void)session_.complete(now_);
  now_ += 7s;
  ASSERT_TRUE(session_.loaded(now_, 4000));
  now_ += 11s;
  session_.commit(now_);
  const auto took = session_.phases().at(now_ + 100s);
  EXPECT_EQ(took, (std::array<Duration, kPhaseCount>{0s, 2s, 3s, 5s, 7s, 11s}));
}

// In any order of events: announced tiles have verified and belong to the layout, each is announced
// once, loaded comes before committed, and an end is final.
TEST(WorkerSessionRandom, KeepsItsPromises) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  for (int run = 0; run < 500; ++run) {
    TimePoint now{1000s};
    WorkerSession session(1, now, now + 10s);
    TileSet held(kTiles), verified(kTiles), told(kTiles);
    for (TileIndex i = 0; i < kTiles; ++i) {
      if (random() % 2 != 0) held.set(i);
    }
    bool whole = false;
    SessionState before = session.state();
    const auto tell = [&](const TileRuns& runs) {
      for (const auto& [begin, end] : runs) {
        for (TileIndex tile = begin; tile < end; ++tile) {
          ASSERT_TRUE(held.test(tile));
          ASSERT_TRUE(verified.test(tile) || whole);
          ASSERT_FALSE(told.test(tile));
          told.set(tile);
        }
      }
    };
    for (int step = 0; step < 40; ++step) {
      now += std::chrono::milliseconds(random() % 1000);
      switch (random() % 12) {
        case 0:
          (void)session.serve(now, {{"m", 1}, Rung::kPeers, held, 100});
          break;
        case 1:
          whole = whole || session.state() == SessionState::kServing;
          tell(session.complete(now));
          break;
        case 2:
        case 3: {
          const bool taken = session.loaded(now, random() % 4 == 0 ? 99 : 100).has_value();
          ASSERT_TRUE(!taken || told.count() == held.count());
          break;
        }
        case 4:
          session.commit(now);
          break;
        case 5:
          if (random() % 8 == 0) session.end(now, Error(ErrorCode::kPeerLost, "dead"));
          break;
        default:
          for (int i = 0; i < 5; ++i) verified.set(static_cast<TileIndex>(random() % kTiles));
          tell(session.ready(verified));
      }
      ASSERT_GE(session.state(), before) << "it goes forwards only";
      ASSERT_TRUE(session.state() != SessionState::kCommitted || before >= SessionState::kLoaded);
      ASSERT_EQ(session.tiles().announced(), told.count());
      ASSERT_EQ(session.state() == SessionState::kEnded, session.ended());
      before = session.state();
    }
  }
}

}  // namespace
}  // namespace rekindle::worker
