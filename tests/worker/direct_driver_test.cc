// Sessions whose buckets NICs bring: the worker's service between a pull and the device process,
// both played by the test.
#include <fcntl.h>

#include <boost/asio/post.hpp>
#include <gmock/gmock.h>

#include "src/bucket/contents.h"
#include "src/bucket/round_plan.h"
#include "tests/worker/worker_service_fixture.h"

namespace rekindle::worker {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class DirectDriverTest : public WorkerServiceTest {
 protected:
  void SetUp() override {
    WorkerServiceTest::SetUp();
    host_->has_device = true;
    host_->homes = {"mlx5_0:1"};
    host_->on_pull = [this](pull::PullWatch watch) { return arrive(std::move(watch)); };
  }
  void TearDown() override {
    stop_ = true;
    WorkerServiceTest::TearDown();
  }
  // A pull of m@2 that has its place. It reads what the session wants, then fetches nothing.
  LonelyHost::Pulled arrive(pull::PullWatch watch) {
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
    watch.on_begun({manifest.checkpoint, std::make_shared<const Layout>(manifest.layout), none,
                    std::move(segments), std::make_shared<pull::Placing>()});
    direct_ = watch.direct != nullptr;
    std::optional<pull::DirectSlots> slots;
    while (watch.direct != nullptr && !watch.direct->ended() && !co_await async::is_cancelled()) {
      if (!slots) slots = watch.direct->take_slots();
      if (slots && direct_buckets_ == 0) direct_buckets_ = slots->buckets()->size();
      while (const auto wish = watch.direct->take_wish()) watch.direct->landed(wish->bucket);
      co_await watch.direct->changed->wait_until(steady_now() + 5ms);
    }
    if (watch.direct != nullptr) {
      why_ended_ = watch.direct->ended().value_or("");
      slots.reset();
      watch.direct->finish("the test");
    }
    fetches_ = true;
    while (!stop_ && !co_await async::is_cancelled()) co_await async::sleep_for(5ms);
    co_return fail(ErrorCode::kUnavailable, "ended");
  }
  std::uint64_t attach(Raw& raw) {
    const auto attached = raw.attach("j", 0, 1, 2, "double:0");
    EXPECT_TRUE(attached.attached().device_channel()) << attached.ShortDebugString();
    return attached.session();
  }
  void say(const std::function<void(device::DeviceEvents&)>& word) {
    std::promise<void> said;
    boost::asio::post(context_, [&] {
      word(*service_);
      said.set_value();
    });
    said.get_future().get();
  }
  void offer(std::uint64_t session) {
    const auto stored = host_->store().find({"m", 1}).front();
    device::SlotsOffered offered;
    offered.session = session;
    offered.bucket_bytes = 1 << 20;
    offered.slots = 2;
    offered.memory = UniqueFd(::open("/dev/null", O_RDWR | O_CLOEXEC));
    const auto contents = bucket::Contents::create(
        stored->manifest.checkpoint->tensors.serialize(), stored->manifest.layout.serialize(), {},
        std::vector<std::uint64_t>{stored->manifest.layout.segments()[0].size_bytes});
    ASSERT_TRUE(contents) << contents.error().message();
    offered.contents = bucket::digest_of(*contents);
    say([&](device::DeviceEvents& events) { events.slots_offered(std::move(offered)); });
  }

