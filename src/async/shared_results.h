#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/post.hpp>

#include "src/async/task.h"
#include "src/base/result.h"
#include "src/base/worker_pool.h"

namespace rekindle::async {

// A computation that runs on another thread, as those see it who wait for it.
struct Computation {
  explicit Computation(const boost::asio::any_io_executor& executor) : changed(executor) {}
  bool ended = false;
  Notifier changed;
};
// kUnavailable: the caller was cancelled. kTimeout: it has not ended by then.
Task<Result<void>> wait_for_end(std::shared_ptr<Computation> computation, TimePoint give_up);

// Immutable results that take long to compute, by key. The pool computes a result once for all
// callers that ask for it meanwhile. Results are kept for later callers; the least recently used
// ones go first. Failures are not kept. `Value` is a shared pointer, or cheap to copy like one.
// One executor uses the object. The pool must outlive the object and end before the executor's
// context.
template <typename Key, typename Value>
class SharedResults {
 public:
  struct Limits {
    std::uint64_t bytes = 0;
    std::size_t entries = 0;
    // How long a caller waits for the pool.
    Duration patience{};
  };
  struct Computed {
    Value value;
    // The memory that a kept result takes, with its key.
    std::uint64_t bytes = 0;
  };
  // Runs on the pool. It may run after its callers have gone, so it owns all that it uses.
  using Compute = std::function<Result<Computed>()>;

  SharedResults(boost::asio::any_io_executor executor, WorkerPool& pool, Limits limits)
      : executor_(std::move(executor)),
        pool_(pool),
        limits_(limits),
        flights_(std::make_shared<Flights>(*this)) {}
  ~SharedResults() {
    flights_->owner = nullptr;
    flights_->closed = true;
  }
  SharedResults(const SharedResults&) = delete;
  SharedResults& operator=(const SharedResults&) = delete;

  // The kept result, or the one of `compute`. A cancelled caller returns at once (kUnavailable);
  // the computation goes on for the others, and its result is kept.
  Task<Result<Value>> get(Key key, Compute compute) {
    if (auto kept = find(key)) co_return std::move(*kept);
    std::shared_ptr<Flight> flight;
    if (const auto found = flights_->by_key.find(key); found != flights_->by_key.end()) {
      flight = found->second;
    } else {
      flight = std::make_shared<Flight>(executor_);
      flights_->by_key.emplace(key, flight);
      start(flight, std::move(compute), std::move(key));
    }
    const std::shared_ptr<Computation> computation = flight;
    CO_TRY_VOID(co_await wait_for_end(computation, steady_now() + limits_.patience));
    co_return *flight->result;
  }

  // Computes for this caller only. `keep_as`: the key under which later callers find the result.
  Task<Result<Value>> compute_alone(Compute compute, std::optional<Key> keep_as = std::nullopt) {
    const auto flight = std::make_shared<Flight>(executor_);
    start(flight, std::move(compute), std::move(keep_as));
    const std::shared_ptr<Computation> computation = flight;
    CO_TRY_VOID(co_await wait_for_end(computation, steady_now() + limits_.patience));
    co_return *flight->result;
  }

  std::optional<Value> find(const Key& key) {
    const auto found = by_key_.find(key);
    if (found == by_key_.end()) return std::nullopt;
    recent_.splice(recent_.begin(), recent_, found->second);
    return recent_.front().computed.value;
  }

  // A result that is larger than the limit is not kept.
  void keep(Key key, Computed computed) {
    std::vector<Value> dropped;
    if (const auto found = by_key_.find(key); found != by_key_.end()) {
      drop(found->second, dropped);
    }
    if (computed.bytes <= limits_.bytes && limits_.entries > 0) {
      bytes_ += computed.bytes;
      recent_.push_front({key, std::move(computed)});
      by_key_.emplace(std::move(key), recent_.begin());
    }
    while (bytes_ > limits_.bytes || recent_.size() > limits_.entries) {
      drop(std::prev(recent_.end()), dropped);
    }
    // Freeing hundreds of thousands of strings takes long, too. A full queue is no reason to wait.
    if (!dropped.empty()) (void)pool_.try_submit([values = std::move(dropped)] {});
  }

  std::uint64_t kept_bytes() const { return bytes_; }
  std::size_t kept() const { return recent_.size(); }

 private:
  // The pool's thread touches none of it.
  struct Flight : Computation {
    using Computation::Computation;
    std::optional<Result<Value>> result;
  };
  // Outlives the object while computations run.
  struct Flights {
    explicit Flights(SharedResults& results) : owner(&results) {}
    // Null once the object is gone.
    SharedResults* owner;
    // For the pool: computations that have not begun are left out.
    std::atomic<bool> closed = false;
    std::map<Key, std::shared_ptr<Flight>> by_key;
  };
  struct Entry {
    Key key;
    Computed computed;
  };
  using Recent = std::list<Entry>;

  static Result<Computed> run(const Compute& compute) {
    try {
      return compute();
    } catch (const std::exception& thrown) {
      return fail(ErrorCode::kInternal, "a computation threw: {}", thrown.what());
    }
  }

  // `key`: of the result if it is to be kept.
  void start(std::shared_ptr<Flight> flight, Compute compute, std::optional<Key> key) {
    auto job = [flights = flights_, flight, compute = std::move(compute), key,
                executor = executor_] {
      auto outcome = std::make_shared<Result<Computed>>(
          flights->closed ? fail(ErrorCode::kUnavailable, "this process stops") : run(compute));
      boost::asio::post(executor, [flights, flight, key, outcome] {
        end(*flights, flight, key, std::move(*outcome));
      });
    };
    if (pool_.try_submit(std::move(job))) return;
    end(*flights_, flight, key,
        fail(ErrorCode::kExhausted, "too many computations wait for a thread; try again"));
  }

  static void end(Flights& flights, const std::shared_ptr<Flight>& flight,
                  const std::optional<Key>& key, Result<Computed> outcome) {
    if (key) {
      const auto found = flights.by_key.find(*key);
      if (found != flights.by_key.end() && found->second == flight) flights.by_key.erase(found);
    }
    if (outcome) {
      flight->result = outcome->value;
      if (key && flights.owner != nullptr) flights.owner->keep(*key, std::move(*outcome));
    } else {
      flight->result = fail(std::move(outcome).error());
    }
    flight->ended = true;
    flight->changed.notify();
  }

  void drop(typename Recent::iterator at, std::vector<Value>& dropped) {
    bytes_ -= at->computed.bytes;
    dropped.push_back(std::move(at->computed.value));
    by_key_.erase(at->key);
    recent_.erase(at);
  }

  const boost::asio::any_io_executor executor_;
  WorkerPool& pool_;
  const Limits limits_;
  const std::shared_ptr<Flights> flights_;
  // The most recently used first.
  Recent recent_;
  std::map<Key, typename Recent::iterator> by_key_;
  std::uint64_t bytes_ = 0;
};

}  // namespace rekindle::async
