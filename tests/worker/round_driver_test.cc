// Workers of a group: rounds against attaches, watches and events of the device process.
#include <fcntl.h>
#include <unistd.h>

#include <boost/asio/post.hpp>
#include <gmock/gmock.h>

#include "src/base/unique_fd.h"
#include "tests/worker/worker_service_fixture.h"

namespace rekindle::worker {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;

constexpr std::uint64_t kDrivenRound = 100;

class WorkerRoundsTest : public WorkerServiceTest {
 protected:
  // Attaches a first member, so that this agent asks for orders.
  void SetUp() override {
    WorkerServiceTest::SetUp();
    host_->fleet = true;
    host_->has_device = true;
    first_ = std::make_unique<Raw>(greeted());
    session_ = attach(*first_, "i", 1).session();
    first_->wait_complete();
    ASSERT_TRUE(eventually([&] { return host_->last_report().members_size() == 1; }));
  }
  static proto::AgentFrame attach(Raw& raw, const std::string& instance,
                                  std::optional<std::uint64_t> version) {
    proto::WorkerFrame frame;
    auto& attach = *frame.mutable_attach();
    attach.set_model("m");
    attach.set_latest(!version);
    attach.set_version(version.value_or(0));
    attach.set_instance(instance);
    attach.set_world(1);
    attach.set_device("double:0");
    attach.set_group("g");
    return raw.answer(raw.send(frame));
  }
  proto::RoundOrder round(bool gathering) const {
    proto::RoundOrder order;
    order.set_round(kDrivenRound);
    order.mutable_id()->set_model("m");
    order.mutable_id()->set_version(2);
    order.set_group("g");
    order.set_gathering(gathering);
    return order;
  }
  void order_party(std::uint64_t session, proto::PartyState state, bool fetch = false) {
    proto::RoundOrder order = round(false);
    auto& party = *order.add_parties();
    party.set_party(1);
    party.set_state(state);
    party.set_why("rank 0 of i on b: died");
    party.add_members()->set_session(session);
    party.set_ranks(1);
    party.set_owners_fetch(fetch);
    if (fetch) party.add_owners(0);
    host_->order(order);
  }
  // Pulls of m@2 have their place and fetch nothing.
  void arrive_without_bytes() {
    host_->on_pull = [this](pull::PullWatch watch) -> LonelyHost::Pulled {
      const auto stored = host_->store().find({"m", 1}).front();
      const auto& manifest = stored->manifest;
      std::filesystem::create_directories(dir_ / "arriving");
      std::vector<std::shared_ptr<const store::MappedSegment>> segments;
      for (const auto& segment : manifest.layout.segments()) {
        const auto file = dir_ / "arriving" / segment.name;
        std::filesystem::copy_file(stored->directory / segment.name, file,
                                   std::filesystem::copy_options::overwrite_existing);
        segments.push_back(*store::MappedSegment::open_read(file, segment.size_bytes));
      }
      const auto none =
          std::make_shared<pull::VerifiedTiles>(TileSet(manifest.checkpoint->tiles.tile_count()));
      auto layout = std::make_shared<const Layout>(manifest.layout);
      pull::Arriving arriving{manifest.checkpoint, std::move(layout), none, std::move(segments),
                              placing_};
      watch.on_begun(std::move(arriving));
      while ((placing_->busy() || watch.held()) && !co_await async::is_cancelled()) {
        held_ = true;
        co_await async::sleep_for(5ms);
      }
      landed_ = placing_->close();
      released_ = true;
      while (!co_await async::is_cancelled()) co_await async::sleep_for(50ms);
      co_return fail(ErrorCode::kUnavailable, "ended");
    };
  }
  // Sends an event of the device process.
  void say(const std::function<void(device::DeviceEvents&)>& word) {
    std::promise<void> said;
    boost::asio::post(context_, [&] {
      word(*service_);
      said.set_value();
    });
    said.get_future().get();
  }
  void say_joined(std::uint64_t session) {
    say([&](device::DeviceEvents& events) {
      events.device_joined({session, 64, {3, 4}, kPayload, {}});
    });
  }
  void say_spread(std::uint64_t session, std::optional<Error> error = std::nullopt) {
    say([&](device::DeviceEvents& events) {
      device::SpreadOver over;
      over.session = session;
      over.error = error;
      events.spread_over(over);
    });
  }
  proto::RoundMember member(std::uint64_t session) {
    const auto report = host_->last_report();
    for (const auto& member : report.members()) {
      if (member.session() == session) return member;
    }
    return {};
  }
  bool becomes(std::uint64_t session, proto::RoundMemberState state) {
    return eventually([&] { return member(session).state() == state; });
  }
  // Returns the version that the first member hears of.
  std::uint64_t told_of_new_version() {
    return first_->watch(session_, 1).new_version().id().version();
  }
  // A round gathers, and a session joins it. Its host lacks the version.
  std::uint64_t join(Raw& raw) {
    arrive_without_bytes();
    host_->order(round(true));
    EXPECT_EQ(told_of_new_version(), 2u);
    const auto attached = attach(raw, "j", std::nullopt);
    EXPECT_TRUE(attached.attached().device_channel()) << attached.ShortDebugString();
    EXPECT_TRUE(host_->device_orders.back().in_round);
    say_joined(attached.session());
    EXPECT_TRUE(becomes(attached.session(), proto::ROUND_JOINED));
    return attached.session();
  }

