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
#include "recovery/coordinator/state_records.h"
#include "recovery/rpc/rpc.h"
#include "src/async/task.h"

namespace rekindle::coordinator {

// Runs a blocking call on `thread` and returns its result on the caller's executor. An exception of
// the call becomes kInternal: etcd's answer had another shape.
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

// Writes the core's batches, one after the other, on the store's own thread, and resumes the calls
// that wait for them. Everything else runs on the executor's one thread.
class Committer {
 public:
  // Calls `lost` when a write shows that another coordinator leads, or when writing has become
  // impossible.
  Committer(const boost::asio::any_io_executor& executor, boost::asio::thread_pool& thread,
            Core& core, StateRecords records, DurableStore& store,
            std::function<void(const Error&)> lost);

  // Runs until it is cancelled or writing throws. After that every call that waits, now or later,
  // gets kInternal. One at a time.
  async::Task<void> run();
  // Waits for the end of a commit (0: success at once). After an error the commit may or may not be
  // durable.
  async::Task<Result<void>> wait(CommitNumber commit);
  // Time has passed in the core, which may have staged a batch that no call waits for.
  void wake() { work_.notify(); }
  // The reason why writing has become impossible.
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
  std::optional<Error> broken_;
};

}  // namespace rekindle::coordinator
