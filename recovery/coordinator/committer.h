#pragma once

#include <exception>
#include <functional>
#include <list>
#include <optional>
#include <utility>

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/thread_pool.hpp>
#include <boost/asio/use_awaitable.hpp>

#include "recovery/coordinator/core/core.h"
#include "recovery/coordinator/durable_store.h"
#include "recovery/coordinator/state_records.h"
#include "recovery/rpc/rpc.h"
#include "src/async/notifier.h"

namespace rekindle::coordinator {

// Runs a call that blocks on `thread`; the result comes back to the caller's executor. An exception
// of the call (an answer of etcd that has another shape) becomes kInternal.
template <typename T>
async::Task<Result<T>> run_blocking(boost::asio::thread_pool& thread,
                                    std::function<Result<T>()> call) {
  auto there = [](std::function<Result<T>()> work) -> async::Task<Result<T>> {
    try {
      co_return work();
    } catch (const std::exception& error) {
      co_return fail(ErrorCode::kInternal, "{}", error.what());
    }
  };
  auto task = there(std::move(call));
  co_return co_await boost::asio::co_spawn(thread, std::move(task), boost::asio::use_awaitable);
}

// Writes the core's batches, one after the other, on a thread of the store's own, and tells those
// that wait for them. Everything else is on the executor's one thread.
class Committer {
 public:
  // `lost`: a write has shown that another coordinator leads, or nothing can be written any more.
  Committer(const boost::asio::any_io_executor& executor, boost::asio::thread_pool& thread,
            Core& core, StateRecords records, DurableStore& store,
            std::function<void(const Error&)> lost);

  // Until it is cancelled, or writing throws: then all that wait, and who comes later, get
  // kInternal. One at a time.
  async::Task<void> run();
  // The end of a commit (0: success at once). An error: it may or may not have become durable.
  async::Task<Result<void>> wait(CommitNumber commit);
  // Time has passed in the core: it may have staged a batch that no call waits for.
  void wake() { work_.notify(); }
  // Why nothing can be written any more.
  const std::optional<Error>& broken() const { return broken_; }

 private:
  struct Waiter {
    CommitNumber commit = 0;
    bool ended = false;
    Result<void> outcome;
  };
  async::Task<void> write_batches();
  void end(CommitNumber through, const Result<void>& outcome);

  boost::asio::thread_pool& thread_;
  Core& core_;
  StateRecords records_;
  DurableStore& store_;
  const std::function<void(const Error&)> lost_;
  async::Notifier work_;
  async::Notifier ended_;
  std::list<Waiter> waiters_;
  std::optional<Error> broken_;  // why nothing is written any more
};

}  // namespace rekindle::coordinator
