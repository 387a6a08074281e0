#pragma once

#include <functional>
#include <memory>
#include <type_traits>
#include <utility>

#include <boost/asio/associated_executor.hpp>
#include <boost/asio/async_result.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/use_awaitable.hpp>

#include "src/async/task.h"
#include "src/base/worker_pool.h"

namespace rekindle::async {

// Runs a blocking call on `pool` and resumes the coroutine on its own executor with the result:
//   auto stored = co_await offload(pool, [&] { return store.begin(...); });
// Cancelling the coroutine does not cancel the call: whatever the call captures must outlive it.
template <typename Function>
auto offload(WorkerPool& pool, Function function) -> Task<std::invoke_result_t<Function>> {
  using Value = std::invoke_result_t<Function>;
  auto initiate = [&pool](auto handler, Function body) {
    // std::function copies, and a handler can only be moved.
    auto shared_handler = std::make_shared<decltype(handler)>(std::move(handler));
    auto shared_body = std::make_shared<Function>(std::move(body));
    auto executor = boost::asio::get_associated_executor(*shared_handler);
    auto job = [shared_handler, shared_body, executor] {
      auto value = std::make_shared<Value>((*shared_body)());
      boost::asio::post(
          executor, [shared_handler, value] { std::move (*shared_handler)(std::move(*value)); });
    };
    if (!pool.try_submit(job)) pool.submit(job);
  };
  co_return co_await boost::asio::async_initiate<const boost::asio::use_awaitable_t<>, void(Value)>(
      initiate, boost::asio::use_awaitable, std::move(function));
}

}  // namespace rekindle::async
