#pragma once

#include <chrono>
#include <cstddef>
#include <exception>
#include <list>
#include <memory>
#include <string_view>
#include <utility>

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/as_tuple.hpp>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/bind_cancellation_slot.hpp>
#include <boost/asio/cancellation_signal.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/system/system_error.hpp>

#include "src/base/log.h"

namespace rekindle::rpc {

// Coroutines that run on their own and are awaited together: spawn() any number, then close()
// cancels and waits for all of them. On the executor's one thread. A coroutine that throws is
// logged; cancellation is no error.
class TaskGroup {
 public:
  explicit TaskGroup(boost::asio::any_io_executor executor)
      : state_(std::make_shared<State>(std::move(executor))) {}
  TaskGroup(const TaskGroup&) = delete;
  TaskGroup& operator=(const TaskGroup&) = delete;
  ~TaskGroup() { state_->cancel(); }

  // `name` for logs; a literal. After close() nothing is started any more.
  void spawn(std::string_view name, boost::asio::awaitable<void> task) {
    if (state_->closed) return;
    const auto entry = state_->running.emplace(state_->running.end());
    boost::asio::co_spawn(
        state_->executor, std::move(task),
        boost::asio::bind_cancellation_slot(
            entry->slot(), [state = state_, entry, name](const std::exception_ptr& exception) {
              report(name, exception);
              // Posted: the slot is in use until the coroutine has fully ended.
              boost::asio::post(state->executor, [state, entry] {
                state->running.erase(entry);
                if (state->running.empty()) state->all_ended.cancel();
              });
            }));
  }

  std::size_t size() const { return state_->running.size(); }
  void cancel() { state_->cancel(); }

  // Cancels and waits; false when some still run at the deadline (they keep what they captured).
  boost::asio::awaitable<bool> close(std::chrono::milliseconds deadline) {
    const auto state = state_;
    state->closed = true;
    state->cancel();
    state->all_ended.expires_after(deadline);
    if (!state->running.empty()) {
      co_await state->all_ended.async_wait(boost::asio::as_tuple(boost::asio::use_awaitable));
    }
    co_return state->running.empty();
  }

 private:
  struct State {
    explicit State(boost::asio::any_io_executor on)
        : executor(std::move(on)), all_ended(executor) {}
    void cancel() {
      for (auto& signal : running) signal.emit(boost::asio::cancellation_type::terminal);
    }
    boost::asio::any_io_executor executor;
    std::list<boost::asio::cancellation_signal> running;
    boost::asio::steady_timer all_ended;
    bool closed = false;
  };

  static void report(std::string_view name, const std::exception_ptr& exception) {
    if (!exception) return;
    try {
      std::rethrow_exception(exception);
    } catch (const boost::system::system_error& error) {
      if (error.code() == boost::asio::error::operation_aborted) return;
      log::error("task.failed", "task", name, "error", error.what());
    } catch (const std::exception& error) {
      log::error("task.failed", "task", name, "error", error.what());
    }
  }

  std::shared_ptr<State> state_;
};

}  // namespace rekindle::rpc
