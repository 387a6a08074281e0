#include "src/async/task_group.h"

#include <exception>
#include <list>
#include <utility>

#include <boost/asio/bind_cancellation_slot.hpp>
#include <boost/asio/cancellation_signal.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/this_coro.hpp>
#include <boost/system/system_error.hpp>

#include "src/async/task.h"
#include "src/base/clock.h"
#include "src/base/log.h"

namespace rekindle::async {

namespace {

namespace asio = boost::asio;

void report(std::string_view name, const std::exception_ptr& exception) {
  if (!exception) return;
  try {
    std::rethrow_exception(exception);
  } catch (const boost::system::system_error& error) {
    if (error.code() == asio::error::operation_aborted) return;
    log::error("task.failed", "task", name, "error", error.what());
  } catch (const std::exception& error) {
    log::error("task.failed", "task", name, "error", error.what());
  }
}

Task<void> without_throwing(Task<void> task) {
  co_await asio::this_coro::throw_if_cancelled(false);
  co_await std::move(task);
}

}  // namespace

struct TaskGroup::State {
  explicit State(asio::any_io_executor on) : executor(std::move(on)), ended(executor) {}

  asio::any_io_executor executor;
  std::list<asio::cancellation_signal> running;
  Notifier ended;  // notified when `running` has become empty
  bool closed = false;
};

TaskGroup::TaskGroup(asio::any_io_executor executor)
    : state_(std::make_shared<State>(std::move(executor))) {}

void TaskGroup::spawn(std::string_view name, Task<void> task) {
  if (state_->closed) return;
  const auto entry = state_->running.emplace(state_->running.end());
  auto on_end = [state = state_, entry, name](const std::exception_ptr& exception) {
    report(name, exception);
    // Posted, because the slot is in use until the coroutine has fully ended.
    asio::post(state->executor, [state, entry] {
      state->running.erase(entry);
      if (state->running.empty()) state->ended.notify();
    });
  };
  asio::co_spawn(state_->executor, std::move(task),
                 asio::bind_cancellation_slot(entry->slot(), std::move(on_end)));
}

std::size_t TaskGroup::size() const { return state_->running.size(); }

void TaskGroup::cancel() {
  for (auto& signal : state_->running) signal.emit(asio::cancellation_type::terminal);
}

Task<bool> TaskGroup::join(Duration deadline) {
  const auto state = state_;  // the group may be destroyed while this waits
  const TimePoint give_up = steady_now() + deadline;
  while (!state->running.empty() && steady_now() < give_up && !co_await is_cancelled()) {
    co_await state->ended.wait_until(give_up);
  }
  co_return state->running.empty();
}

Task<bool> TaskGroup::close(Duration deadline) {
  const auto state = state_;
  state->closed = true;
  cancel();
  // A cancelled caller waits, too: its coroutines refer to its frame.
  const TimePoint give_up = steady_now() + deadline;
  while (!state->running.empty() && steady_now() < give_up) {
    co_await state->ended.wait_until(give_up);
  }
  co_return state->running.empty();
}

Task<void> run_all(std::vector<Task<void>> tasks) {
  struct State {
    explicit State(const asio::any_io_executor& executor) : done(executor) {}
    std::size_t open = 0;
    Notifier done;
    std::list<asio::cancellation_signal> cancels;  // one per task
  };
  const auto executor = co_await asio::this_coro::executor;
  const auto state = std::make_shared<State>(executor);
  state->open = tasks.size();
  for (auto& task : tasks) {
    auto& cancel = state->cancels.emplace_back();
    asio::co_spawn(executor, without_throwing(std::move(task)),
                   asio::bind_cancellation_slot(cancel.slot(), [state](const std::exception_ptr&) {
                     if (--state->open == 0) state->done.notify();
                   }));
  }
  bool passed_on = false;
  while (state->open > 0) {
    co_await state->done.wait_until(TimePoint::max());
    if (!co_await is_cancelled() || std::exchange(passed_on, true)) continue;
    for (auto& cancel : state->cancels) cancel.emit(asio::cancellation_type::terminal);
  }
}

}  // namespace rekindle::async
