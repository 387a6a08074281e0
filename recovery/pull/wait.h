#pragma once

#include <chrono>

#include <boost/asio/redirect_error.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/this_coro.hpp>
#include <boost/asio/use_awaitable.hpp>

#include "recovery/rpc/rpc.h"

// Waiting in coroutines that are told of their cancellation instead of being torn down by it
// (this_coro::throw_if_cancelled(false)): they still have something to drain or to keep.
namespace rekindle::pull {

inline rpc::Task<bool> is_cancelled() {
  const auto state = co_await boost::asio::this_coro::cancellation_state;
  co_return state.cancelled() != boost::asio::cancellation_type::none;
}

// Ends early when cancelled.
inline rpc::Task<void> sleep_for(std::chrono::milliseconds duration) {
  boost::asio::steady_timer timer(co_await boost::asio::this_coro::executor, duration);
  boost::system::error_code woken;
  co_await timer.async_wait(boost::asio::redirect_error(boost::asio::use_awaitable, woken));
}

}  // namespace rekindle::pull
