// Whole pulls in one process: one with an engine whose reports come late, and pulls of a shard
// whose config.json is wrong here.
#include "recovery/pull/pull_job.h"

#include <chrono>
#include <fstream>
#include <optional>
#include <utility>

#include <boost/asio/bind_cancellation_slot.hpp>
#include <boost/asio/cancellation_signal.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <gtest/gtest.h>

#include "recovery/pull/direct_reads.h"
#include "recovery/pull/pull_plans.h"
#include "recovery/pull/pull_watch.h"
#include "src/base/failpoint.h"
#include "tests/store/store_fixture.h"

namespace rekindle::pull {
namespace {

using transport::Batch;
using transport::BatchObserver;
using transport::BatchOptions;
using transport::SliceIndex;
using transport::SliceSource;
using transport::SourceIndex;

// Its batches report starvation just before they take new paths; the transfer hears of it after
// that.
class LateEngine final : public transport::Engine {
 public:
  std::unique_ptr<Batch> start(SliceSource& source, BatchObserver& observer,
                               const BatchOptions& options) override {
    return std::make_unique<LateBatch>(*this, observer, engine_->start(source, observer, options));
  }
  int cancels = 0;

 private:
  class LateBatch final : public Batch {
   public:
    LateBatch(LateEngine& engine, BatchObserver& observer, std::unique_ptr<Batch> batch)
        : engine_(engine), observer_(observer), batch_(std::move(batch)) {}
    void add_paths(SourceIndex source, transport::Paths paths) override {
      observer_.on_starved({1, additions_++});
      batch_->add_paths(source, std::move(paths));
    }
    void remove_source(SourceIndex source, Error cause) override {
      batch_->remove_source(source, std::move(cause));
    }
    void resolve(SliceIndex slice, transport::Verdict verdict) override {
      batch_->resolve(slice, verdict);
    }
    void add_neighbour(SourceIndex source, std::uint64_t order_seed) override {
      batch_->add_neighbour(source, order_seed);
    }
    void candidates_added(SourceIndex source, std::vector<SliceIndex> slices) override {
      batch_->candidates_added(source, std::move(slices));
    }
    void cancel() override {
      ++engine_.cancels;
      batch_->cancel();
    }
    transport::BatchProgress progress() const override { return batch_->progress(); }

   private:
    LateEngine& engine_;
    BatchObserver& observer_;
    std::unique_ptr<Batch> batch_;
    std::uint64_t additions_ = 0;
  };

  std::unique_ptr<transport::Engine> engine_ = transport::Engine::create({1});
};

class PullJobTest : public store::StoreTest {
 protected:
  Result<PullJob::Outcome> pull(transport::Engine& engine, PullRequest request,
                                PullWatch watch = {}) {
    return run<PullJob::Outcome>(
        engine, std::move(request), [](PullJob& job) { return job.run(); }, std::move(watch));
  }
  Result<PlanSummary> plan_only(transport::Engine& engine, PullRequest request) {
    return run<PlanSummary>(engine, std::move(request),
                            [](PullJob& job) { return job.plan_only(); }, {});
  }

  boost::asio::io_context io_;

