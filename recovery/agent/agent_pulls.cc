#include "recovery/agent/agent_pulls.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include <boost/asio/this_coro.hpp>

#include "recovery/pull/direct_reads.h"
#include "recovery/pull/pull_metrics.h"
#include "src/async/task.h"
#include "src/async/task_group.h"
#include "src/base/clock.h"
#include "src/base/log.h"

namespace rekindle::agent {

using async::Task;
using pull::OnProgress;
using pull::PullRequest;
using pull::PullWatch;

namespace {

// Gives a coordinator that is just being reached a moment. Without it the job decides what to do.
constexpr std::chrono::milliseconds kWaitForCoordinator{3000};

}  // namespace

// One pull that runs, as its leader reports it and its followers see it.
class SharedPulls::Running {
 public:
  enum class State { kBeginning, kArriving, kSucceeded, kFailed };

  explicit Running(boost::asio::any_io_executor executor)
      : executor_(executor),
        held_changed_(std::make_shared<async::Notifier>(executor)),
        changed_(executor) {}

  void begin(pull::Arriving arriving) {
    arriving_ = std::move(arriving);
    state_ = State::kArriving;
    changed_.notify();
  }
  void report(const pull::Progress& progress) {
    progress_ = progress;
    ++updates_;
    changed_.notify();
  }
  void end(std::optional<Outcome> outcome) {
    outcome_ = std::move(outcome);
    state_ = outcome_ ? State::kSucceeded : State::kFailed;
    changed_.notify();
  }

  bool over() const { return state_ == State::kSucceeded || state_ == State::kFailed; }
  const std::optional<pull::Arriving>& arriving() const { return arriving_; }
  const std::optional<pull::Progress>& progress() const { return progress_; }
  std::uint64_t updates() const { return updates_; }
  const std::optional<Outcome>& outcome() const { return outcome_; }
  Task<void> wait_for_change() { return changed_.wait_until(TimePoint::max()); }

  // One caller's wish that the pull waits, as its `held` says. A caller without `held` has none.
  class Holder {
   public:
    Holder(std::shared_ptr<Running> running, const PullWatch& watch)
        : running_(std::move(running)),
          at_(running_->holders_.insert(running_->holders_.end(), watch.held)),
          forwarding_(running_->executor_) {
      if (watch.held_changed != nullptr) {
        forwarding_.spawn("pull.held", forward(watch.held_changed, running_->held_changed_));
      }
      running_->held_changed_->notify();
    }
    ~Holder() {
      running_->holders_.erase(at_);
      running_->held_changed_->notify();
    }
    Holder(const Holder&) = delete;
    Holder& operator=(const Holder&) = delete;

   private:
    static Task<void> forward(std::shared_ptr<async::Notifier> from,
                              std::shared_ptr<async::Notifier> to) {
      for (;;) {
        co_await from->wait_until(TimePoint::max());
        to->notify();
      }
    }

    const std::shared_ptr<Running> running_;
    const std::list<std::function<bool()>>::iterator at_;
    async::TaskGroup forwarding_;
  };
  // The pull waits only while every caller wants it to.
  bool is_held() const {
    return std::ranges::all_of(holders_, [](const auto& held) { return held && held(); });
  }
  // The session of the leader that the pull reads for directly; null: none. A follower does not
  // wait until that session's GPU has all of its bytes.
  void read_directly(std::shared_ptr<pull::DirectReads> reads) { direct_ = std::move(reads); }
  void end_direct() const {
    if (direct_ != nullptr) direct_->end("another pull waits for the same bytes");
  }
  // Notified when the answer of is_held() may have changed.
  const std::shared_ptr<async::Notifier>& held_changed() const { return held_changed_; }

