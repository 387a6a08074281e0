#pragma once

#include <list>

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/steady_timer.hpp>

#include "src/async/task.h"

namespace rekindle::async {

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
