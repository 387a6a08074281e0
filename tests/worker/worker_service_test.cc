// The service behind a real socket. The test sends frames, also such as the library never sends.
#include "recovery/worker/worker_service.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "src/async/task.h"
#include "tests/worker/worker_service_fixture.h"

namespace rekindle::worker {
namespace {

using ::testing::HasSubstr;

TEST_F(WorkerServiceTest, HandsOverACommittedCopyForReadingOnly) {
  Raw raw = greeted();
  EXPECT_EQ(raw.descriptors.size(), 1u) << "the life page";
  const auto attached = raw.attach("");
  ASSERT_TRUE(attached.has_attached()) << attached.ShortDebugString();
  EXPECT_EQ(attached.attached().rung(), "local");
  ASSERT_EQ(raw.descriptors.size(), 1u);
  const int fd = raw.descriptors.front().get();
  EXPECT_EQ(::fcntl(fd, F_GETFL) & O_ACCMODE, O_RDONLY);
  const auto size = attached.attached().segment_bytes(0);
  EXPECT_EQ(::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), MAP_FAILED);
  raw.wait_complete();
  const auto committed = raw.answer(raw.say_loaded(attached.session(), kPayload));
  EXPECT_TRUE(committed.has_committed()) << committed.ShortDebugString();
  EXPECT_EQ(committed.committed().phases_size(), 6);
}

TEST_F(WorkerServiceTest, TilesAreToldOnceAndAllOfThemBeforeComplete) {
  Raw raw = greeted();
  const auto attached = raw.attach("");
  raw.wait_complete();
  std::uint64_t tiles = 0;
  for (const auto& event : raw.events) {
    ASSERT_EQ(event.session(), attached.session());
    for (int i = 0; i < event.ready().ready().begin_size(); ++i) {
      tiles += event.ready().ready().end(i) - event.ready().ready().begin(i);
    }
  }
  const auto stored = host_->store().find({"m", 1}).front();
  EXPECT_EQ(tiles, stored->manifest.checkpoint->tiles.tile_count());
  EXPECT_EQ(raw.events.back().ready().bytes_done(), kPayload);
}

TEST_F(WorkerServiceTest, WhoSaysNoHelloOrNonsenseIsCutOffAlone) {
  Raw fine = greeted();
  Raw rude(socket());
  EXPECT_TRUE(rude.ping().has_error());
  EXPECT_FALSE(rude.next());
  Raw garbage = greeted();
  garbage.send_bytes("\xff\xff\xff\xff");
  EXPECT_FALSE(garbage.next());
  EXPECT_TRUE(fine.ping().has_pong());
}

TEST_F(WorkerServiceTest, ALibraryMustSpeakTheProtocolOfTheAgent) {
  const auto answer_to = [&](std::uint32_t min, std::uint32_t max) {
    Raw library(socket());
    proto::WorkerFrame hello;
    hello.mutable_hello()->set_protocol_min(min);
    hello.mutable_hello()->set_protocol_max(max);
    hello.mutable_hello()->set_software("librekindle 9.8.7");
    return library.answer(library.send(hello));
  };
  EXPECT_EQ(answer_to(kProtocol, kProtocol).hello().protocol(), kProtocol);
  EXPECT_EQ(answer_to(kProtocol, kProtocol + 1).hello().protocol(), kProtocol) << "a newer one";
  const auto too_new = answer_to(kProtocol + 6, kProtocol + 8);
  EXPECT_EQ(too_new.error().code(), proto::STATUS_INVALID);
  EXPECT_THAT(too_new.error().message(),
              ::testing::AllOf(HasSubstr("(librekindle 9.8.7) speaks protocol 7..9"),
                               HasSubstr("speaks 1..1: upgrade its agent (rekindle ")));
}

TEST_F(WorkerServiceTest, OrdersThatContradictThemselvesAreRefused) {
  Raw raw = greeted();
  EXPECT_EQ(raw.attach("i", 2, 2).error().code(), proto::STATUS_INVALID);
  EXPECT_EQ(raw.attach("../i").error().code(), proto::STATUS_INVALID);
  EXPECT_EQ(raw.attach("", 0, 2).error().code(), proto::STATUS_INVALID);
  proto::WorkerFrame nameless;
  nameless.mutable_attach()->set_model("m@1");
  EXPECT_EQ(raw.answer(raw.send(nameless)).error().code(), proto::STATUS_INVALID);
  const auto nobody = raw.attach("", 0, 1, 9);
  EXPECT_EQ(nobody.error().code(), proto::STATUS_NOT_FOUND);
  EXPECT_NE(nobody.error().message().find("NO_SOURCE"), std::string::npos);
  EXPECT_TRUE(raw.answer(raw.send({})).has_error());
}

TEST_F(WorkerServiceTest, AnotherWorkersSessionIsNobodysBusiness) {
  Raw owner = greeted();
  const auto session = owner.attach("").session();
  owner.wait_complete();
  Raw thief = greeted();
  EXPECT_EQ(thief.answer(thief.say_loaded(session, kPayload)).error().code(), proto::STATUS_STALE);
  EXPECT_EQ(thief.detach(session).error().code(), proto::STATUS_STALE);
  EXPECT_TRUE(owner.answer(owner.say_loaded(session, kPayload)).has_committed());
}

// Found by the tampering test: after UNAVAILABLE a worker asked its ended session for ever.
TEST_F(WorkerServiceTest, WhoeverReadACopyThatSomebodyMayWriteToIsToldToAttachAgain) {
  Raw raw = greeted();
  const auto attached = raw.attach("");
  raw.wait_complete();
  const auto file = host_->store().find({"m", 1}).front()->segments.front()->path();
  const UniqueFd writer(::open(file.c_str(), O_RDWR | O_CLOEXEC));
  ASSERT_TRUE(writer);
  const auto refused = raw.answer(raw.say_loaded(attached.session(), kPayload));
  ASSERT_TRUE(refused.has_error()) << refused.ShortDebugString();
  EXPECT_EQ(refused.error().code(), proto::STATUS_STALE) << refused.error().message();
}

// A pull of m@2 that brings the bytes of m@1. The test decides when it commits.
class ArrivingCopyTest : public WorkerServiceTest {
 protected:
  void SetUp() override {
    WorkerServiceTest::SetUp();
    stored_ = host_->store().find({"m", 1}).front();
    host_->on_pull = [this](pull::PullWatch watch) -> LonelyHost::Pulled {
      const Manifest& manifest = stored_->manifest;
      TileSet all(manifest.checkpoint->tiles.tile_count());
      all.set_range(0, all.size());
      pull::Arriving arriving{manifest.checkpoint,
                              std::make_shared<const Layout>(manifest.layout),
                              std::make_shared<pull::VerifiedTiles>(all),
                              {stored_->segments.begin(), stored_->segments.end()},
                              {}};
      watch.on_begun(std::move(arriving));
      while (!commits_ && !co_await async::is_cancelled()) co_await async::sleep_for(5ms);
      co_return stored_;
    };
  }
  // Reads everything and says so. Returns the number of that call.
  std::uint64_t read_all(Raw& raw) {
    const auto attached = raw.attach("", 0, 1, 2);
    EXPECT_TRUE(attached.has_attached()) << attached.ShortDebugString();
    raw.wait_all_told();
    const auto loaded = raw.say_loaded(attached.session(), kPayload);
    (void)raw.ping();
    return loaded;
  }

