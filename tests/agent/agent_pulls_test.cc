#include "recovery/agent/agent_pulls.h"

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/io_context.hpp>
#include <gtest/gtest.h>

#include "recovery/pull/direct_reads.h"
#include "src/async/task.h"

namespace rekindle::agent {
namespace {

using Outcome = SharedPulls::Outcome;
using std::chrono::milliseconds;

pull::PullRequest whole(std::uint64_t version) {
  pull::PullRequest request;
  request.ref = {"m", version};
  return request;
}

std::shared_ptr<const Layout> small_layout() {
  const auto tensors = *TensorSet::create({{"w", DType::kU8, {4}}});
  const std::vector<TensorBox> boxes{{0, Box::whole({4})}};
  return std::make_shared<const Layout>(pack_layout(tensors, boxes, 1 << 20)->layout);
}

class SharedPullsTest : public ::testing::Test {
 protected:
  // A pull that begins, then runs until it is told how it ends.
  SharedPulls::Run run() {
    return [this](pull::PullRequest request, pull::OnProgress progress,
                  pull::PullWatch watch) -> async::Task<Result<Outcome>> {
      ++runs_;
      if (watch.on_begun) watch.on_begun({nullptr, small_layout(), nullptr, {}});
      is_held_ = watch.held;
      held_changed_ = watch.held_changed;
      direct_ = watch.direct;
      while (!end_) {
        if (progress) progress({});
        co_await async::sleep_for(milliseconds(5));
      }
      if (*end_) co_return fail(Error(**end_));
      Outcome outcome;
      outcome.summary.id = {request.ref.model, *request.ref.version};
      outcome.summary.fetched_bytes = 7;
      co_return outcome;
    };
  }
  struct Caller {
    int begun = 0;
    int updates = 0;
    std::optional<Result<Outcome>> outcome;
  };
  void start(pull::PullRequest request, Caller& caller, std::function<bool()> held = {},
             std::shared_ptr<async::Notifier> held_changed = {},
             std::shared_ptr<pull::DirectReads> direct = {}) {
    auto task = [](SharedPullsTest* self, pull::PullRequest what, Caller* who,
                   std::function<bool()> holds, std::shared_ptr<async::Notifier> changed,
                   std::shared_ptr<pull::DirectReads> reads) -> async::Task<void> {
      pull::PullWatch watch;
      watch.direct = std::move(reads);
      watch.held = std::move(holds);
      watch.held_changed = std::move(changed);
      watch.on_begun = [who](pull::Arriving) { ++who->begun; };
      pull::OnProgress progress = [who](const pull::Progress&) { ++who->updates; };
      who->outcome = co_await self->pulls_.pull(std::move(what), std::move(progress),
                                                std::move(watch), self->run());
    };
    boost::asio::co_spawn(context_,
                          task(this, std::move(request), &caller, std::move(held),
                               std::move(held_changed), std::move(direct)),
                          boost::asio::detached);
  }
  // Until `done`, at most for as long as a test may wait.
  void work_until(const std::function<bool()>& done) {
    const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (!done() && std::chrono::steady_clock::now() < give_up) {
      context_.run_one_for(milliseconds(10));
      context_.restart();
    }
    ASSERT_TRUE(done());
  }

