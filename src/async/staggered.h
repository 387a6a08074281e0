#pragma once

#include <cstddef>
#include <exception>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <boost/asio/this_coro.hpp>

#include "src/async/task.h"
#include "src/async/task_group.h"
#include "src/base/clock.h"
#include "src/base/result.h"

namespace rekindle::async {

// What came of staggered(). `errors` has the failures, by the number of their task.
template <typename T>
struct FirstResult {
  std::optional<T> value;
  // The task that gave the value.
  std::size_t winner = 0;
  std::vector<std::optional<Error>> errors;
};

// Starts the tasks one after the other: the next one as soon as the last one has failed, or has
// taken `head_start`. So one that hangs costs little time, and usually only the first one runs. The
// first success counts and cancels the others. Whatever the tasks refer to must live in the
// caller's frame or longer: this returns when all have ended.
template <typename T>
Task<FirstResult<T>> staggered(std::vector<Task<Result<T>>> tasks, Duration head_start) {
  struct State {
    State(const boost::asio::any_io_executor& executor, std::size_t count) : news(executor) {
      result.errors.resize(count);
    }
    bool open() const { return !result.value && failed < started; }
    FirstResult<T> result;
    std::size_t started = 0;
    std::size_t failed = 0;
    Notifier news;
  };
  const auto run = [](std::shared_ptr<State> state, std::size_t number,
                      Task<Result<T>> task) -> Task<void> {
    std::optional<Result<T>> outcome;
    try {
      outcome = co_await std::move(task);
    } catch (const std::exception& error) {
      outcome = fail(ErrorCode::kInternal, "{}", error.what());
    }
    // After the first success the others are cancelled: that is no failure.
    if (state->result.value) co_return;
    if (!*outcome) {
      ++state->failed;
      state->result.errors[number] = std::move(*outcome).error();
    } else {
      state->result.value = std::move(**outcome);
      state->result.winner = number;
    }
    state->news.notify();
  };
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  const auto executor = co_await boost::asio::this_coro::executor;
  const auto state = std::make_shared<State>(executor, tasks.size());
  TaskGroup running(executor);
  bool cancelled = co_await is_cancelled();
  for (std::size_t i = 0; i < tasks.size() && !cancelled && !state->result.value; ++i) {
    ++state->started;
    running.spawn("staggered", run(state, i, std::move(tasks[i])));
    const TimePoint next = i + 1 < tasks.size() ? steady_now() + head_start : TimePoint::max();
    while (!cancelled && state->open() && steady_now() < next) {
      const bool last = next == TimePoint::max();
      if (!last && state->result.errors[i]) break;
      co_await state->news.wait_until(next);
      cancelled = co_await is_cancelled();
    }
  }
  // They end at once: each of them is cancelled.
  co_await running.close(std::chrono::minutes(1));
  co_return std::move(state->result);
}

}  // namespace rekindle::async
