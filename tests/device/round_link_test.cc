// Rounds over real device processes: each link is an agent of its own.
#include <array>
#include <csignal>
#include <future>
#include <map>
#include <span>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/io_context.hpp>
#include <gtest/gtest.h>

#include "recovery/device/device_link.h"
#include "src/ipc/frame.h"
#include "tests/device/bucket_worker.h"

namespace rekindle::device {
namespace {

using namespace std::chrono_literals;
using testing::BucketWorker;

constexpr std::uint64_t kBucket = 64 << 10;

class Agent : public DeviceEvents {
 public:
  Agent(boost::asio::io_context& context, LinkOptions options)
      : link(context.get_executor(), std::move(options)) {
    link.tell_events(this);
    link.start();
  }
  void device_over(const DeviceOver& o) override { over.emplace(o.session, o); }
  void device_joined(const DeviceJoined& j) override { joined.emplace(j.session, j); }
  void share_wanted(const ShareWanted& s) override { wanted.emplace(s.session, s.tiles); }
  void spread_progress(std::uint64_t session, std::uint64_t bytes) override {
    progress[session] = bytes;
  }
  void spread_over(const SpreadOver& s) override {
    EXPECT_TRUE(spread.emplace(s.session, s).second) << s.session << " was over before";
  }
  void meeting_id(std::uint64_t number, const Result<std::string>& id) override {
    ids.emplace(number, id);
  }
  void slots_offered(SlotsOffered) override {}
  void bucket_wanted(const BucketWanted&) override {}
  void reads_ended(const ReadsEnded&) override {}

  DeviceLink link;
  std::map<std::uint64_t, DeviceOver> over;
  std::map<std::uint64_t, DeviceJoined> joined;
  std::map<std::uint64_t, TileRuns> wanted;
  std::map<std::uint64_t, std::uint64_t> progress;
  std::map<std::uint64_t, SpreadOver> spread;
  std::map<std::uint64_t, Result<std::string>> ids;
};

class RoundLinkTest : public ::testing::Test {
 protected:
  explicit RoundLinkTest(const std::vector<std::string>& arguments = {}) {
    for (auto& agent : agents_) {
      LinkOptions options;
      options.gpu = *parse_gpu("double:2:64MiB");
      options.gpu.arguments = arguments;
      options.gpu.bucket_bytes = kBucket;
      options.program = DEVICE_MAIN;
      options.life.first_pause = 10ms;
      agent = std::make_unique<Agent>(context_, std::move(options));
    }
  }
  ~RoundLinkTest() override {
    std::size_t closed = 0;
    for (auto& agent : agents_) {
      boost::asio::co_spawn(
          context_,
          [](DeviceLink& link, std::size_t& count) -> async::Task<void> {
            co_await link.close(5s);
            ++count;
          }(agent->link, closed),
          boost::asio::detached);
    }
    EXPECT_TRUE(until([&] { return closed == agents_.size(); }));
  }
  template <typename Done>
  bool until(Done done) {
    const auto give_up = std::chrono::steady_clock::now() + 20s;
    while (!done() && std::chrono::steady_clock::now() < give_up) {
      context_.restart();
      context_.run_for(5ms);
    }
    return done();
  }

