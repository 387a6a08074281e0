// A batch awaited from coroutines, over the real engine and loopback sockets.
#include "transport/asio_await.h"

#include <atomic>
#include <cstring>
#include <exception>
#include <optional>

#include <boost/asio/bind_cancellation_slot.hpp>
#include <boost/asio/cancellation_signal.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/io_context.hpp>
#include <gtest/gtest.h>

#include "src/base/units.h"
#include "tests/transport/transport_fixture.h"
#include "transport/tcp/tcp_transport.h"

namespace rekindle::transport::testing {
namespace {

namespace asio = boost::asio;

// Reads a region slice by slice into a buffer; every slice is accepted as it lands.
class WholeRegion final : public SliceSource {
 public:
  WholeRegion(RegionKey key, std::size_t size) : local(size), key_(key) {}

  SliceIndex slice_count() const override {
    return static_cast<SliceIndex>((local.size() + kSlice - 1) / kSlice);
  }
  SliceInfo info(SliceIndex slice) const override {
    return {std::min(kSlice, local.size() - slice * kSlice), SourceMask(1)};
  }
  Result<void> expand(SliceIndex slice, SourceIndex, std::vector<ReadOp>& out) override {
    out.push_back({.remote = key_,
                   .remote_offset = slice * kSlice,
                   .local = local.data() + slice * kSlice,
                   .run_bytes = info(slice).bytes});
    return {};
  }
  void landed(SliceIndex slice, SourceIndex) override {
    ++landed_slices;
    if (accept) batch.load()->resolve(slice, Verdict::kAccept);
  }
  void dropped(SliceIndex, SourceIndex) override {}

  std::vector<std::byte> local;
  std::atomic<Batch*> batch = nullptr;
  std::atomic<bool> accept = true;
  std::atomic<int> landed_slices = 0;

 private:
  static constexpr std::size_t kSlice = 256 * kKiB;
  const RegionKey key_;
};

class AsioAwaitTest : public ::testing::Test {
 protected:
  AsioAwaitTest()
      : server_(*tcp::TcpServer::create({.listen_host = "127.0.0.1"}, registry_, incarnation_)),
        key_(registry_.add(segment_.bytes(), segment_.fd(), 0, {}, nullptr)),
        reads_(key_, segment_.bytes().size()) {
    registry_.admit({.token = token_, .puller = "test", .regions = {key_}});
  }

  std::vector<std::unique_ptr<Path>> connect() {
    std::vector<std::unique_ptr<Path>> paths;
    auto path = tcp::make_connector()->connect(
        {"tcp", server_->endpoint("127.0.0.1"), token_, incarnation_}, test_deadline());
    EXPECT_TRUE(path) << path.error().message();
    if (path) paths.push_back(std::move(*path));
    return paths;
  }
  // Runs the loop until it has nothing left to do. A hang fails at the deadline.
  void run() {
    io_.run_for(kTestDeadline);
    EXPECT_TRUE(io_.stopped()) << "the coroutine never ended";
  }

