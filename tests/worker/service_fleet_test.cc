// Ranks that live on other hosts, as the coordinator tells of them; events; what is forgotten.
#include "tests/worker/service_fixture.h"

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
  // Rank 0 of two, the other one elsewhere.
  void commit(Raw& raw) {
    const auto session = raw.attach("i", 0, 2).session();
    raw.wait_complete();
    say(InstanceVerdict::State::kCommitted);
    ASSERT_TRUE(raw.answer(raw.say_loaded(session, kPayload)).has_committed());
  }
  // The answer that the coordinator gives now was heard.
  bool eventually_heard() {
    const auto words = host_->words()[0].sequence;
    return eventually([&] { return host_->words()[0].sequence > words + 2; });
  }
  bool eventually_said(RankReport::State state) {
    return eventually([&] {
      const auto words = host_->words();
      const auto mine = words.find(0);
      return mine != words.end() && mine->second.state == state;
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
  EXPECT_FALSE(host_->words()[0].why.empty());
  Raw again = greeted();
  const auto session = again.attach("i", 0, 2).session();
  EXPECT_TRUE(eventually_said(RankReport::State::kAttached));
  proto::WorkerFrame detach;
  detach.set_session(session);
  detach.mutable_detach();
  EXPECT_TRUE(again.answer(again.send(detach)).has_done());
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
  const auto words = host_->words();
  ASSERT_EQ(words.count(1), 1u);
  for (const auto& [rank, word] : words) EXPECT_EQ(word.version, 1u) << "rank " << rank;
  proto::WorkerFrame ping;
  ping.mutable_ping();
  EXPECT_TRUE(raw.answer(raw.send(ping)).has_pong());
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
  EXPECT_TRUE(eventually([&] { return !host_->words().empty(); }));
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
  const auto words = host_->words()[0].sequence;
  EXPECT_TRUE(eventually([&] { return host_->words()[0].sequence > words + 2; }));
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

TEST_F(WorkerServiceTest, EventsTellTheStoryOfAnInstance) {
  {
    Raw raw = greeted();
    const auto session = raw.attach("i").session();
    raw.wait_complete();
    ASSERT_TRUE(raw.answer(raw.say_loaded(session, kPayload)).has_committed());
  }
  EXPECT_TRUE(eventually([&] { return event_kinds().back() == "unfit"; }));
  const auto kinds = event_kinds();
  const std::vector<std::string> story{"attach",    "wire",  "install", "loaded",
                                       "committed", "ready", "failed",  "unfit"};
  EXPECT_EQ(kinds, story);
}

TEST(EventLogTest, KeepsTheNewestAndNumbersThemWithoutGaps) {
  boost::asio::io_context context;
  EventLog log(context.get_executor());
  EXPECT_TRUE(log.after(0, 10).empty());
  constexpr std::uint64_t kAll = EventLog::kMost + 100;
  for (std::uint64_t i = 1; i <= kAll; ++i) log.add({.kind = std::to_string(i)});
  EXPECT_EQ(log.last(), kAll);
  const auto first = log.after(0, 3);
  ASSERT_EQ(first.size(), 3u);
  EXPECT_EQ(first[0].number, 101u);
  EXPECT_EQ(first[0].kind, "101");
  EXPECT_EQ(log.after(first[2].number, 1).front().number, 104u);
  EXPECT_EQ(log.after(kAll - 1, 10).size(), 1u);
  EXPECT_TRUE(log.after(kAll, 10).empty());
  EXPECT_TRUE(log.after(kAll + 7, 10).empty());
}

class ForgetfulService : public WorkerServiceTest {
 protected:
  ForgetfulService() { options.forget_after = 200ms; }
};

TEST_F(ForgetfulService, ForgetsAnInstanceThatNobodyCameBackToAndNoOther) {
  Raw stays = greeted();
  (void)stays.attach("stays", 0, 2);
  {
    Raw raw = greeted();
    (void)raw.attach("i", 0, 2);
  }
  EXPECT_TRUE(eventually([&] { return event_kinds().back() == "forgotten"; }));
  EXPECT_NE(ready("/ready/i").body.find("no rank has attached"), std::string::npos);
  EXPECT_NE(ready("/ready/stays").body.find("LOADING"), std::string::npos)
      << ready("/ready/stays").body;
}

}  // namespace
}  // namespace rekindle::worker
