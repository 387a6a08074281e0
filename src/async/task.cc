#include "src/async/task.h"

#include <boost/asio/redirect_error.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/this_coro.hpp>
#include <boost/asio/use_awaitable.hpp>

#include "src/base/clock.h"

namespace rekindle::async {

Task<bool> is_cancelled() {
  const auto state = co_await boost::asio::this_coro::cancellation_state;
  co_return state.cancelled() != boost::asio::cancellation_type::none;
}

Task<void> sleep_for(Duration duration) { co_await sleep_until(steady_now() + duration); }

Task<void> sleep_until(TimePoint deadline) {
  boost::asio::steady_timer timer(co_await boost::asio::this_coro::executor, deadline);
  boost::system::error_code woken;
  co_await timer.async_wait(boost::asio::redirect_error(boost::asio::use_awaitable, woken));
}

Task<void> Notifier::wait_until(TimePoint deadline) {
  boost::asio::steady_timer timer(executor_, deadline);
  const auto entry = waiting_.insert(waiting_.end(), &timer);
  boost::system::error_code woken;
  co_await timer.async_wait(boost::asio::redirect_error(boost::asio::use_awaitable, woken));
  waiting_.erase(entry);
}

}  // namespace rekindle::async
