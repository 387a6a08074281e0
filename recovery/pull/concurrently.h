#pragma once

#include <cstddef>
#include <exception>
#include <list>
#include <memory>
#include <utility>
#include <vector>

#include <boost/asio/bind_cancellation_slot.hpp>
#include <boost/asio/cancellation_signal.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/this_coro.hpp>
#include <boost/asio/use_awaitable.hpp>

#include "recovery/pull/wait.h"
#include "recovery/rpc/rpc.h"

namespace rekindle::pull {

inline rpc::Task<void> told_of_cancellation(rpc::Task<void> task) {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  co_await std::move(task);
}

// Runs all tasks at once on the current executor and returns when each has ended. Each task bounds
// its own time; a cancelled caller cancels them. What the tasks refer to must live in the caller's
// frame or longer.
inline rpc::Task<void> run_all(std::vector<rpc::Task<void>> tasks) {
  auto executor = co_await boost::asio::this_coro::executor;
  struct State {
    explicit State(const boost::asio::any_io_executor& where)
        : done(where, boost::asio::steady_timer::time_point::max()) {}
    std::size_t open = 0;
    boost::asio::steady_timer done;
    std::list<boost::asio::cancellation_signal> cancels;  // one per task
  };
  auto state = std::make_shared<State>(executor);
  state->open = tasks.size();
  for (auto& task : tasks) {
    auto& cancel = state->cancels.emplace_back();
    boost::asio::co_spawn(
        executor, told_of_cancellation(std::move(task)),
        boost::asio::bind_cancellation_slot(cancel.slot(), [state](const std::exception_ptr&) {
          if (--state->open == 0) state->done.cancel();
        }));
  }
  bool told = false;
  while (state->open > 0) {
    boost::system::error_code woken;  // cancel() is how this timer fires
    co_await state->done.async_wait(boost::asio::redirect_error(boost::asio::use_awaitable, woken));
    const bool cancelled = co_await is_cancelled();
    if (!cancelled || std::exchange(told, true)) continue;
    for (auto& cancel : state->cancels) cancel.emit(boost::asio::cancellation_type::terminal);
  }
}

}  // namespace rekindle::pull
