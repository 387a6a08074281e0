// A whole pull in one process, with an engine that says what it says at an awkward moment.
#include <optional>
#include <utility>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/io_context.hpp>
#include <gtest/gtest.h>

#include "recovery/pull/pull.h"
#include "tests/store/store_fixture.h"

namespace rekindle::pull {
namespace {

using transport::Batch;
using transport::BatchObserver;
using transport::BatchOptions;
using transport::SliceIndex;
using transport::SliceSource;
using transport::SourceIndex;

// Its batches report that they starve just before they take new paths, and are heard after that.
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
    void add_neighbour(SourceIndex source, std::uint64_t salt) override {
      batch_->add_neighbour(source, salt);
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
  Result<PullJob::Outcome> pull(transport::Engine& engine, PullRequest request) {
    boost::asio::io_context io;
    WorkerPool digests("digest", 2, 16), blocking("blocking", 2, 16);
    PullEnvironment environment;
    environment.executor = io.get_executor();
    environment.store = store_.get();
    environment.engine = &engine;
    environment.digest_pool = &digests;
    environment.blocking_pool = &blocking;
    environment.coordinator = [] { return nullptr; };
    environment.coordinator_problem = [] { return Error(ErrorCode::kUnavailable, "nobody"); };
    PullJob job(environment, std::move(request), {});
    std::optional<Result<PullJob::Outcome>> outcome;
    boost::asio::co_spawn(
        io, [&]() -> rpc::Task<void> { outcome = co_await job.run(); }, boost::asio::detached);
    io.run();
    return std::move(*outcome);
  }
};

// Cancelled for it, every try would end like the first, and the pull without its bytes.
TEST_F(PullJobTest, AWordOfStarvationFromBeforeTheLastPathsEndsNoTransfer) {
  LateEngine engine;
  PullRequest request;
  request.ref = *ModelRef::parse("org/model@1");
  request.fallback = source_path();
  const auto outcome = pull(engine, std::move(request));
  ASSERT_TRUE(outcome) << outcome.error().message();
  EXPECT_EQ(outcome->stored->manifest.checkpoint->root, checkpoint()->root);
  EXPECT_EQ(engine.cancels, 0);
}

}  // namespace
}  // namespace rekindle::pull
