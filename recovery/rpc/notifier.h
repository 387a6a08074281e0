#pragma once

#include <chrono>
#include <list>

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>

#include "recovery/rpc/rpc.h"
#include "src/base/clock.h"

namespace rekindle::rpc {

// Coroutines that wait until something has changed, each at most until its own time. On the
// executor's one thread; outlives its waiters.
class Notifier {
 public:
  explicit Notifier(boost::asio::any_io_executor executor) : executor_(std::move(executor)) {}

  Task<void> wait_until(TimePoint deadline) {
    boost::asio::steady_timer timer(executor_, deadline);
    const auto entry = waiting_.insert(waiting_.end(), &timer);
    boost::system::error_code woken;
    co_await timer.async_wait(boost::asio::redirect_error(boost::asio::use_awaitable, woken));
    waiting_.erase(entry);
  }
  void notify() {
    for (auto* timer : waiting_) timer->cancel();
  }

 private:
  const boost::asio::any_io_executor executor_;
  std::list<boost::asio::steady_timer*> waiting_;
};

}  // namespace rekindle::rpc
