#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/as_tuple.hpp>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/cancellation_state.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/this_coro.hpp>
#include <boost/asio/use_awaitable.hpp>

#include "src/base/result.h"
#include "transport/engine.h"

namespace rekindle::transport {

// A batch whose end can be awaited from an Asio coroutine. Optional: the engine knows no Asio.
//
//   AwaitableBatch batch(executor, engine, source, options, {});
//   batch->add_paths(0, std::move(paths));
//   CO_TRY_VOID(co_await batch.finished());
//
// Create, await and destroy it on the executor's thread; events arrive there, too. Cancelling the
// awaiting coroutine cancels the batch, and finished() still returns only when the batch has
// drained. Destroying a batch that has not finished cancels it and blocks the thread for the drain.
class AwaitableBatch {
 public:
  struct Events {
    std::function<void(SourceIndex, const Error&)> source_lost;
    std::function<void(const Starvation&)> starved;
  };

  // `engine` and `source` outlive this.
  AwaitableBatch(boost::asio::any_io_executor executor, Engine& engine, SliceSource& source,
                 const BatchOptions& options, Events events)
      : bridge_(std::make_shared<Bridge>(std::move(executor), std::move(events))),
        batch_(engine.start(source, *bridge_, options)) {
    bridge_->batch = batch_.get();
  }
  ~AwaitableBatch() {
    bridge_->batch = nullptr;
    bridge_->events = {};
    batch_.reset();
  }
  AwaitableBatch(const AwaitableBatch&) = delete;
  AwaitableBatch& operator=(const AwaitableBatch&) = delete;

  Batch* operator->() { return batch_.get(); }

  // The outcome, as in BatchObserver::on_finished(). Any number of coroutines may wait, before or
  // after the end.
  boost::asio::awaitable<Result<void>> finished() { return wait(bridge_); }

 private:
  // Actions that were posted to the executor, and waiting coroutines, keep it alive after the
  // AwaitableBatch.
  struct Bridge final : BatchObserver, std::enable_shared_from_this<Bridge> {
    Bridge(boost::asio::any_io_executor executor, Events handlers)
        : events(std::move(handlers)),
          ended(executor, boost::asio::steady_timer::time_point::max()) {}

    // --- the engine's thread
    void on_source_lost(SourceIndex source, const Error& cause) override {
      post([source, cause](Bridge& self) {
        if (self.events.source_lost) self.events.source_lost(source, cause);
      });
    }
    void on_starved(const Starvation& starvation) override {
      post([starvation](Bridge& self) {
        if (self.events.starved) self.events.starved(starvation);
      });
    }
    void on_finished(const Result<void>& result) override {
      post([result](Bridge& self) {
        self.outcome = result;
        self.ended.cancel();
      });
    }
    template <typename Action>
    void post(Action action) {
      boost::asio::post(ended.get_executor(),
                        [self = shared_from_this(), action = std::move(action)] { action(*self); });
    }

    // --- the executor's thread
    Batch* batch = nullptr;
    Events events;
    std::optional<Result<void>> outcome;
    boost::asio::steady_timer ended;  // cancelled when there is an outcome
  };

  static boost::asio::awaitable<Result<void>> wait(std::shared_ptr<Bridge> bridge) {
    namespace asio = boost::asio;
    co_await asio::this_coro::throw_if_cancelled(false);
    while (!bridge->outcome) {
      co_await asio::this_coro::reset_cancellation_state(asio::enable_total_cancellation());
      co_await bridge->ended.async_wait(asio::as_tuple(asio::use_awaitable));
      const auto state = co_await asio::this_coro::cancellation_state;
      if (state.cancelled() != asio::cancellation_type::none && bridge->batch != nullptr) {
        bridge->batch->cancel();
      }
    }
    co_return *bridge->outcome;
  }

  const std::shared_ptr<Bridge> bridge_;
  std::unique_ptr<Batch> batch_;
};

}  // namespace rekindle::transport