 private:
  template <typename T, typename Work>
  Result<T> run(transport::Engine& engine, PullRequest request, Work work, PullWatch watch) {
    WorkerPool digests("digest", 2, 16), blocking("blocking", 2, 16);
    PullEnvironment environment;
    environment.executor = io_.get_executor();
    environment.store = store_.get();
    environment.engine = &engine;
    environment.digest_pool = &digests;
    environment.blocking_pool = &blocking;
    PullPlans plans(io_.get_executor(), {1, 64 << 20, 16});
    environment.plans = &plans;
    environment.coordinator = [] { return nullptr; };
    environment.coordinator_problem = [] { return Error(ErrorCode::kUnavailable, "nobody"); };
    PullJob job(environment, std::move(request), {}, {}, std::move(watch));
    std::optional<Result<T>> outcome;
    boost::asio::co_spawn(
        io_, [&]() -> async::Task<void> { outcome = co_await work(job); }, boost::asio::detached);
    io_.run();
    return std::move(*outcome);
  }
};

// If the transfer were cancelled for it, every try would end like the first one.
TEST_F(PullJobTest, AReportOfStarvationFromBeforeTheLastPathsEndsNoTransfer) {
  LateEngine engine;
  PullRequest request;
  request.ref = *ModelRef::parse("org/model@1");
  request.fallback = source_path();
  const auto outcome = pull(engine, std::move(request));
  ASSERT_TRUE(outcome) << outcome.error().message();
  EXPECT_EQ(outcome->stored->manifest.checkpoint->root, checkpoint()->root);
  EXPECT_EQ(engine.cancels, 0);
}

TEST_F(PullJobTest, DirectReadsThatCannotBeAreOverBeforeThePullFetchesAndStopNothing) {
  std::vector<std::string> over;
  std::optional<Arriving> arriving;
  std::optional<TileIndex> verified_when_over;
  PullWatch watch;
  watch.on_begun = [&](Arriving begun) { arriving = std::move(begun); };
  watch.direct = std::make_shared<DirectReads>(
      io_.get_executor(), DirectReads::Answers{.landed = [](std::size_t) {},
                                               .over =
                                                   [&](const std::string& why) {
                                                     over.push_back(why);
                                                     verified_when_over =
                                                         arriving->verified->count();
                                                   }});
  const auto engine = transport::Engine::create({1});
  PullRequest request;
  request.ref = *ModelRef::parse("org/model@1");
  request.fallback = source_path();
  const auto outcome = pull(*engine, std::move(request), std::move(watch));
  ASSERT_TRUE(outcome) << outcome.error().message();
  ASSERT_EQ(over.size(), 1u);
  EXPECT_THAT(over[0], ::testing::HasSubstr("this host has some of the bytes"));
  EXPECT_EQ(verified_when_over, TileIndex{0});
}

// The watch lets go first, then a device that writes to the copy.
TEST_F(PullJobTest, AHeldPullFetchesNothingUntilTheWatchAndTheLastWriterLetGo) {
  bool held = true;
  std::optional<Arriving> arriving;
  Lease writing;
  std::optional<TileIndex> verified_while_held;
  boost::asio::steady_timer timer(io_);
  const auto let_the_writer_go = [&](boost::system::error_code) {
    verified_while_held = arriving->verified->count();
    writing.reset();
  };
  PullWatch watch;
  watch.held = [&] { return held; };
  watch.held_changed = std::make_shared<async::Notifier>(io_.get_executor());
  watch.on_begun = [&, changed = watch.held_changed](Arriving begun) {
    arriving = std::move(begun);
    writing = arriving->placing->begin();
    timer.expires_after(std::chrono::milliseconds(30));
    timer.async_wait([&, changed](boost::system::error_code) {
      held = false;
      changed->notify();
      timer.expires_after(std::chrono::milliseconds(30));
      timer.async_wait(let_the_writer_go);
    });
  };
  const auto engine = transport::Engine::create({1});
  PullRequest request;
  request.ref = *ModelRef::parse("org/model@1");
  request.fallback = source_path();
  const auto outcome = pull(*engine, std::move(request), std::move(watch));
  ASSERT_TRUE(outcome) << outcome.error().message();
  EXPECT_EQ(verified_while_held, TileIndex{0});
  EXPECT_FALSE(arriving->placing->begin()) << "the pull writes itself by now";
}

// A broadcast waits for them.
TEST_F(PullJobTest, TilesThatAreWantedNowComeAlthoughTheRestIsHeld) {
  bool held = true;
  std::optional<Arriving> arriving;
  Lease writing;
  TileSet here;
  PullWatch watch;
  watch.held = [&] { return held; };
  watch.held_changed = std::make_shared<async::Notifier>(io_.get_executor());
  watch.on_begun = [&, changed = watch.held_changed](Arriving begun) {
    arriving = std::move(begun);
    ASSERT_GT(arriving->verified->snapshot().size(), 4u);
    writing = arriving->placing->begin();
    arriving->placing->fetch_now({{{2, 3}}, {{0, 1}}}, {});
    boost::asio::co_spawn(
        io_,
        [&, changed]() -> async::Task<void> {
          while (arriving->verified->count() < 2)
            co_await async::sleep_for(std::chrono::milliseconds(5));
          co_await async::sleep_for(std::chrono::milliseconds(50));
          here = arriving->verified->snapshot();
          held = false;
          writing.reset();
          changed->notify();
        },
        boost::asio::detached);
  };
  const auto engine = transport::Engine::create({1});
  PullRequest request;
  request.ref = *ModelRef::parse("org/model@1");
  request.fallback = source_path();
  const auto outcome = pull(*engine, std::move(request), std::move(watch));
  ASSERT_TRUE(outcome) << outcome.error().message();
  EXPECT_EQ(here.ranges(), (Placing::TileRuns{{0, 1}, {2, 3}})) << "the rest is others' to write";
  EXPECT_EQ(outcome->summary.resumed_bytes, 0u);
}

// The job goes while the planning thread still works on its tables.
TEST_F(PullJobTest, C7ACancelledPullDoesNotWaitForItsPlanAndTheControlThreadServesOthers) {
  const auto engine = transport::Engine::create({1});
  WorkerPool digests("digest", 2, 16), blocking("blocking", 2, 16);
  PullPlans plans(io_.get_executor(), {1, 64 << 20, 16});
  PullEnvironment environment;
  environment.executor = io_.get_executor();
  environment.store = store_.get();
  environment.engine = engine.get();
  environment.digest_pool = &digests;
  environment.blocking_pool = &blocking;
  environment.plans = &plans;
  environment.coordinator = [] { return nullptr; };
  environment.coordinator_problem = [] { return Error(ErrorCode::kUnavailable, "nobody"); };
  PullRequest request;
  request.ref = *ModelRef::parse("org/model@1");
  request.fallback = source_path();
  std::string phase;
  OnProgress on_progress = [&](const Progress& progress) { phase = progress.phase; };
  auto job = std::make_unique<PullJob>(environment, std::move(request), std::move(on_progress));
  ASSERT_TRUE(arm_failpoints("plan.compute=hold"));
  boost::asio::cancellation_signal cancel;
  std::optional<Result<PullJob::Outcome>> outcome;
  boost::asio::co_spawn(
      io_, [&]() -> async::Task<void> { outcome = co_await job->run(); },
      boost::asio::bind_cancellation_slot(cancel.slot(), boost::asio::detached));
  const auto run_until = [&](const std::function<bool()>& done) {
    while (!done()) {
      io_.restart();
      io_.run_one_for(std::chrono::milliseconds(10));
    }
  };
  run_until([&] { return phase == "plan"; });
  bool served = false;
  boost::asio::post(io_, [&] { served = true; });
  run_until([&] { return served; });
  EXPECT_FALSE(outcome);
  cancel.emit(boost::asio::cancellation_type::terminal);
  run_until([&] { return outcome.has_value(); });
  ASSERT_FALSE(*outcome);
  EXPECT_EQ(outcome->error().code(), ErrorCode::kUnavailable);
  job.reset();
  ASSERT_TRUE(arm_failpoints(""));
}

constexpr const char* kReplicate =
    R"({"name":"t","rules":[{"match":["**","*"],"kind":"replicate"}]})";

// This host holds a copy whose config.json, which the shard rules need, is wrong.
class PullWithBadConfig : public PullJobTest {
 protected:
  void SetUp() override {
    PullJobTest::SetUp();
    const auto mine = StoreTest::pull(store::all_boxes(*checkpoint()));
    const auto config = *checkpoint()->tensors.find("__rekindle_file__/config.json");
    const LayoutEntry entry = mine->manifest.layout.entries_of(config)[0];
    file_ = mine->segments[entry.segment]->path();
    offset_bytes_ = entry.offset_bytes;
  }
  void flip() const {
    std::fstream file(file_, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(offset_bytes_));
    file << 'X';
    ASSERT_TRUE(file.flush());
  }
  Result<PlanSummary> plan_shard(const std::filesystem::path& fallback) {
    const auto engine = transport::Engine::create({1});
    PullRequest request;
    request.ref = *ModelRef::parse("org/model@1");
    request.shard = "tp=0/2";
    request.spec_json = kReplicate;
    request.fallback = fallback;
    return plan_only(*engine, std::move(request));
  }

