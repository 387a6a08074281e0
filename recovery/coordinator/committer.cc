#include "recovery/coordinator/committer.h"

#include <chrono>
#include <cstdint>
#include <exception>

#include <boost/system/system_error.hpp>

#include "src/base/log.h"

namespace rekindle::coordinator {

namespace {

// A wait without a deadline looks again after this long.
constexpr std::chrono::hours kNextLook{24};

Error broken_by(const std::exception& why) {
  return {ErrorCode::kInternal,
          fmt::format("write the coordinator's state: {}; this coordinator ends its term, start "
                      "it again",
                      why.what())};
}

}  // namespace

Committer::Committer(const boost::asio::any_io_executor& executor, boost::asio::thread_pool& thread,
                     Core& core, StateRecords records, DurableStore& store,
                     std::function<void(const Error&)> lost)
    : thread_(thread),
      core_(core),
      records_(std::move(records)),
      store_(store),
      lost_(std::move(lost)),
      work_(executor),
      ended_(executor) {}

async::Task<void> Committer::run() {
  try {
    co_await write_batches();
  } catch (const boost::system::system_error& error) {
    if (error.code() == boost::asio::error::operation_aborted) throw;
    broken_ = broken_by(error);
  } catch (const std::exception& error) {
    broken_ = broken_by(error);
  }
  // Nobody may wait for ever for a batch that will not be written.
  log::error("coordinator.cannot_write", "error", *broken_);
  end(UINT64_MAX, fail(Error(*broken_)));
  lost_(*broken_);
}

async::Task<void> Committer::write_batches() {
  for (;;) {
    const auto batch = core_.take_batch();
    if (!batch) {
      co_await work_.wait_until(steady_now() + kNextLook);
      continue;
    }
    const std::vector<RecordWrite> writes = records_.encode(batch->change);
    std::exception_ptr thrown;
    const auto write = [this, &writes, &thrown]() -> Result<bool> {
      try {
        TRY_VOID(store_.write(writes));
      } catch (const std::exception&) {
        thrown = std::current_exception();
      }
      return true;
    };
    const Result<bool> written = co_await run_blocking<bool>(thread_, write);
    if (thrown) std::rethrow_exception(thrown);
    Result<void> outcome;
    if (written) {
      records_.note(writes);
    } else {
      outcome = fail(Error(written.error()));
      if (written.error().code() == ErrorCode::kStale) lost_(written.error());
    }
    end(core_.committed(batch->number, written.has_value(), steady_now()), outcome);
  }
}

void Committer::end(CommitNumber through, const Result<void>& outcome) {
  for (Waiter& waiter : waiters_) {
    if (waiter.ended || waiter.commit > through) continue;
    waiter.ended = true;
    waiter.outcome = outcome;
  }
  ended_.notify();
}

async::Task<Result<void>> Committer::wait(CommitNumber commit) {
  if (commit == 0) co_return Result<void>();
  if (broken_) co_return fail(Error(*broken_));
  const auto waiter = waiters_.insert(waiters_.end(), Waiter{commit, false, {}});
  // A cancelled call ends inside the wait.
  struct Leave {
    std::list<Waiter>& waiters;
    std::list<Waiter>::iterator waiter;
    ~Leave() { waiters.erase(waiter); }
  } leave{waiters_, waiter};
  work_.notify();
  while (!waiter->ended) co_await ended_.wait_until(steady_now() + kNextLook);
  co_return waiter->outcome;
}

}  // namespace rekindle::coordinator
