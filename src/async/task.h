#pragma once

#include <chrono>
#include <list>

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/steady_timer.hpp>

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

// A condition variable for coroutines: they wait until somebody calls notify(), each at most until
// its own deadline. It must outlive its waiters.
class Notifier {
 public:
  explicit Notifier(boost::asio::any_io_executor executor) : executor_(std::move(executor)) {}

  Task<void> wait_until(TimePoint deadline);
  void notify() {
    for (auto* timer : waiting_) timer->cancel();
  }

 private:
  const boost::asio::any_io_executor executor_;
  std::list<boost::asio::steady_timer*> waiting_;
};

}  // namespace rekindle::async