  const TestSegment segment_{4 * kMiB + 17};
  SegmentRegistry registry_;
  const Incarnation incarnation_ = Incarnation::random();
  const SessionToken token_ = SessionToken::random();
  std::unique_ptr<tcp::TcpServer> server_;
  const RegionKey key_;
  WholeRegion reads_;
  const std::unique_ptr<Engine> engine_ = Engine::create({.poller_threads = 1});
  asio::io_context io_;
};

TEST_F(AsioAwaitTest, ACoroutineResumesOnItsExecutorWithTheOutcome) {
  AwaitableBatch batch(io_.get_executor(), *engine_, reads_, {}, {});
  reads_.batch = batch.operator->();
  batch->add_paths(0, connect());
  int resumed = 0;
  const auto waiter = [&]() -> asio::awaitable<void> {
    const Result<void> outcome = co_await batch.finished();
    EXPECT_TRUE(outcome) << outcome.error().message();
    EXPECT_TRUE(io_.get_executor().running_in_this_thread());
    const Result<void> again = co_await batch.finished();  // after the end: at once
    EXPECT_TRUE(again);
    ++resumed;
  };
  asio::co_spawn(io_, waiter(), asio::detached);
  asio::co_spawn(io_, waiter(), asio::detached);
  run();
  EXPECT_EQ(resumed, 2);
  EXPECT_EQ(std::memcmp(reads_.local.data(), segment_.bytes().data(), reads_.local.size()), 0);
}

TEST_F(AsioAwaitTest, CancellingTheCoroutineCancelsTheBatchAndWaitsForItsDrain) {
  reads_.accept = false;  // so the batch never finishes
  AwaitableBatch batch(io_.get_executor(), *engine_, reads_, {}, {});
  reads_.batch = batch.operator->();
  batch->add_paths(0, connect());
  asio::cancellation_signal stop;
  std::optional<Result<void>> outcome;
  asio::co_spawn(
      io_,
      [&]() -> asio::awaitable<void> {
        outcome = co_await batch.finished();
        // Nothing writes any more, so these bytes stay.
        std::fill(reads_.local.begin(), reads_.local.end(), std::byte{0x11});
      },
      asio::bind_cancellation_slot(stop.slot(), asio::detached));
  while (reads_.landed_slices == 0) io_.run_one_for(std::chrono::milliseconds(1));
  stop.emit(asio::cancellation_type::total);
  run();
  ASSERT_TRUE(outcome);
  ASSERT_FALSE(*outcome);
  EXPECT_EQ(outcome->error().code(), ErrorCode::kUnavailable) << outcome->error().message();
  EXPECT_EQ(reads_.local, std::vector<std::byte>(reads_.local.size(), std::byte{0x11}));
}

TEST_F(AsioAwaitTest, EventsArriveOnTheExecutor) {
  std::vector<SourceIndex> lost;
  int starved = 0;
  BatchOptions options;
  options.starvation_timeout = std::chrono::milliseconds(100);
  reads_.accept = false;
  AwaitableBatch batch(io_.get_executor(), *engine_, reads_, options,
                       {.source_lost =
                            [&](SourceIndex source, const Error& cause) {
                              EXPECT_TRUE(io_.get_executor().running_in_this_thread());
                              EXPECT_FALSE(cause.message().empty());
                              lost.push_back(source);
                            },
                        // The batch may also starve before its first source has come.
                        .starved = [&](const Starvation&) { starved += lost.empty() ? 0 : 1; }});
  reads_.batch = batch.operator->();
  batch->add_paths(0, connect());
  std::optional<Result<void>> outcome;
  asio::co_spawn(
      io_, [&]() -> asio::awaitable<void> { outcome = co_await batch.finished(); }, asio::detached);
  while (reads_.landed_slices == 0) io_.run_one_for(std::chrono::milliseconds(1));
  server_.reset();
  for (SliceIndex slice = 0; slice < reads_.slice_count(); ++slice) {
    batch->resolve(slice, Verdict::kRetry);  // open again, and nobody holds it
  }
  run();
  ASSERT_TRUE(outcome);
  EXPECT_FALSE(*outcome);
  EXPECT_EQ(lost, std::vector<SourceIndex>{0});
  EXPECT_EQ(starved, 1);
}

TEST_F(AsioAwaitTest, ABatchThatGoesEndsItsWaiterAndSendsItNoEvents) {
  reads_.accept = false;
  std::optional<Result<void>> outcome;
  {
    AwaitableBatch batch(io_.get_executor(), *engine_, reads_, {},
                         {.source_lost = [](SourceIndex, const Error&) { FAIL() << "too late"; }});
    reads_.batch = batch.operator->();
    batch->add_paths(0, connect());
    asio::co_spawn(
        io_, [&]() -> asio::awaitable<void> { outcome = co_await batch.finished(); },
        asio::detached);
    while (reads_.landed_slices == 0) io_.run_one_for(std::chrono::milliseconds(1));
  }
  run();
  ASSERT_TRUE(outcome);
  EXPECT_FALSE(*outcome);
}

}  // namespace
}  // namespace rekindle::transport::testing
