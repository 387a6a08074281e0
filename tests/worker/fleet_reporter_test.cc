// Instances whose ranks live on several hosts: reports to the coordinator, and its verdicts.
#include "tests/worker/worker_service_fixture.h"

namespace rekindle::worker {
namespace {

class SpanningInstance : public WorkerServiceTest {
 protected:
  SpanningInstance() { options.hear_ranks = 1h; }
  void SetUp() override {
    WorkerServiceTest::SetUp();
    host_->fleet = true;
    say(InstanceVerdict::State::kLoading);
  }
  void say(InstanceVerdict::State state, std::string why = {}, std::uint64_t version = 1,
           std::uint64_t term = 1) {
    host_->answer(InstanceVerdict{{"m", version}, state, std::move(why), term});
  }
  static proto::WorkerFrame latest() {
    proto::WorkerFrame frame;
    auto& attach = *frame.mutable_attach();
    attach.set_model("m");
    attach.set_latest(true);
    attach.set_instance("i");
    attach.set_world(2);
    return frame;
  }
  // Commits rank 0 of two ranks. The other rank lives elsewhere.
  void commit(Raw& raw) {
    const auto session = raw.attach("i", 0, 2).session();
    raw.wait_complete();
    say(InstanceVerdict::State::kCommitted);
    ASSERT_TRUE(raw.answer(raw.say_loaded(session, kPayload)).has_committed());
  }
  // Waits until the service has heard the coordinator's present answer.
  bool eventually_heard() {
    const auto reports = host_->reports()[0].sequence;
    return eventually([&] { return host_->reports()[0].sequence > reports + 2; });
  }
  bool eventually_said(RankReport::State state) {
    return eventually([&] {
      const auto reports = host_->reports();
      const auto mine = reports.find(0);
      return mine != reports.end() && mine->second.state == state;
    });
  }
};

TEST_F(SpanningInstance, CommitsOnTheCoordinatorsWordAndIsUnfitOnIt) {
  Raw raw = greeted();
  const auto session = raw.attach("i", 0, 2).session();
  EXPECT_TRUE(eventually_said(RankReport::State::kAttached));
  raw.wait_complete();
  const auto waiting = raw.say_loaded(session, kPayload);
  EXPECT_TRUE(eventually_said(RankReport::State::kLoaded));
  EXPECT_EQ(ready("/ready/i").status, 503);
  say(InstanceVerdict::State::kCommitted);
  EXPECT_TRUE(raw.answer(waiting).has_committed());
  EXPECT_TRUE(eventually([&] { return ready("/ready/i").status == 200; }));

  say(InstanceVerdict::State::kUnfit, "rank 1 on b: the node died");
  EXPECT_TRUE(eventually([&] { return ready("/ready/i").status == 503; }));
  EXPECT_NE(ready("/ready/i").body.find("rank 1 on b: the node died"), std::string::npos);
  EXPECT_FALSE(std::filesystem::exists(agent_ / "ready" / "i"));

  say(InstanceVerdict::State::kCommitted);
  EXPECT_TRUE(eventually([&] { return ready("/ready/i").status == 200; }))
      << "this rank has not to load again";
}

TEST_F(SpanningInstance, IsNotReadyWhileARankElsewhereLoadsAnew) {
  Raw raw = greeted();
  commit(raw);
  EXPECT_TRUE(eventually([&] { return ready("/ready/i").status == 200; }));
  say(InstanceVerdict::State::kLoading);
  EXPECT_TRUE(eventually([&] { return ready("/ready/i").status == 503; }));
  EXPECT_FALSE(std::filesystem::exists(agent_ / "ready" / "i"));
  EXPECT_NE(ready("/ready/i").body.find("another host"), std::string::npos)
      << ready("/ready/i").body;
  say(InstanceVerdict::State::kCommitted);
  EXPECT_TRUE(eventually([&] { return ready("/ready/i").status == 200; }));
}

TEST_F(SpanningInstance, StaysReadyWhileANewCoordinatorHasNotHeardOfAllRanks) {
  Raw raw = greeted();
  commit(raw);
  EXPECT_TRUE(eventually([&] { return ready("/ready/i").status == 200; }));
  say(InstanceVerdict::State::kLoading, "", 1, 2);
  EXPECT_TRUE(eventually_heard());
  EXPECT_EQ(ready("/ready/i").status, 200);
  say(InstanceVerdict::State::kCommitted, "", 1, 2);
  EXPECT_TRUE(eventually_heard());
  say(InstanceVerdict::State::kLoading, "", 1, 2);
  EXPECT_TRUE(eventually([&] { return ready("/ready/i").status == 503; }))
      << "by now it has heard of all";
}

class ImpatientService : public SpanningInstance {
 protected:
  ImpatientService() { options.hear_ranks = 50ms; }
};

TEST_F(ImpatientService, IsNotReadyWhenANewCoordinatorNeverHearsOfItsOtherRanks) {
  Raw raw = greeted();
  commit(raw);
  say(InstanceVerdict::State::kLoading, "", 1, 2);
  EXPECT_TRUE(eventually([&] { return ready("/ready/i").status == 503; }));
}

TEST_F(SpanningInstance, TellsWhyARankFailedAndThatOneHasLeft) {
  auto raw = std::make_unique<Raw>(greeted());
  (void)raw->attach("i", 0, 2);
  raw.reset();
  EXPECT_TRUE(eventually_said(RankReport::State::kFailed));
  EXPECT_FALSE(host_->reports()[0].why.empty());
  Raw again = greeted();
  const auto session = again.attach("i", 0, 2).session();
  EXPECT_TRUE(eventually_said(RankReport::State::kAttached));
  EXPECT_TRUE(again.detach(session).has_done());
  EXPECT_TRUE(eventually_said(RankReport::State::kGone));
}

TEST_F(SpanningInstance, ThatIsAtAnotherVersionElsewhereEndsItsSessionsHere) {
  Raw raw = greeted();
  const auto session = raw.attach("i", 0, 2).session();
  raw.wait_complete();
  say(InstanceVerdict::State::kLoading, "", 2);
  while (true) {
    const auto event = raw.next();
    ASSERT_TRUE(event) << "the connection ended";
    if (event->session() != session || !event->has_error()) continue;
    EXPECT_EQ(event->error().code(), proto::STATUS_STALE);
    break;
  }
}

TEST_F(SpanningInstance, ARankThatWantsAnotherVersionIsRefusedAlone) {
  Raw raw = greeted();
  const auto session = raw.attach("i", 0, 3).session();
  raw.wait_complete();
  EXPECT_TRUE(eventually_said(RankReport::State::kAttached));
  Raw wrong = greeted();
  EXPECT_EQ(wrong.attach("i", 1, 3, 2).error().code(), proto::STATUS_INVALID);
  EXPECT_TRUE(eventually_heard());
  const auto reports = host_->reports();
  ASSERT_EQ(reports.count(1), 1u);
  for (const auto& [rank, report] : reports) EXPECT_EQ(report.version, 1u) << "rank " << rank;
  EXPECT_TRUE(raw.ping().has_pong());
  EXPECT_EQ(raw.answer(raw.say_loaded(session, kPayload - 1)).error().code(), proto::STATUS_INVALID)
      << "its session lives";
}

TEST_F(SpanningInstance, ARankThatTheCoordinatorRefusesIsRefusedAlone) {
  host_->refuse_rank = 1;
  Raw raw = greeted();
  const auto session = raw.attach("i", 0, 3).session();
  raw.wait_complete();
  Raw wrong = greeted();
  for (auto frame = wrong.attach("i", 1, 3); !frame.has_error();) {
    const auto event = wrong.next();
    ASSERT_TRUE(event) << "the connection ended";
    frame = *event;
  }
  EXPECT_EQ(raw.answer(raw.say_loaded(session, kPayload - 1)).error().code(), proto::STATUS_INVALID)
      << "its session lives";
}

TEST_F(SpanningInstance, LatestWaitsForACoordinatorThatHasJustStarted) {
  host_->answer(fail(ErrorCode::kUnavailable, "the coordinator has just started; retry"));
  Raw raw = greeted();
  const auto call = raw.send(latest());
  EXPECT_TRUE(eventually([&] { return !host_->reports().empty(); }));
  EXPECT_TRUE(eventually_heard());
  say(InstanceVerdict::State::kLoading, "", 2);
  EXPECT_NE(raw.answer(call).error().message().find("m@2"), std::string::npos)
      << "not m@1, which is here";
}

TEST_F(SpanningInstance, LatestIsThisHostsWhenTheCoordinatorIsAway) {
  host_->answer(fail(ErrorCode::kPeerLost, "away"));
  Raw raw = greeted();
  EXPECT_EQ(raw.answer(raw.send(latest())).attached().id().version(), 1u);
}

TEST_F(SpanningInstance, ThatTheCoordinatorRefusesIsNotServed) {
  Raw raw = greeted();
  (void)raw.attach("i", 0, 2);
  raw.wait_complete();
  host_->answer(fail(ErrorCode::kDenied, "rank 0 lives on b"));
  while (true) {
    const auto event = raw.next();
    ASSERT_TRUE(event) << "the connection ended";
    if (!event->has_error()) continue;
    EXPECT_EQ(event->error().code(), proto::STATUS_DENIED);
    break;
  }
}

TEST_F(SpanningInstance, ACoordinatorThatIsAwayChangesNothingForThoseThatAreReady) {
  Raw raw = greeted();
  const auto session = raw.attach("i", 0, 2).session();
  raw.wait_complete();
  say(InstanceVerdict::State::kCommitted);
  ASSERT_TRUE(raw.answer(raw.say_loaded(session, kPayload)).has_committed());
  host_->answer(fail(ErrorCode::kUnavailable, "away"));
  const auto reports = host_->reports()[0].sequence;
  EXPECT_TRUE(eventually([&] { return host_->reports()[0].sequence > reports + 2; }));
  EXPECT_EQ(ready("/ready/i").status, 200);
}

TEST_F(SpanningInstance, AllOfWhoseRanksAreHereNeedsNobody) {
  host_->answer(fail(ErrorCode::kUnavailable, "away"));
  Raw first = greeted();
  Raw second = greeted();
  const auto one = first.attach("i", 0, 2).session();
  const auto two = second.attach("i", 1, 2).session();
  first.wait_complete();
  second.wait_complete();
  const auto waiting = first.say_loaded(one, kPayload);
  EXPECT_TRUE(second.answer(second.say_loaded(two, kPayload)).has_committed());
  EXPECT_TRUE(first.answer(waiting).has_committed());
}

}  // namespace
}  // namespace rekindle::worker
