#include "recovery/worker/update_calls.h"

#include <algorithm>
#include <utility>

#include <boost/asio/this_coro.hpp>

#include "src/async/task.h"

namespace rekindle::worker {

namespace {

constexpr std::size_t kMostUpdates = 256;  // of one worker
constexpr std::chrono::milliseconds kStatusWait{1000};
constexpr std::chrono::milliseconds kStatusRetry{250};
constexpr std::chrono::milliseconds kDefaultUpdate{600'000};

// The coordinator may answer later.
bool may_answer_later(const Error& error) {
  return error.code() == ErrorCode::kUnavailable || error.code() == ErrorCode::kPeerLost ||
         error.code() == ErrorCode::kTimeout;
}

}  // namespace

Result<void> UpdateCalls::begin(const std::shared_ptr<Client>& client,
                                const proto::WorkerFrame& frame) {
  std::size_t& under_way = under_way_[client->id()];
  if (under_way >= kMostUpdates) {
    return fail(ErrorCode::kExhausted, "this worker has {} calls under way", under_way);
  }
  ++under_way;
  tasks_.spawn("worker.update", run(client, frame));
  return {};
}

async::Task<void> UpdateCalls::run(std::shared_ptr<Client> client, proto::WorkerFrame frame) {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  const std::chrono::milliseconds asked(frame.deadline_ms());
  const auto give_up = steady_now() + (asked.count() > 0 ? asked : kDefaultUpdate);
  auto order = from_proto(frame.update());
  Result<proto::Updated> updated = proto::Updated();
  if (order) {
    auto running = update(client, std::move(*order), give_up);
    updated = co_await std::move(running);
  } else {
    updated = fail(std::move(order).error());
  }
  const auto under_way = under_way_.find(client->id());
  if (--under_way->second == 0) under_way_.erase(under_way);
  if (!updated) co_return client->send(error_frame(frame.call(), 0, updated.error()));
  proto::AgentFrame answer;
  answer.set_call(frame.call());
  *answer.mutable_updated() = std::move(*updated);
  client->send(answer);
}

async::Task<Result<proto::Updated>> UpdateCalls::update(std::shared_ptr<Client> client,
                                                        UpdateOrder order, TimePoint give_up) {
  CO_TRY(const std::uint64_t round,
         co_await fleet_.begin_update(order.id, order.group, order.gather));
  while (!client->closed() && !co_await async::is_cancelled()) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(give_up - steady_now());
    if (left.count() <= 0) {
      co_return fail(ErrorCode::kTimeout, "the update to {} goes on; see `rekindle status`",
                     order.id.to_string());
    }
    const auto status = co_await fleet_.update_status(round, std::min(left, kStatusWait));
    if (status) {
      if (status->phase() == "over") co_return updated_from(*status);
      continue;
    }
    // Another coordinator has taken over, which knows nothing of the update.
    if (!may_answer_later(status.error())) {
      co_return fail(ErrorCode::kUnavailable,
                     "the outcome of the update to {} is unknown: {}; see `rekindle status`",
                     order.id.to_string(), status.error().message());
    }
    co_await async::sleep_for(kStatusRetry);
  }
  co_return fail(ErrorCode::kPeerLost, "nobody waits for the update to {} any more",
                 order.id.to_string());
}

}  // namespace rekindle::worker