  boost::asio::io_context context_;
  SharedPulls pulls_;
  int runs_ = 0;
  // Of the pull that runs.
  std::function<bool()> is_held_;
  std::shared_ptr<async::Notifier> held_changed_;
  std::shared_ptr<pull::DirectReads> direct_;
  // How the pull that runs ends.
  std::optional<std::optional<Error>> end_;
};

TEST_F(SharedPullsTest, IsHeldOnlyWhileAllThatWantItSaySo) {
  Caller first, second, third;
  bool first_holds = true, second_holds = true;
  start(whole(1), first, [&] { return first_holds; });
  work_until([&] { return first.begun == 1; });
  EXPECT_TRUE(is_held_());
  start(whole(1), second, [&] { return second_holds; });
  work_until([&] { return second.begun == 1; });
  EXPECT_TRUE(is_held_());
  second_holds = false;
  EXPECT_FALSE(is_held_());
  second_holds = true;
  EXPECT_TRUE(is_held_());
  // It never wants the pull to wait.
  start(whole(1), third);
  work_until([&] { return third.begun == 1; });
  EXPECT_FALSE(is_held_());
  end_ = std::optional<Error>();
  work_until([&] { return first.outcome && second.outcome && third.outcome; });
  EXPECT_EQ(runs_, 1);
}

TEST_F(SharedPullsTest, OnlyAPullThatNobodyFollowsReadsDirectly) {
  std::string over_of_second;
  const auto reads = [this](std::function<void(const std::string&)> over) {
    return std::make_shared<pull::DirectReads>(
        context_.get_executor(),
        pull::DirectReads::Answers{.landed = [](std::size_t) {}, .over = std::move(over)});
  };
  const auto of_first = reads([](const std::string&) {});
  const auto of_second = reads([&](const std::string& why) { over_of_second = why; });
  Caller first, second;
  start(whole(1), first, {}, {}, of_first);
  work_until([&] { return first.begun == 1; });
  EXPECT_EQ(direct_, of_first);
  EXPECT_FALSE(of_first->ended());
  start(whole(1), second, {}, {}, of_second);
  work_until([&] { return second.begun == 1; });
  EXPECT_NE(over_of_second, "") << "its session is served another way";
  EXPECT_TRUE(of_first->ended()) << "the second does not wait for the first one's GPU";
  EXPECT_FALSE(of_first->is_over()) << "the pull says when";
  end_ = std::optional<Error>();
  work_until([&] { return first.outcome && second.outcome; });
}

TEST_F(SharedPullsTest, ThePullIsNotifiedWhenAnyCallerChangesItsMind) {
  Caller first, second;
  bool first_holds = true, second_holds = true;
  const auto first_changed = std::make_shared<async::Notifier>(context_.get_executor());
  const auto second_changed = std::make_shared<async::Notifier>(context_.get_executor());
  start(
      whole(1), first, [&] { return first_holds; }, first_changed);
  work_until([&] { return first.begun == 1; });
  start(
      whole(1), second, [&] { return second_holds; }, second_changed);
  work_until([&] { return second.begun == 1; });
  ASSERT_NE(held_changed_, nullptr);
  int woken = 0;
  const auto wait = [&]() -> async::Task<void> {
    while (is_held_()) co_await held_changed_->wait_until(steady_now() + std::chrono::minutes(1));
    ++woken;
  };
  for (auto* changed : {&first, &second}) {
    first_holds = second_holds = true;
    boost::asio::co_spawn(context_, wait(), boost::asio::detached);
    context_.poll();
    context_.restart();
    (changed == &first ? first_holds : second_holds) = false;
    (changed == &first ? first_changed : second_changed)->notify();
    const int before = woken;
    work_until([&] { return woken == before + 1; });
  }
  end_ = std::optional<Error>();
  work_until([&] { return first.outcome && second.outcome; });
}

TEST_F(SharedPullsTest, APullOfACallerThatCannotNotifyLooksByItself) {
  Caller first;
  start(whole(1), first, [] { return true; });
  work_until([&] { return first.begun == 1; });
  EXPECT_EQ(held_changed_, nullptr);
  end_ = std::optional<Error>();
  work_until([&] { return first.outcome.has_value(); });
}

TEST_F(SharedPullsTest, OneThatNobodyHoldsIsNotHeldByWhoComesLater) {
  Caller first, second;
  start(whole(1), first);
  work_until([&] { return first.begun == 1; });
  start(whole(1), second, [] { return true; });
  work_until([&] { return second.begun == 1; });
  EXPECT_FALSE(is_held_());
  end_ = std::optional<Error>();
  work_until([&] { return first.outcome && second.outcome; });
}

TEST_F(SharedPullsTest, WhoComesLaterSeesWhatTheFirstBringsAndHasItsCopy) {
  Caller first, second;
  start(whole(1), first);
  work_until([&] { return first.begun == 1; });
  start(whole(1), second);
  work_until([&] { return second.begun == 1 && second.updates > 0; });
  end_ = std::optional<Error>();
  work_until([&] { return first.outcome && second.outcome; });
  EXPECT_EQ(runs_, 1);
  ASSERT_TRUE(*first.outcome && *second.outcome);
  EXPECT_EQ((*second.outcome)->summary.id, (ModelVersion{"m", 1}));
  EXPECT_EQ((*first.outcome)->summary.fetched_bytes, 7u);
  EXPECT_EQ((*second.outcome)->summary.fetched_bytes, 0u) << "it fetched nothing itself";
}

TEST_F(SharedPullsTest, WhenTheFirstFailsTheNextRunsForItself) {
  Caller first, second;
  start(whole(1), first);
  start(whole(1), second);
  work_until([&] { return first.begun == 1; });
  end_ = Error(ErrorCode::kUnavailable, "interrupted");
  work_until([&] { return first.outcome.has_value(); });
  EXPECT_FALSE(*first.outcome);
  end_.reset();
  work_until([&] { return runs_ == 2; });
  end_ = std::optional<Error>();
  work_until([&] { return second.outcome.has_value(); });
  EXPECT_TRUE(*second.outcome);
}

TEST_F(SharedPullsTest, OtherVersionsShardsAndLatestAreNotShared) {
  Caller callers[4];
  start(whole(1), callers[0]);
  start(whole(2), callers[1]);
  auto shard = whole(1);
  shard.shard = "tp=0/2";
  start(shard, callers[2]);
  auto direct = whole(1);
  direct.from = {"a:1"};
  start(direct, callers[3]);
  work_until([&] { return runs_ == 4; });
  end_ = std::optional<Error>();
  for (const Caller& caller : callers) work_until([&] { return caller.outcome.has_value(); });
}

}  // namespace
}  // namespace rekindle::agent
