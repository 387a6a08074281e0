#pragma once

#include <cstddef>
#include <exception>
#include <memory>
#include <utility>
#include <vector>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/this_coro.hpp>
#include <boost/asio/use_awaitable.hpp>

#include "recovery/rpc/rpc.h"

namespace rekindle::pull {

// Runs all tasks at once on the current executor and returns when each has ended. Each task bounds
// its own time. What the tasks refer to must live in the caller's frame or longer.
inline rpc::Task<void> run_all(std::vector<rpc::Task<void>> tasks) {
  auto executor = co_await boost::asio::this_coro::executor;
  struct State {
    explicit State(boost::asio::any_io_executor where)
        : done(std::move(where), boost::asio::steady_timer::time_point::max()) {}
    std::size_t open = 0;
    boost::asio::steady_timer done;
  };
  auto state = std::make_shared<State>(executor);
  state->open = tasks.size();
  for (auto& task : tasks) {
    boost::asio::co_spawn(executor, std::move(task), [state](const std::exception_ptr&) {
      if (--state->open == 0) state->done.cancel();
    });
  }
  while (state->open > 0) {
    boost::system::error_code cancelled;  // the way this timer fires
    co_await state->done.async_wait(
        boost::asio::redirect_error(boost::asio::use_awaitable, cancelled));
  }
}

}  // namespace rekindle::pull