  // Attaches a worker to a device, and opens its buckets.
  std::unique_ptr<BucketWorker> join(Agent& agent, std::uint64_t session, std::string device) {
    EXPECT_TRUE(until([&] { return agent.link.status().state == DeviceLife::State::kServing; }))
        << agent.link.status().problem;
    DeviceOrder order;
    order.session = session;
    order.device = std::move(device);
    order.attached = testing::attached_frame(sample_);
    order.segments = sample_.files();
    order.in_round = true;
    const auto leaves = sample_.leaves();
    const auto bytes = std::as_bytes(std::span(leaves));
    order.leaves_bytes = bytes.size();
    order.leaves = *ipc::sealed_memfd({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
    order.keep = keep_;
    auto socket = agent.link.serve(std::move(order));
    if (!socket) throw std::runtime_error(socket.error().message());
    auto worker = std::make_unique<BucketWorker>(std::move(*socket));
    worker->open();
    if (!until([&] { return agent.joined.contains(session); })) {
      throw std::runtime_error("it does not join");
    }
    agent.link.tell(session, {}, true);
    return worker;
  }
  std::string make_id(Agent& agent, std::uint64_t number) {
    agent.link.make_meeting_id(number);
    EXPECT_TRUE(until([&] { return agent.ids.contains(number); }));
    const auto& id = agent.ids.at(number);
    EXPECT_TRUE(id) << id.error().message();
    return *id;
  }
  static SpreadOrder order_for(std::uint64_t session, std::uint32_t rank, std::string id) {
    return {session, "c-1", std::move(id), rank, 2, kBucket, {0, 1}};
  }
  static std::future<void> take_all(BucketWorker& worker) {
    return std::async(std::launch::async, [&worker] {
      worker.take_all();
      worker.close();
    });
  }
  // Takes its first bucket and keeps it. The round continues when it is released.
  static bucket::FilledMessage take_one(BucketWorker& worker) {
    const auto filled = worker.next().value();
    worker.read(filled);
    return filled;
  }
  void expect_all(Agent& agent, std::uint64_t session, BucketWorker& worker,
                  std::future<void>& taken) {
    ASSERT_TRUE(until([&] { return agent.over.contains(session); }));
    const auto& over = agent.over.at(session);
    EXPECT_FALSE(over.error) << over.error->message();
    taken.get();
    EXPECT_EQ(worker.compare(sample_), "");
  }
  void expect_all_by_round(Agent& agent, std::uint64_t session, BucketWorker& worker,
                           std::future<void>& taken) {
    expect_all(agent, session, worker, taken);
    ASSERT_TRUE(agent.spread.contains(session));
    const auto& over = agent.spread.at(session);
    EXPECT_FALSE(over.error) << over.error->message();
    EXPECT_EQ(over.bytes, sample_.contents().total_bytes());
  }
  Agent& a() { return *agents_[0]; }
  Agent& b() { return *agents_[1]; }

  const bucket::testing::Sample sample_ = bucket::testing::sample_of(
      {{"a", DType::kBF16, Shape{1024, 512}}, {"b", DType::kF32, Shape{33, 77}}}, 7, 1 << 20);
  // Lent to the sessions that join.
  std::shared_ptr<const void> keep_;
  boost::asio::io_context context_;
  std::array<std::unique_ptr<Agent>, 2> agents_;
};

class ImpatientRoundLinkTest : public RoundLinkTest {
 protected:
  ImpatientRoundLinkTest() : RoundLinkTest({"--fill-ms", "500"}) {}
};

class StuckRoundLinkTest : public RoundLinkTest {
 protected:
  explicit StuckRoundLinkTest(std::vector<std::string> more = {})
      : RoundLinkTest(with(std::move(more))) {}
  static std::vector<std::string> with(std::vector<std::string> more) {
    more.insert(more.end(), {"--stuck-aborts", "--abort-ms", "200", "--drain-ms", "500"});
    return more;
  }
};

// The remaining buckets come from the segments, as if the abort had ended.
TEST_F(StuckRoundLinkTest, Row43AnAbortThatHangsCostsNoByteAndNoProcess) {
  auto first = join(a(), 1, "double:0");
  auto second = join(b(), 1, "double:0");
  const auto id = make_id(a(), 5);
  a().link.spread(order_for(1, 0, id));
  b().link.spread(order_for(1, 1, id));
  const auto kept = take_one(*first);
  (void)take_one(*second);
  a().link.stop_spread(1, "a rank has failed");
  ASSERT_TRUE(until([&] { return a().spread.contains(1); }));
  EXPECT_TRUE(a().spread.at(1).error);
  first->release(kept);
  auto taken = take_all(*first);
  expect_all(a(), 1, *first, taken);
  EXPECT_EQ(a().link.status().restarts, 0u);
}

// An abort of NCCL takes until every process of the host has released the old communicator.
TEST_F(StuckRoundLinkTest, AnAbortThatHangsDoesNotHoldUpTheNextMeeting) {
  for (const std::uint64_t session : {1u, 2u}) {
    auto first = join(a(), session, "double:0");
    auto second = join(b(), session, "double:0");
    const auto id = make_id(a(), 4 + session);
    a().link.spread(order_for(session, 0, id));
    b().link.spread(order_for(session, 1, id));
    auto first_taken = take_all(*first);
    auto second_taken = take_all(*second);
    expect_all_by_round(a(), session, *first, first_taken);
    expect_all_by_round(b(), session, *second, second_taken);
  }
  EXPECT_EQ(a().link.status().restarts, 0u);
  EXPECT_EQ(b().link.status().restarts, 0u);
}

class LostRoundLinkTest : public RoundLinkTest {
 protected:
  LostRoundLinkTest()
      : RoundLinkTest({"--deaf-aborts", "--stay", "--fill-ms", "1000", "--drain-ms", "200",
                       "--hang-ms", "3600000"}) {}
};

// The GPU may use the segments as long as the process is in its driver.
TEST_F(LostRoundLinkTest, Row38WhatALostDeviceWasLentIsKeptUntilItsProcessIsGone) {
  auto segments = std::make_shared<const int>(0);
  const std::weak_ptr<const int> lent = segments;
  keep_ = std::move(segments);
  auto first = join(a(), 1, "double:0");
  keep_.reset();
  auto second = join(b(), 1, "double:0");
  const auto process = static_cast<pid_t>(a().link.status().pid);
  const auto id = make_id(a(), 5);
  a().link.spread(order_for(1, 0, id));
  b().link.spread(order_for(1, 1, id));
  // Its next bucket is never filled, because the other rank waits.
  first->release(take_one(*first));
  ASSERT_TRUE(until([&] { return a().over.contains(1); }));
  EXPECT_TRUE(a().over.at(1).error);
  EXPECT_FALSE(lent.expired());
  ASSERT_EQ(::kill(process, SIGKILL), 0);
  EXPECT_TRUE(until([&] { return lent.expired(); }));
}

TEST_F(RoundLinkTest, TwoProcessesGetAllAndMeetOnce) {
  for (const std::uint64_t session : {1u, 2u}) {
    const bool again = session == 2;
    auto first = join(a(), session, "double:1");
    auto second = join(b(), session, "double:0");
    EXPECT_EQ(a().joined.at(session).contents, b().joined.at(session).contents);
    EXPECT_EQ(a().joined.at(session).communicators.size(), again ? 1u : 0u);
    const auto id = again ? std::string() : make_id(a(), 5);
    a().link.spread(order_for(session, 0, id));
    b().link.spread(order_for(session, 1, id));
    auto first_taken = take_all(*first);
    auto second_taken = take_all(*second);
    expect_all_by_round(a(), session, *first, first_taken);
    expect_all_by_round(b(), session, *second, second_taken);
  }
  EXPECT_NE(a().link.life(), "");
  EXPECT_NE(a().link.life(), b().link.life());
}

TEST_F(RoundLinkTest, TwoDevicesOfOneProcessGetAll) {
  auto first = join(a(), 1, "double:0");
  auto second = join(a(), 2, "double:1");
  const auto id = make_id(a(), 5);
  a().link.spread(order_for(1, 0, id));
  a().link.spread(order_for(2, 1, id));
  auto first_taken = take_all(*first);
  auto second_taken = take_all(*second);
  expect_all_by_round(a(), 1, *first, first_taken);
  expect_all_by_round(a(), 2, *second, second_taken);
}

TEST_F(ImpatientRoundLinkTest, Row43PeerProcessThatIsKilledAmidARoundCostsNoByte) {
  auto first = join(a(), 1, "double:0");
  auto second = join(b(), 1, "double:0");
  const auto id = make_id(a(), 5);
  a().link.spread(order_for(1, 0, id));
  b().link.spread(order_for(1, 1, id));
  const auto kept = take_one(*first);
  (void)take_one(*second);
  const auto life = b().link.life();
  ASSERT_EQ(::kill(static_cast<pid_t>(b().link.status().pid), SIGKILL), 0);
  ASSERT_TRUE(until([&] { return b().over.contains(1) && b().spread.contains(1); }));
  EXPECT_TRUE(b().spread.at(1).error);
  EXPECT_NE(b().over.at(1).error->message().find("signal 9"), std::string::npos);
  first->release(kept);
  auto taken = take_all(*first);
  expect_all(a(), 1, *first, taken);
  ASSERT_TRUE(a().spread.at(1).error);
  EXPECT_LT(a().spread.at(1).bytes, sample_.contents().total_bytes());
  ASSERT_TRUE(until([&] { return b().link.status().state == DeviceLife::State::kServing; }));
  EXPECT_NE(b().link.life(), life);
}

TEST_F(RoundLinkTest, StoppedAmidARoundTheRestComesAnyway) {
  auto first = join(a(), 1, "double:0");
  auto second = join(b(), 1, "double:0");
  const auto id = make_id(a(), 5);
  a().link.spread(order_for(1, 0, id));
  b().link.spread(order_for(1, 1, id));
  const auto first_kept = take_one(*first);
  const auto second_kept = take_one(*second);
  for (Agent* const agent : {&a(), &b()}) {
    agent->link.stop_spread(1, "a rank has failed");
    ASSERT_TRUE(until([&] { return agent->spread.contains(1); }));
    EXPECT_EQ(agent->spread.at(1).error->message(), "a rank has failed");
  }
  first->release(first_kept);
  second->release(second_kept);
  auto first_taken = take_all(*first);
  auto second_taken = take_all(*second);
  expect_all(a(), 1, *first, first_taken);
  expect_all(b(), 1, *second, second_taken);
}

TEST_F(RoundLinkTest, Row39SessionThatEndsAmidARoundIsHeardOfUntilThatIsOver) {
  auto first = join(a(), 1, "double:0");
  auto second = join(b(), 1, "double:0");
  const auto id = make_id(a(), 5);
  a().link.spread(order_for(1, 0, id));
  b().link.spread(order_for(1, 1, id));
  const auto kept = take_one(*first);
  (void)take_one(*second);
  second->close();
  b().link.end(1, true);
  EXPECT_EQ(b().link.status().sessions, 0u);
  first->release(kept);
  auto taken = take_all(*first);
  expect_all_by_round(a(), 1, *first, taken);
  ASSERT_TRUE(until([&] { return b().spread.contains(1); }));
  EXPECT_FALSE(b().spread.at(1).error);
  EXPECT_FALSE(b().over.contains(1)) << "it was ended here";
}

TEST_F(RoundLinkTest, AnOrderWithNonsenseIsRefusedInOneLineAndItIsServedAsAlways) {
  auto worker = join(a(), 1, "double:0");
  auto order = order_for(1, 0, "id");
  order.owners = {7};
  a().link.spread(order);
  ASSERT_TRUE(until([&] { return a().spread.contains(1); }));
  const auto& error = a().spread.at(1).error;
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kInvalid);
  EXPECT_EQ(error->message().find('\n'), std::string::npos);
  EXPECT_NE(error->message().find("owner 7"), std::string::npos) << error->message();
  auto taken = take_all(*worker);
  expect_all(a(), 1, *worker, taken);
}

TEST_F(RoundLinkTest, StoppedBeforeItBeganItIsServedAsAlways) {
  auto worker = join(a(), 1, "double:0");
  a().link.stop_spread(1, "nobody else wants the same");
  auto taken = take_all(*worker);
  expect_all(a(), 1, *worker, taken);
  EXPECT_FALSE(a().spread.contains(1));
}

TEST_F(RoundLinkTest, WhatCannotBeOrderedIsAnswered) {
  // No process runs yet.
  a().link.make_meeting_id(3);
  a().link.spread(order_for(9, 0, "id"));
  EXPECT_EQ(a().link.life(), "");
  EXPECT_TRUE(a().ids.empty() && a().spread.empty()) << "not from within the call";
  ASSERT_TRUE(until([&] { return a().ids.contains(3) && a().spread.contains(9); }));
  EXPECT_EQ(a().ids.at(3).error().code(), ErrorCode::kUnavailable);
  EXPECT_EQ(a().spread.at(9).error->code(), ErrorCode::kNotFound);
}

}  // namespace
}  // namespace rekindle::device