  std::shared_ptr<const store::StoredVersion> stored_;
  std::atomic<bool> commits_ = false;
};

TEST_F(ArrivingCopyTest, AWorkerThatHasReadAllIsReadyAtTheCommit) {
  Raw raw = greeted();
  const auto loaded = read_all(raw);
  commits_ = true;
  EXPECT_TRUE(raw.answer(loaded).has_committed());
}

// Found by the tampering test: the commit noticed the writer after the worker was ready.
TEST_F(ArrivingCopyTest, B1AWorkerIsNotReadyIfSomebodyMayHaveWrittenToTheFilesBeforeTheCommit) {
  Raw raw = greeted();
  const auto loaded = read_all(raw);
  stored_->verification->doubt();  // as the commit does in that case
  commits_ = true;
  const auto refused = raw.answer(loaded);
  ASSERT_TRUE(refused.has_error()) << refused.ShortDebugString();
  EXPECT_EQ(refused.error().code(), proto::STATUS_STALE);
}

// The bytes are right again, but the worker may have read wrong ones in between.
TEST_F(WorkerServiceTest, AFileThatWasChangedWhileItWasReadCommitsNobodyUntilItAttachesAgain) {
  Raw raw = greeted();
  const auto attached = raw.attach("");
  raw.wait_complete();
  const auto file = host_->store().find({"m", 1}).front()->segments.front()->path();
  const std::string bytes = testing::read_file(file);
  {
    const UniqueFd fd(::open(file.c_str(), O_RDWR | O_CLOEXEC));
    ASSERT_TRUE(fd);
    ASSERT_EQ(::pwrite(fd.get(), bytes.data(), bytes.size(), 0),
              static_cast<ssize_t>(bytes.size()));
  }
  const auto refused = raw.answer(raw.say_loaded(attached.session(), kPayload));
  ASSERT_TRUE(refused.has_error()) << refused.ShortDebugString();
  EXPECT_EQ(refused.error().code(), proto::STATUS_STALE);
  EXPECT_EQ(refused.error().message(), "a file of m@1 was changed while it was read; attach again");
  const auto late = raw.answer(raw.say_loaded(attached.session(), kPayload));
  EXPECT_TRUE(late.has_error()) << late.ShortDebugString();

  raw.events.clear();
  const auto again = raw.attach("");
  ASSERT_TRUE(again.has_attached()) << again.ShortDebugString();
  raw.wait_complete();
  const auto committed = raw.answer(raw.say_loaded(again.session(), kPayload));
  EXPECT_TRUE(committed.has_committed()) << committed.ShortDebugString();
}

TEST_F(WorkerServiceTest, ABitThatFlippedWhileAWorkerReadIsNamedAndCommitsNobody) {
  Raw raw = greeted();
  const auto attached = raw.attach("");
  raw.wait_complete();
  const auto file = host_->store().find({"m", 1}).front()->segments.front()->path();
  {
    const UniqueFd fd(::open(file.c_str(), O_RDWR | O_CLOEXEC));
    ASSERT_TRUE(fd);
    const auto at = static_cast<off_t>(std::filesystem::file_size(file) - 5000);
    char byte = 0;
    ASSERT_EQ(::pread(fd.get(), &byte, 1, at), 1);
    byte = static_cast<char>(byte ^ 1);
    ASSERT_EQ(::pwrite(fd.get(), &byte, 1, at), 1);
  }
  const auto refused = raw.answer(raw.say_loaded(attached.session(), kPayload));
  ASSERT_TRUE(refused.has_error()) << refused.ShortDebugString();
  EXPECT_EQ(refused.error().code(), proto::STATUS_CORRUPT);
  EXPECT_NE(refused.error().message().find("m@1 does not verify here: tensor 'w'"),
            std::string::npos)
      << refused.error().message();
}

TEST_F(WorkerServiceTest, LoadedWithTooFewBytesIsRefusedAndChangesNothing) {
  Raw raw = greeted();
  const auto session = raw.attach("i").session();
  raw.wait_complete();
  EXPECT_EQ(raw.answer(raw.say_loaded(session, kPayload - 1)).error().code(),
            proto::STATUS_INVALID);
  EXPECT_EQ(ready("/ready/i").status, 503);
  EXPECT_TRUE(raw.answer(raw.say_loaded(session, kPayload)).has_committed());
  EXPECT_TRUE(eventually([&] { return ready("/ready/i").status == 200; }));
  EXPECT_TRUE(std::filesystem::exists(agent_ / "ready" / "i"));
}

TEST_F(WorkerServiceTest, ARankThatIsLostIsToldToThoseThatWaitAndMayComeBack) {
  Raw first = greeted();
  const auto one = first.attach("i", 0, 2).session();
  first.wait_complete();
  auto second = std::make_unique<Raw>(greeted());
  (void)second->attach("i", 1, 2);
  const auto waiting = first.say_loaded(one, kPayload);
  (void)first.ping();  // after the answer the call above waits
  second.reset();
  const auto refused = first.answer(waiting);
  EXPECT_EQ(refused.error().code(), proto::STATUS_UNAVAILABLE);
  EXPECT_NE(refused.error().message().find("rank 1"), std::string::npos);
  const auto again = first.say_loaded(one, kPayload);
  Raw third = greeted();
  const auto three = third.attach("i", 1, 2).session();
  third.wait_complete();
  EXPECT_TRUE(third.answer(third.say_loaded(three, kPayload)).has_committed());
  EXPECT_TRUE(first.answer(again).has_committed());
  EXPECT_TRUE(eventually([&] { return ready("/ready").status == 200; }));
}

TEST_F(WorkerServiceTest, AStagedSessionLeavesTheRankToTheOneThatServesUntilItSwitches) {
  const auto file = agent_ / "ready" / "i";
  Raw serving = greeted();
  const auto first = serving.attach("i").session();
  serving.wait_complete();
  ASSERT_TRUE(serving.answer(serving.say_loaded(first, kPayload)).has_committed());
  ASSERT_TRUE(eventually([&] { return std::filesystem::exists(file); }));
  Raw next = greeted();
  const auto staged = next.attach_staged("i", 1);
  ASSERT_TRUE(staged.has_attached()) << staged.ShortDebugString();
  next.wait_complete();
  EXPECT_TRUE(std::filesystem::exists(file)) << "the first one serves on";
  const auto early = next.answer(next.say_loaded(staged.session(), kPayload));
  EXPECT_EQ(early.error().code(), proto::STATUS_INVALID);
  EXPECT_NE(early.error().message().find("rk_begin_switch"), std::string::npos);
  EXPECT_TRUE(next.begin_switch(staged.session()).has_done());
  EXPECT_FALSE(std::filesystem::exists(file)) << "nothing serves while it is written";
  EXPECT_TRUE(next.begin_switch(staged.session()).has_done()) << "again is fine";
  const auto ended = serving.next();
  ASSERT_TRUE(ended);
  EXPECT_EQ(ended->error().code(), proto::STATUS_STALE);
  EXPECT_TRUE(next.answer(next.say_loaded(staged.session(), kPayload)).has_committed());
  EXPECT_TRUE(eventually([&] { return std::filesystem::exists(file); }));
}

TEST_F(WorkerServiceTest, AnInstanceOfOneRankSwitchesWithoutANewGeneration) {
  publish(2);
  Raw serving = greeted();
  const auto first = serving.attach("i").session();
  serving.wait_complete();
  ASSERT_TRUE(serving.answer(serving.say_loaded(first, kPayload)).has_committed());
  Raw next = greeted();
  const auto staged = next.attach_staged("i", 0, 2);
  ASSERT_TRUE(staged.has_attached()) << staged.ShortDebugString();
  next.wait_complete();
  const auto switched = next.begin_switch(staged.session());
  EXPECT_TRUE(switched.has_done()) << switched.ShortDebugString();
  EXPECT_TRUE(next.answer(next.say_loaded(staged.session(), kPayload)).has_committed());
}

TEST_F(WorkerServiceTest, AStagedSessionThatEndsChangesNothing) {
  const auto file = agent_ / "ready" / "i";
  Raw serving = greeted();
  const auto first = serving.attach("i").session();
  serving.wait_complete();
  ASSERT_TRUE(serving.answer(serving.say_loaded(first, kPayload)).has_committed());
  ASSERT_TRUE(eventually([&] { return std::filesystem::exists(file); }));
  {
    Raw next = greeted();
    ASSERT_TRUE(next.attach_staged("i", 1).has_attached());
  }
  Raw later = greeted();
  const auto staged = later.attach_staged("i", 1).session();
  EXPECT_TRUE(later.detach(staged).has_done());
  EXPECT_TRUE(std::filesystem::exists(file));
  EXPECT_TRUE(serving.ping().has_pong());
}

TEST_F(WorkerServiceTest, PhasesHaveKnownNames) {
  Raw raw = greeted();
  const auto session = raw.attach("").session();
  proto::WorkerFrame frame;
  frame.set_session(session);
  frame.mutable_phases()->add_phases()->set_name("apply");
  EXPECT_TRUE(raw.answer(raw.send(frame)).has_done());
  frame.mutable_phases()->add_phases()->set_name("lunch");
  const auto refused = raw.answer(raw.send(frame));
  EXPECT_EQ(refused.error().code(), proto::STATUS_INVALID);
  EXPECT_NE(refused.error().message().find("declare, copy"), std::string::npos);
}

TEST_F(WorkerServiceTest, PhasesHaveAllTheirBeginningsOrNone) {
  Raw raw = greeted();
  const auto session = raw.attach("").session();
  proto::WorkerFrame frame;
  frame.set_session(session);
  frame.mutable_phases()->add_phases()->set_name("copy");
  frame.mutable_phases()->add_phases()->set_name("apply");
  frame.mutable_phases()->add_ago_us(2000);
  const auto refused = raw.answer(raw.send(frame));
  EXPECT_EQ(refused.error().code(), proto::STATUS_INVALID);
  EXPECT_NE(refused.error().message().find("1 of 2 phases"), std::string::npos);
  frame.mutable_phases()->add_ago_us(1000);
  EXPECT_TRUE(raw.answer(raw.send(frame)).has_done());
  // More than a clock can count.
  frame.mutable_phases()->set_ago_us(1, ~std::uint64_t{0});
  EXPECT_EQ(raw.answer(raw.send(frame)).error().code(), proto::STATUS_INVALID);
}

TEST_F(WorkerServiceTest, AReplacedSessionHearsThatItIsStale) {
  Raw first = greeted();
  const auto one = first.attach("i").session();
  first.wait_complete();
  Raw second = greeted();
  ASSERT_TRUE(second.attach("i").has_attached());
  const auto event = first.next();
  ASSERT_TRUE(event);
  EXPECT_EQ(event->call(), 0u);
  EXPECT_EQ(event->session(), one);
  EXPECT_EQ(event->error().code(), proto::STATUS_STALE);
}

TEST_F(WorkerServiceTest, SegmentsThatAreMissingAreToldBeforeThePullEnds) {
  host_->on_pull = [this](pull::PullWatch watch) -> LonelyHost::Pulled {
    const auto stored = host_->store().find({"m", 1}).front();
    const auto& manifest = stored->manifest;
    watch.on_begun(
        {manifest.checkpoint, std::make_shared<const Layout>(manifest.layout), nullptr, {}});
    co_await async::sleep_for(1h);
    co_return fail(ErrorCode::kTimeout, "ended");
  };
  Raw raw = greeted();
  const auto refused = raw.attach("", 0, 1, 2);
  EXPECT_NE(refused.error().message().find("0 of 1 segments of m@2 are here"), std::string::npos)
      << refused.ShortDebugString();
}

TEST_F(WorkerServiceTest, AnAttachThatAnotherPullHeldUpSaysSo) {
  host_->on_pull = [](pull::PullWatch watch) -> LonelyHost::Pulled {
    watch.on_place_taken();
    co_return fail(ErrorCode::kUnavailable, "m@2 is filled by somebody else");
  };
  Raw raw = greeted();
  proto::WorkerFrame frame;
  frame.set_deadline_ms(300);
  frame.mutable_attach()->set_model("m");
  frame.mutable_attach()->set_version(2);
  const auto refused = raw.answer(raw.send(frame));
  EXPECT_EQ(refused.error().code(), proto::STATUS_TIMEOUT);
  EXPECT_NE(refused.error().message().find("filled by somebody else"), std::string::npos)
      << refused.ShortDebugString();
}

// The text of an error does not matter. Only the store knows that the place is taken.
TEST_F(WorkerServiceTest, B8AnotherFailureOfAPullIsToldAtOnce) {
  host_->on_pull = [](pull::PullWatch) -> LonelyHost::Pulled {
    co_return fail(ErrorCode::kUnavailable, "m@2 is already being written in x");
  };
  Raw raw = greeted();
  const auto refused = raw.attach("", 0, 1, 2);
  EXPECT_EQ(refused.error().code(), proto::STATUS_UNAVAILABLE) << refused.ShortDebugString();
}

TEST_F(WorkerServiceTest, APullKnowsTheDeviceOfTheWorkerThatWaitsForIt) {
  for (const char* device : {"GPU-6f2c", ""}) {
    Raw raw = greeted();
    EXPECT_TRUE(raw.attach("", 0, 1, 2, device).has_error());  // no host has it
    EXPECT_EQ(host_->last_request().devices, std::vector<std::string>{device});
  }
}

TEST_F(WorkerServiceTest, S7WhoKeepsItsDescriptorAfterTheCommitChangesNothing) {
  Raw raw = greeted();
  const auto begun = raw.begin_publish(100'000);
  ASSERT_TRUE(begun.has_publish_begun()) << begun.ShortDebugString();
  ASSERT_EQ(raw.descriptors.size(), 1u);
  const UniqueFd kept = std::move(raw.descriptors[0]);
  ASSERT_TRUE(raw.commit_publish(begun.session()).has_published());
  const auto stored = host_->store().find({"m", 5}).front();
  const auto served = stored->array(stored->manifest.layout.entries()[0]);
  const std::vector<std::byte> before(served.begin(), served.end());
  const std::string wrong(100'000, 'w');
  ASSERT_EQ(::pwrite(kept.get(), wrong.data(), wrong.size(), 100'000), 100'000);
  EXPECT_TRUE(std::equal(before.begin(), before.end(), served.begin()));
  EXPECT_EQ(stored->verification->state(), store::CopyState::kVerified);
}

TEST_F(WorkerServiceTest, OnlySoManyPublicationsOfOneWorkerAreUnderWay) {
  Raw raw = greeted();
  std::uint64_t last = 0;
  for (int i = 0; i < 4; ++i) {
    const auto begun = raw.begin_publish();
    ASSERT_TRUE(begun.has_publish_begun()) << begun.ShortDebugString();
    last = begun.session();
  }
  EXPECT_EQ(raw.begin_publish().error().code(), proto::STATUS_EXHAUSTED);
  EXPECT_TRUE(raw.abandon_publish(last).has_done());
  EXPECT_TRUE(raw.begin_publish().has_publish_begun());
}

// Holds a thread of a pool from its turn until it is let go.
class Held {
 public:
  explicit Held(WorkerPool& pool) {
    pool.submit([this] {
      held_.set_value();
      (void)over_.get_future().wait_for(20s);
      left_.set_value();
    });
  }
  ~Held() {
    let_go();
    left_.get_future().wait();
  }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  bool wait() { return held_.get_future().wait_for(20s) == std::future_status::ready; }
  void let_go() {
    if (!std::exchange(gone_, true)) over_.set_value();
  }

 private:
  bool gone_ = false;
  std::promise<void> held_;
  std::promise<void> over_;
  std::promise<void> left_;
};

TEST_F(WorkerServiceTest, EarlyDigestsOfManyPublicationsLetOtherWorkThrough) {
  std::promise<bool> last_is_sealed;
  std::promise<bool> first_is_sealed;
  std::deque<std::promise<bool>*> asked{&last_is_sealed, &first_is_sealed};
  host_->on_publish = [&](const store::FilledSegments& filled) {
    asked.front()->set_value(filled.seal_of(0) != nullptr);
    asked.pop_front();
  };
  Raw raw = greeted();
  std::vector<std::uint64_t> publications;
  for (int i = 0; i < 3; ++i) publications.push_back(raw.begin_publish().session());
  raw.descriptors.clear();
  // All threads of the pool are busy when the trainers have written.
  auto one = std::make_unique<Held>(host_->blocking_pool());
  auto two = std::make_unique<Held>(host_->blocking_pool());
  ASSERT_TRUE(one->wait() && two->wait());
  for (const auto publication : publications) {
    ASSERT_TRUE(raw.say_written(publication, 0).has_done());
  }
  (void)raw.ping();
  auto other_work = std::make_unique<Held>(host_->blocking_pool());
  one->let_go();
  ASSERT_TRUE(other_work->wait());
  // It runs, and has not waited for the digests of all publications.
  const auto commit = raw.ask_commit_publish(publications.back());
  auto is_sealed = last_is_sealed.get_future();
  ASSERT_EQ(is_sealed.wait_for(20s), std::future_status::ready);
  EXPECT_FALSE(is_sealed.get());
  other_work.reset();
  two.reset();
  EXPECT_TRUE(raw.answer(commit).has_published());
  (void)raw.commit_publish(publications.front());
  EXPECT_TRUE(first_is_sealed.get_future().get()) << "its turn came before the other work";
}

TEST_F(WorkerServiceTest, OnlyOwnSessionsAreWatchedAndSpecsHaveASize) {
  Raw raw = greeted();
  EXPECT_EQ(raw.watch(4711, 1).error().code(), proto::STATUS_STALE);
  proto::WorkerFrame big;
  big.mutable_attach()->set_model("m");
  big.mutable_attach()->set_version(1);
  big.mutable_attach()->set_spec_json(std::string((1 << 20) + 1, ' '));
  EXPECT_EQ(raw.answer(raw.send(big)).error().code(), proto::STATUS_INVALID);
}

TEST_F(WorkerServiceTest, AnAbandonedPublicationLeavesNothing) {
  Raw raw = greeted();
  const auto begun = raw.begin_publish();
  ASSERT_TRUE(begun.has_publish_begun()) << begun.ShortDebugString();
  EXPECT_EQ(raw.descriptors.size(), 1u);
  EXPECT_FALSE(std::filesystem::is_empty(agent_ / "publish"));
  EXPECT_TRUE(raw.abandon_publish(begun.session()).has_done());
  EXPECT_TRUE(std::filesystem::is_empty(agent_ / "publish"));
  EXPECT_EQ(raw.commit_publish(begun.session()).error().code(), proto::STATUS_STALE);
  auto dying = std::make_unique<Raw>(greeted());
  ASSERT_TRUE(dying->begin_publish().has_publish_begun());
  dying.reset();
  EXPECT_TRUE(eventually([&] { return std::filesystem::is_empty(agent_ / "publish"); }));
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