  std::atomic<bool> direct_ = false;
  std::atomic<bool> fetches_ = false;
  std::atomic<bool> stop_ = false;
  std::atomic<std::size_t> direct_buckets_ = 0;
  std::string why_ended_;  // once fetches_
};

TEST_F(DirectDriverTest, AWorkerIsReadyWithoutThisHostsCopyWhenNicsBroughtEveryByte) {
  Raw raw = greeted();
  const auto session = attach(raw);
  ASSERT_EQ(host_->device_orders.size(), 1u);
  EXPECT_TRUE(host_->device_orders[0].direct);
  EXPECT_FALSE(host_->device_orders[0].in_round);
  EXPECT_TRUE(host_->device_orders[0].leaves);
  offer(session);
  EXPECT_TRUE(eventually([&] { return direct_buckets_ > 0; }));
  say([&](device::DeviceEvents& events) { events.bucket_wanted({.session = session}); });
  EXPECT_TRUE(eventually([&] { return !host_->buckets_landed().empty(); }));
  EXPECT_THAT(host_->buckets_landed(), ElementsAre(0u));
  EXPECT_FALSE(fetches_) << "the host's own copy waits";
  const auto early = raw.say_loaded(session, kPayload);  // overtakes the device process
  say([&](device::DeviceEvents& events) {
    events.reads_ended({.session = session, .all = true, .buckets = 1});
  });
  EXPECT_TRUE(raw.answer(early).has_committed());
  EXPECT_TRUE(eventually([&] { return host_->reads_over_of == session; }));
  EXPECT_TRUE(eventually([&] { return fetches_.load(); })) << "this host becomes a source, too";
  EXPECT_THAT(event_kinds(), Contains("direct"));
}

TEST_F(DirectDriverTest, BucketsThatNicsDidNotBringKeepAWorkerFromBeingReady) {
  Raw raw = greeted();
  const auto session = attach(raw);
  offer(session);
  say([&](device::DeviceEvents& events) {
    events.reads_ended({.session = session, .all = false, .buckets = 0, .why = "cut tiles"});
  });
  EXPECT_TRUE(eventually([&] { return fetches_.load(); }));
  const auto early = raw.say_loaded(session, kPayload);
  (void)raw.ping();
  say([&](device::DeviceEvents& events) { events.device_over({.session = session}); });
  EXPECT_TRUE(raw.answer(early).has_committed()) << "its device gave it the rest";
  EXPECT_THAT(event_kinds(), Contains("not_direct"));
}

TEST_F(DirectDriverTest, MemoryThatNoNicTakesIsNotReadInto) {
  host_->refuses_memory = true;
  Raw raw = greeted();
  const auto session = attach(raw);
  offer(session);
  EXPECT_TRUE(eventually([&] { return fetches_.load(); }));
  EXPECT_THAT(why_ended_, HasSubstr("the NIC refuses"));
  EXPECT_TRUE(eventually([&] { return host_->reads_over_of == session; }));
}

TEST_F(DirectDriverTest, WithoutANearNicNothingIsDirect) {
  host_->homes.clear();
  Raw raw = greeted();
  (void)attach(raw);
  EXPECT_TRUE(eventually([&] { return fetches_.load(); }));
  EXPECT_FALSE(direct_);
  EXPECT_FALSE(host_->device_orders[0].direct);
}

TEST_F(DirectDriverTest, ASecondWorkerForTheSameBytesDoesNotWaitForTheFirstOnesGpu) {
  Raw raw = greeted();
  const auto session = attach(raw);
  offer(session);
  EXPECT_TRUE(eventually([&] { return direct_buckets_ > 0; }));
  EXPECT_FALSE(fetches_);
  Raw other = greeted();
  const auto second = other.attach("k", 0, 1, 2, "double:0");
  EXPECT_TRUE(second.has_attached());
  EXPECT_TRUE(eventually([&] { return fetches_.load(); }));
  EXPECT_THAT(why_ended_, HasSubstr("another worker"));
  EXPECT_FALSE(host_->device_orders.back().direct);
}

TEST_F(DirectDriverTest, ASessionThatEndsEndsItsReadsAndALateOfferIsAnswered) {
  auto raw = std::make_unique<Raw>(greeted());
  const auto session = attach(*raw);
  raw.reset();
  EXPECT_TRUE(eventually([&] { return fetches_.load(); }));
  EXPECT_THAT(why_ended_, HasSubstr("has ended"));
  host_->reads_over_of = 0;
  offer(session);
  EXPECT_TRUE(eventually([&] { return host_->reads_over_of == session; }));
}

}  // namespace
}  // namespace rekindle::worker