  std::unique_ptr<Raw> first_;
  std::uint64_t session_ = 0;
  const std::shared_ptr<pull::Placing> placing_ = std::make_shared<pull::Placing>();
  pull::Placing::TileRuns landed_;  // once released_
  std::atomic<bool> held_ = false;
  std::atomic<bool> released_ = false;
};

TEST_F(WorkerRoundsTest, WithoutARoundAMemberIsServedAsAlways) {
  EXPECT_FALSE(host_->device_orders.back().in_round);
  EXPECT_EQ(member(session_).state(), proto::ROUND_SERVING);
  EXPECT_EQ(member(session_).instance(), "i");
  EXPECT_EQ(member(session_).group(), "g");
  EXPECT_EQ(member(session_).device(), "double:0");
  EXPECT_TRUE(first_->answer(first_->say_loaded(session_, kPayload)).has_committed());
}

TEST_F(WorkerRoundsTest, WhatTheRoundBringsIsNotFetchedAndMakesTheWorkerReady) {
  Raw raw = greeted();
  const auto session = join(raw);
  EXPECT_TRUE(eventually([&] { return held_.load(); }));
  order_party(session, proto::PARTY_SPREADING);
  EXPECT_TRUE(eventually([&] { return host_->spreading == session; }));
  EXPECT_TRUE(becomes(session, proto::ROUND_SPREADING));
  EXPECT_FALSE(released_);
  const auto early = raw.say_loaded(session, kPayload);  // overtakes the device process
  (void)raw.ping();
  EXPECT_EQ(member(session).state(), proto::ROUND_SPREADING);
  say_spread(session);
  EXPECT_TRUE(raw.answer(early).has_committed());
  EXPECT_TRUE(becomes(session, proto::ROUND_READY));
  EXPECT_TRUE(eventually([&] { return released_.load(); })) << "now the copy is completed";
  const auto kinds = event_kinds();
  EXPECT_THAT(kinds, Contains("joined"));
  EXPECT_THAT(kinds, Contains("spreading"));
  EXPECT_THAT(kinds, Contains("spread"));
}

TEST_F(WorkerRoundsTest, Row40APartyThatIsStoppedLeavesTheRestToTheHost) {
  Raw raw = greeted();
  const auto session = join(raw);
  order_party(session, proto::PARTY_SPREADING);
  EXPECT_TRUE(becomes(session, proto::ROUND_SPREADING));
  order_party(session, proto::PARTY_STOPPED);
  EXPECT_TRUE(eventually([&] { return host_->stopped == session; }));
  EXPECT_TRUE(becomes(session, proto::ROUND_ALONE));
  EXPECT_EQ(member(session).why(), "rank 0 of i on b: died");
  say_spread(session, Error(ErrorCode::kStale, "it was stopped"));
  EXPECT_TRUE(eventually([&] { return released_.load(); }));
  // The rest came from segments. Only the device process knows that the worker has every byte.
  const auto loaded = raw.say_loaded(session, kPayload);
  say([&](device::DeviceEvents& events) { events.device_over({.session = session}); });
  EXPECT_TRUE(raw.answer(loaded).has_committed());
}

TEST_F(WorkerRoundsTest, B1AnUploadOfACopyThatHasChangedMeanwhileIsNotCommitted) {
  publish(2);
  host_->order(round(true));
  EXPECT_EQ(told_of_new_version(), 2u);
  Raw raw = greeted();
  const auto attached = attach(raw, "j", std::nullopt);
  ASSERT_TRUE(attached.attached().device_channel()) << attached.ShortDebugString();
  ASSERT_TRUE(host_->device_orders.back().in_round);
  const auto session = attached.session();
  say_joined(session);
  EXPECT_TRUE(becomes(session, proto::ROUND_JOINED));
  order_party(session, proto::PARTY_STOPPED);
  EXPECT_TRUE(becomes(session, proto::ROUND_ALONE));
  const auto stored = host_->store().find({"m", 2}).front();
  const UniqueFd fd(::open(stored->segments[0]->path().c_str(), O_WRONLY | O_CLOEXEC));
  ASSERT_EQ(::pwrite(fd.get(), "wrong", 5, 8192), 5);
  say([&](device::DeviceEvents& events) { events.device_over({.session = session}); });
  const auto answer = raw.answer(raw.say_loaded(session, kPayload));
  EXPECT_TRUE(answer.has_error()) << answer.ShortDebugString();
}

TEST_F(WorkerRoundsTest, AWordOfHavingLoadedThatDoesNotComeTrueIsRefused) {
  Raw raw = greeted();
  const auto session = join(raw);
  const auto early = raw.say_loaded(session, kPayload);
  say([&](device::DeviceEvents& events) {
    events.device_over({.session = session, .error = Error(ErrorCode::kPeerLost, "it died")});
  });
  EXPECT_EQ(raw.answer(early).error().code(), proto::STATUS_INVALID);
  EXPECT_TRUE(becomes(session, proto::ROUND_ALONE));
}

TEST_F(WorkerRoundsTest, WhoKnowsNoRoundIsNotHeldUpByOne) {
  Raw raw = greeted();
  const auto session = join(raw);
  EXPECT_TRUE(eventually([&] { return held_.load(); }));
  EXPECT_FALSE(released_);
  Raw other = greeted();
  EXPECT_TRUE(other.attach("k", 0, 1, 2).has_attached());
  EXPECT_TRUE(eventually([&] { return released_.load(); }));
  EXPECT_EQ(member(session).state(), proto::ROUND_JOINED) << "its round goes on";
}

TEST_F(WorkerRoundsTest, Row40WhatADeviceWritesIsNotFetchedBesideUntilItHasEnded) {
  Raw raw = greeted();
  const auto session = join(raw);
  order_party(session, proto::PARTY_SPREADING);
  EXPECT_TRUE(eventually([&] { return host_->spreading == session; }));
  EXPECT_EQ(host_->keeping, 1u);
  order_party(session, proto::PARTY_STOPPED);
  EXPECT_TRUE(becomes(session, proto::ROUND_ALONE));
  Raw other = greeted();
  EXPECT_TRUE(other.attach("k", 0, 1, 2).has_attached());
  const auto seen = host_->last_report().sequence();
  ASSERT_TRUE(eventually([&] { return host_->last_report().sequence() > seen + 5; }));
  EXPECT_FALSE(released_) << "the device has not said that it writes no more";
  device::SpreadOver over;
  over.session = session;
  over.error = Error(ErrorCode::kStale, "it was stopped");
  over.kept = {{0, 1, 2, 2}};
  over.kept_bytes = 77;
  say([&](device::DeviceEvents& events) { events.spread_over(over); });
  ASSERT_TRUE(eventually([&] { return released_.load(); }));
  EXPECT_EQ(landed_, (pull::Placing::TileRuns{{0, 1}}));
  EXPECT_TRUE(eventually([&] { return member(session).kept_bytes() == 77; }));
}

TEST_F(WorkerRoundsTest, AnOwnersShareIsFetchedAlthoughTheRestWaits) {
  Raw raw = greeted();
  const auto session = join(raw);
  EXPECT_TRUE(member(session).fetches());
  order_party(session, proto::PARTY_SPREADING, true);
  EXPECT_TRUE(eventually([&] { return host_->spreading == session; }));
  EXPECT_EQ(host_->fetching, 1u);
  EXPECT_EQ(host_->keeping, 1u) << "the shares of others";
  std::vector<pull::Placing::TileRuns> wanted;
  say([&](device::DeviceEvents& events) {
    EXPECT_FALSE(placing_->wants_now());
    events.share_wanted({session, {{0, 1}, {2, 3}}});
    wanted = placing_->take_wanted_now();
  });
  EXPECT_EQ(wanted, (std::vector<pull::Placing::TileRuns>{{{0, 1}, {2, 3}}}));
  EXPECT_FALSE(released_) << "the rest is to come by the round";
  say_spread(session);
  EXPECT_TRUE(eventually([&] { return released_.load(); }));
}

TEST_F(WorkerRoundsTest, Row40AShareOfACopyThatIsFetchedWhollyIsNotAskedForAgain) {
  Raw raw = greeted();
  const auto session = join(raw);
  Raw other = greeted();
  EXPECT_TRUE(other.attach("k", 0, 1, 2).has_attached());
  EXPECT_TRUE(eventually([&] { return released_.load(); }));
  order_party(session, proto::PARTY_SPREADING, true);
  EXPECT_TRUE(eventually([&] { return host_->spreading == session; }));
  say([&](device::DeviceEvents& events) { events.share_wanted({session, {{0, 1}}}); });
  EXPECT_FALSE(placing_->wants_now()) << "all of it comes anyway";
}

TEST_F(WorkerRoundsTest, WhatIsBeingFetchedIsNotWrittenByADeviceBeside) {
  Raw raw = greeted();
  const auto session = join(raw);
  Raw other = greeted();
  EXPECT_TRUE(other.attach("k", 0, 1, 2).has_attached());
  EXPECT_TRUE(eventually([&] { return released_.load(); }));
  order_party(session, proto::PARTY_SPREADING);
  EXPECT_TRUE(eventually([&] { return host_->spreading == session; }));
  EXPECT_EQ(host_->keeping, 0u);
}

TEST_F(WorkerRoundsTest, Row39AWorkerThatDiesAmidTheSpreadStaysAMemberUntilItIsOver) {
  auto raw = std::make_unique<Raw>(greeted());
  const auto session = join(*raw);
  order_party(session, proto::PARTY_SPREADING);
  EXPECT_TRUE(becomes(session, proto::ROUND_SPREADING));
  raw.reset();
  EXPECT_TRUE(eventually([&] { return member(session).worker_lost(); }));
  EXPECT_EQ(host_->device_ended, session);
  EXPECT_EQ(member(session).state(), proto::ROUND_SPREADING);
  say_spread(session);
  EXPECT_TRUE(eventually([&] { return host_->has_reported(session, proto::ROUND_FAILED); }));
  EXPECT_TRUE(eventually([&] { return released_.load(); })) << "nobody waits for the round";
}

TEST_F(WorkerRoundsTest, Row40WhatItsDeviceHasDiscardedIsFetched) {
  Raw raw = greeted();
  const auto session = join(raw);
  order_party(session, proto::PARTY_SPREADING);
  EXPECT_TRUE(becomes(session, proto::ROUND_SPREADING));
  say([&](device::DeviceEvents& events) {
    device::SpreadOver over;
    over.session = session;
    over.worker_lost = Error(ErrorCode::kTimeout, "it hangs");
    events.spread_over(over);
  });
  EXPECT_TRUE(becomes(session, proto::ROUND_FAILED));
  EXPECT_TRUE(member(session).worker_lost());
  EXPECT_EQ(member(session).spread_bytes(), 0u);
  EXPECT_TRUE(eventually([&] { return released_.load(); }));
}

TEST_F(WorkerRoundsTest, ARoundThatTheCoordinatorLostReleasesItsMembers) {
  Raw raw = greeted();
  const auto session = join(raw);
  host_->order({});
  EXPECT_TRUE(eventually([&] { return host_->stopped == session; }));
  EXPECT_TRUE(eventually([&] { return released_.load(); }));
  EXPECT_TRUE(becomes(session, proto::ROUND_SERVING));
  EXPECT_EQ(member(session).id().version(), 0u) << "until its commit";
}

class WorkerUpdateTest : public WorkerServiceTest {
 protected:
  static proto::WorkerFrame update(std::uint64_t version) {
    proto::WorkerFrame frame;
    frame.mutable_update()->mutable_id()->set_model("m");
    frame.mutable_update()->mutable_id()->set_version(version);
    frame.mutable_update()->set_group("g");
    return frame;
  }
};

TEST_F(WorkerUpdateTest, IsAnsweredWhenTheRoundIsOver) {
  host_->fleet = true;
  proto::RoundStatus status;
  status.set_phase("spreading");
  status.set_elapsed_ms(510);
  for (int rank = 0; rank < 3; ++rank) {
    auto& member = *status.add_members();
    member.set_node_id("b");
    member.set_instance("i");
    member.set_rank(static_cast<std::uint32_t>(rank));
    member.set_state("ready");
    member.set_bytes(10);
    member.set_spread_bytes(rank == 0 ? 10 : 9);
  }
  status.mutable_members(2)->set_state("failed");
  status.mutable_members(2)->set_why("died");
  host_->show(status);
  Raw raw = greeted();
  const auto call = raw.send(update(2));
  (void)raw.ping();
  EXPECT_TRUE(raw.events.empty()) << "it is not over";
  status.set_phase("over");
  host_->show(status);
  const auto answer = raw.answer(call).updated();
  EXPECT_EQ(answer.members(), 3u);
  EXPECT_EQ(answer.ready(), 2u);
  EXPECT_EQ(answer.by_broadcast(), 1u);
  EXPECT_EQ(answer.elapsed_ms(), 510u);
  EXPECT_EQ(answer.why(), "rank 2 of i on b: died");
}

TEST_F(WorkerUpdateTest, ARefusalIsPassedOnAndItsDeadlineHolds) {
  Raw raw = greeted();
  EXPECT_EQ(raw.answer(raw.send(update(2))).error().code(), proto::STATUS_UNAVAILABLE)
      << "no coordinator";
  host_->fleet = true;
  EXPECT_EQ(raw.answer(raw.send(update(3))).error().code(), proto::STATUS_NOT_FOUND);
  auto frame = update(2);
  frame.set_deadline_ms(20);
  const auto late = raw.answer(raw.send(frame));
  EXPECT_EQ(late.error().code(), proto::STATUS_TIMEOUT);
  EXPECT_THAT(late.error().message(), HasSubstr("goes on"));
  frame.mutable_update()->set_group(std::string(129, 'g'));
  EXPECT_EQ(raw.answer(raw.send(frame)).error().code(), proto::STATUS_INVALID);
}

}  // namespace
}  // namespace rekindle::worker
