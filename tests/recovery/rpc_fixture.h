#pragma once

#include <chrono>
#include <exception>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/as_tuple.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/this_coro.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <gtest/gtest.h>

#include "recovery/rpc/credentials.h"
#include "recovery/rpc/rpc.h"

namespace rekindle::rpc::testing {

using namespace std::chrono_literals;

// Every test waits at most this long for anything; it is far more than any of them needs.
inline constexpr std::chrono::seconds kTestDeadline{30};

using rpc::make_identity;
// secret: "" for none.
inline Identity make_identity(proto::Role role, std::string node_id, const std::string& secret) {
  return make_identity(role, std::move(node_id),
                       secret.empty() ? nullptr : Credentials::of_secret(secret));
}

// An io_context that the test thread runs while it waits for a task.
class Loop {
 public:
  ~Loop() { io_.stop(); }

  boost::asio::io_context& io() { return io_; }
  boost::asio::any_io_executor executor() { return io_.get_executor(); }

  template <typename T>
  T run(async::Task<T> task) {
    std::optional<T> result;
    std::exception_ptr failed;
    bool done = false;
    boost::asio::co_spawn(io_, std::move(task), [&](std::exception_ptr exception, T value) {
      failed = exception;
      result.emplace(std::move(value));
      done = true;
    });
    run_until([&] { return done; });
    if (failed) std::rethrow_exception(failed);
    return std::move(*result);
  }

  void run(async::Task<void> task) {
    std::exception_ptr failed;
    bool done = false;
    boost::asio::co_spawn(io_, std::move(task), [&](std::exception_ptr exception) {
      failed = exception;
      done = true;
    });
    run_until([&] { return done; });
    if (failed) std::rethrow_exception(failed);
  }

  template <typename Condition>
  void run_until(Condition condition) {
    const auto deadline = std::chrono::steady_clock::now() + kTestDeadline;
    while (!condition()) {
      if (std::chrono::steady_clock::now() > deadline) throw std::runtime_error("test deadline");
      io_.restart();
      io_.run_one_for(50ms);
    }
  }

 private:
  boost::asio::io_context io_;
};

inline async::Task<void> sleep_for(std::chrono::milliseconds duration) {
  boost::asio::steady_timer timer(co_await boost::asio::this_coro::executor, duration);
  co_await timer.async_wait(boost::asio::use_awaitable);
}

}  // namespace rekindle::rpc::testing