  std::filesystem::path file_;
  std::uint64_t offset_bytes_ = 0;
};

TEST_F(PullWithBadConfig, B4ATruncatedConfigIsReadFromTheFallback) {
  std::filesystem::resize_file(file_, 0);
  const auto plan = plan_shard(source_path());
  ASSERT_TRUE(plan) << plan.error().message();
  EXPECT_EQ(plan->wanted_bytes, checkpoint()->tensors.total_bytes());
}

TEST_F(PullWithBadConfig, B4AWrongConfigIsReadFromTheFallback) {
  flip();
  const auto plan = plan_shard(source_path());
  ASSERT_TRUE(plan) << plan.error().message();
}

TEST_F(PullWithBadConfig, B4AWrongConfigInTheFallbackFailsThePull) {
  flip();
  store::write_bytes(source_path() / "config.json", R"({"model_type":"tesT"})");
  const auto plan = plan_shard(source_path());
  ASSERT_FALSE(plan);
  EXPECT_EQ(plan.error().code(), ErrorCode::kNotFound);
  EXPECT_THAT(plan.error().message(), ::testing::HasSubstr("does not match its digest"));
}

TEST(Placing, WantsTilesNowUntilThePullHasEverythingToFetch) {
  int changes = 0;
  Placing placing([&] { ++changes; });
  std::vector<std::string> failures;
  const auto on_failure = [&](const Error& why) { failures.push_back(why.message()); };
  placing.fetch_now({{}}, on_failure);
  EXPECT_FALSE(placing.wants_now());
  placing.fetch_now({{{3, 5}}, {{7, 8}}}, on_failure);
  EXPECT_EQ(changes, 1);
  EXPECT_EQ(placing.take_wanted_now(), (std::vector<Placing::TileRuns>{{{3, 5}}, {{7, 8}}}));
  EXPECT_FALSE(placing.wants_now());
  placing.fail_wanted(Error(ErrorCode::kNotFound, "nobody has them"));
  placing.fail_wanted(Error(ErrorCode::kNotFound, "again"));
  EXPECT_EQ(failures, std::vector<std::string>{"nobody has them"});
  (void)placing.close();
  placing.fetch_now({{{1, 2}}}, on_failure);
  EXPECT_FALSE(placing.wants_now());
}

TEST(Placing, ThePullWaitsForWritersAndThenAdmitsNone) {
  Placing placing;
  EXPECT_FALSE(placing.busy());
  auto one = placing.begin();
  auto two = placing.begin();
  ASSERT_TRUE(one && two);
  placing.landed({{3, 5}});
  one.reset();
  EXPECT_TRUE(placing.busy());
  placing.landed({{7, 8}});
  two.reset();
  EXPECT_FALSE(placing.busy());
  EXPECT_EQ(placing.close(), (Placing::TileRuns{{3, 5}, {7, 8}}));
  EXPECT_FALSE(placing.begin());
}

}  // namespace
}  // namespace rekindle::pull
