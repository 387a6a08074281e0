#pragma once

#include <chrono>

#include <boost/asio/awaitable.hpp>

#include "src/base/clock.h"

// The toolbox for coroutines on Boost.Asio. Each coroutine, and each object of this directory,
// belongs to one executor with one thread, unless its comment says otherwise.
//
// Asio ends a cancelled coroutine by an exception at its next co_await. A coroutine that has
// something to drain or to keep calls this_coro::throw_if_cancelled(false) first and asks
// is_cancelled() instead.
namespace rekindle::async {

template <typename T>
using Task = boost::asio::awaitable<T>;

// Whether the calling coroutine was cancelled.
Task<bool> is_cancelled();

// Both end early when the calling coroutine is cancelled.
Task<void> sleep_for(Duration duration);
Task<void> sleep_until(TimePoint deadline);

}  // namespace rekindle::async
