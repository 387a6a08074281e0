#include "recovery/agent/shared_pulls.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include <boost/asio/this_coro.hpp>

#include "src/async/task.h"

namespace rekindle::agent {

using async::Task;
using pull::OnProgress;
using pull::PullRequest;
using pull::PullWatch;

namespace {
constexpr std::chrono::milliseconds kLook{50};
}

bool SharedPulls::is_held(const Running& running) {
  return std::ranges::all_of(running.held, [](const auto& held) { return held && held(); });
}

std::optional<SharedPulls::Key> SharedPulls::key_of(const PullRequest& request) {
  if (!request.ref.version || !request.from.empty() || !request.to.empty()) return std::nullopt;
  return Key{{request.ref.model, *request.ref.version},
             request.shard,
             request.spec_json,
             request.tensors_regex,
             request.transport,
             request.boxes,
             request.root};
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
  const auto running = std::make_shared<Running>();
  // However this ends, who follows is told.
  struct AtEnd {
    SharedPulls& pulls;
    const Key& key;
    Running& running;
    ~AtEnd() {
      running.ended = true;
      pulls.running_.erase(key);
    }
  } const at_end{*this, key, *running};
  running_[key] = running;
  OnProgress noted = [running, progress](const pull::Progress& update) {
    running->progress = update;
    ++running->updates;
    if (progress) progress(update);
  };
  PullWatch watched;
  watched.on_begun = [running, watch](pull::Arriving arriving) {
    running->arriving = arriving;
    if (watch.on_begun) watch.on_begun(std::move(arriving));
  };
  watched.on_place_taken = watch.on_place_taken;
  running->held.push_back(watch.held);
  watched.held = [running] { return is_held(*running); };
  auto outcome = co_await run(std::move(request), std::move(noted), std::move(watched));
  if (outcome) running->outcome = *outcome;
  co_return outcome;
}

Task<Result<std::optional<SharedPulls::Outcome>>> SharedPulls::follow(
    std::shared_ptr<Running> running, OnProgress progress, PullWatch watch) {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  struct Hold {  // what it refers to ends with this caller
    Running& running;
    std::list<std::function<bool()>>::iterator at;
    ~Hold() { running.held.erase(at); }
  } const hold{*running, running->held.insert(running->held.end(), watch.held)};
  bool told = false;
  std::uint64_t seen = 0;
  while (true) {
    if (running->arriving && !std::exchange(told, true) && watch.on_begun) {
      watch.on_begun(*running->arriving);
    }
    if (running->updates != seen && progress) progress(*running->progress);
    seen = running->updates;
    if (running->ended) break;
    if (co_await async::is_cancelled()) co_return fail(ErrorCode::kUnavailable, "interrupted");
    co_await async::sleep_for(kLook);
  }
  if (!running->outcome) co_return std::nullopt;
  Outcome outcome = *running->outcome;
  outcome.summary.fetched_bytes = 0;  // by this one
  outcome.summary.resumed_bytes = 0;
  outcome.summary.refetched_bytes = 0;
  co_return outcome;
}

}  // namespace rekindle::agent