 private:
  const boost::asio::any_io_executor executor_;
  State state_ = State::kBeginning;
  std::optional<pull::Arriving> arriving_;
  std::optional<pull::Progress> progress_;
  // Of progress_.
  std::uint64_t updates_ = 0;
  std::optional<Outcome> outcome_;
  std::list<std::function<bool()>> holders_;
  const std::shared_ptr<async::Notifier> held_changed_;
  std::shared_ptr<pull::DirectReads> direct_;
  async::Notifier changed_;
};

std::optional<SharedPulls::Key> SharedPulls::key_of(const PullRequest& request) {
  if (!request.ref.version || !request.from.empty() || !request.to.empty()) return std::nullopt;
  return Key{{request.ref.model, *request.ref.version},
             request.shard,
             request.spec_json,
             request.tensors_regex,
             request.transport,
             request.boxes,
             request.root,
             request.encrypt};
}

Task<Result<SharedPulls::Outcome>> SharedPulls::pull(PullRequest request, OnProgress progress,
                                                     PullWatch watch, Run run) {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  const auto key = key_of(request);
  if (!key) co_return co_await run(std::move(request), std::move(progress), std::move(watch));
  for (auto found = running_.find(*key); found != running_.end(); found = running_.find(*key)) {
    CO_TRY(auto outcome, co_await follow(found->second, progress, watch));
    if (outcome) co_return std::move(*outcome);
  }
  co_return co_await lead(*key, std::move(request), std::move(progress), std::move(watch),
                          std::move(run));
}

Task<Result<SharedPulls::Outcome>> SharedPulls::lead(Key key, PullRequest request,
                                                     OnProgress progress, PullWatch watch,
                                                     Run run) {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  const auto running = std::make_shared<Running>(co_await boost::asio::this_coro::executor);
  // Ends the pull for its followers, also when it throws.
  struct Entry {
    SharedPulls& pulls;
    const Key& key;
    Running& running;
    std::optional<Outcome> outcome;
    ~Entry() {
      pulls.running_.erase(key);
      running.end(std::move(outcome));
    }
  } entry{*this, key, *running, std::nullopt};
  running_[key] = running;
  const Running::Holder holder(running, watch);
  OnProgress noted = [running, progress](const pull::Progress& update) {
    running->report(update);
    if (progress) progress(update);
  };
  PullWatch watched;
  watched.on_begun = [running, watch](pull::Arriving arriving) {
    running->begin(arriving);
    if (watch.on_begun) watch.on_begun(std::move(arriving));
  };
  watched.on_place_taken = watch.on_place_taken;
  watched.held = [running] { return running->is_held(); };
  // A caller that cannot notify makes the pull look by itself.
  const bool notifies = !watch.held || watch.held_changed != nullptr;
  if (notifies) watched.held_changed = running->held_changed();
  watched.direct = watch.direct;
  running->read_directly(watch.direct);
  auto outcome = co_await run(std::move(request), std::move(noted), std::move(watched));
  if (outcome) entry.outcome = *outcome;
  co_return outcome;
}

Task<Result<std::optional<SharedPulls::Outcome>>> SharedPulls::follow(
    std::shared_ptr<Running> running, OnProgress progress, PullWatch watch) {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  const Running::Holder holder(running, watch);
  if (watch.direct != nullptr) watch.direct->finish("another pull of the same bytes runs");
  running->end_direct();
  bool begun = false;
  std::uint64_t seen = 0;
  while (true) {
    if (running->arriving() && !std::exchange(begun, true) && watch.on_begun) {
      watch.on_begun(*running->arriving());
    }
    if (running->updates() != seen && progress) progress(*running->progress());
    seen = running->updates();
    if (running->over()) break;
    if (co_await async::is_cancelled()) co_return fail(ErrorCode::kUnavailable, "interrupted");
    co_await running->wait_for_change();
  }
  if (!running->outcome()) co_return std::nullopt;
  // The follower itself fetched nothing.
  Outcome outcome = *running->outcome();
  outcome.summary.fetched_bytes = 0;
  outcome.summary.resumed_bytes = 0;
  outcome.summary.refetched_bytes = 0;
  co_return outcome;
}

Task<Result<AgentPulls::Outcome>> AgentPulls::pull(PullRequest request, OnProgress progress,
                                                   PullWatch watch) {
  SharedPulls::Run alone = [this](PullRequest what, OnProgress shown, PullWatch watched) {
    return pull_alone(std::move(what), std::move(shown), std::move(watched));
  };
  co_return co_await shared_.pull(std::move(request), std::move(progress), std::move(watch),
                                  std::move(alone));
}

Task<Result<AgentPulls::Outcome>> AgentPulls::pull_alone(PullRequest request, OnProgress progress,
                                                         PullWatch watch) {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  pull::PullMetrics* const metrics = environment_.metrics;
  if (metrics != nullptr) metrics->began();
  auto running = run_alone(std::move(request), std::move(progress), std::move(watch));
  auto outcome = co_await std::move(running);
  if (metrics != nullptr && outcome) metrics->succeeded(outcome->summary);
  if (metrics != nullptr && !outcome) metrics->failed(outcome.error());
  co_return outcome;
}

Task<Result<AgentPulls::Outcome>> AgentPulls::run_alone(PullRequest request, OnProgress progress,
                                                        PullWatch watch) {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  pull::PullTimes times;
  if (request.silence.count() > 0) times.silence = request.silence;
  if (parts_.link.configured() && request.from.empty()) {
    // One budget for reaching the coordinator and for its answer.
    const TimePoint began = steady_now();
    (void)co_await parts_.link.wait_connected(kWaitForCoordinator);
    times.resolve -= std::chrono::duration_cast<std::chrono::milliseconds>(steady_now() - began);
  }
  if (request.transport == "verbs" && environment_.handshakes.empty()) {
    co_return fail(ErrorCode::kUnavailable,
                   "--transport verbs: this host has no RDMA device that can be used; `rekindle "
                   "topo` shows why");
  }
  if (request.transport == "verbs" && request.encrypt && !environment_.trusts_rails) {
    co_return fail(ErrorCode::kUnavailable,
                   "--transport verbs with --encrypt: the agent of this host may use rails that "
                   "encrypt nothing; start it with --encrypt and --rail-trusted");
  }
  if (request.ref.version) {
    CO_TRY_VOID(retirement_.check_not_retiring({request.ref.model, *request.ref.version}));
  }
  pull::PullJob job(environment_, std::move(request), std::move(progress), times, std::move(watch));
  CO_TRY(auto outcome, co_await job.run());
  CO_TRY_VOID(co_await sources_.commit(outcome.stored, "pulled"));
  co_return outcome;
}

Task<Result<void>> AgentPulls::fetch_replica(ModelVersion id) {
  PullRequest request;
  request.ref = {id.model, id.version};
  // One copy more in the fleet is not worth one copy less.
  request.make_room = false;
  CO_TRY(const auto outcome, co_await pull(std::move(request), {}));
  log::info("replica.ready", "version", id.to_string(), "fetched_bytes",
            outcome.summary.fetched_bytes);
  co_return Result<void>();
}

Task<Result<pull::PlanSummary>> AgentPulls::plan(PullRequest request) {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  if (parts_.link.configured() && request.from.empty()) {
    (void)co_await parts_.link.wait_connected(kWaitForCoordinator);
  }
  pull::PullJob job(environment_, std::move(request), {});
  co_return co_await job.plan_only();
}

}  // namespace rekindle::agent
