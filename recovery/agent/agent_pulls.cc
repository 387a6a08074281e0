#include "recovery/agent/agent_pulls.h"

#include <algorithm>
#include <utility>

#include <boost/asio/this_coro.hpp>

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
  pull::PullTimes times;
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
  if (request.ref.version) {
    CO_TRY_VOID(retirement_.check_not_retiring({request.ref.model, *request.ref.version}));
  }
  pull::PullJob job(environment_, std::move(request), std::move(progress), times, std::move(watch));
  CO_TRY(auto outcome, co_await job.run());
  CO_TRY_VOID(co_await serving_.commit(outcome.stored, "pulled"));
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
