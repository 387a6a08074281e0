#include "src/async/notifier.h"

#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>

namespace rekindle::async {

Task<void> Notifier::wait_until(TimePoint deadline) {
  boost::asio::steady_timer timer(executor_, deadline);
  const auto entry = waiting_.insert(waiting_.end(), &timer);
  boost::system::error_code woken;
  co_await timer.async_wait(boost::asio::redirect_error(boost::asio::use_awaitable, woken));
  waiting_.erase(entry);
}

}  // namespace rekindle::async
