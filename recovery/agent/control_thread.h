#pragma once

#include <condition_variable>
#include <csignal>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include <boost/asio/bind_cancellation_slot.hpp>
#include <boost/asio/cancellation_signal.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/signal_set.hpp>

#include "recovery/pull/pull_types.h"

namespace rekindle::agent {

// The first SIGINT or SIGTERM cancels the operation that is bound to slot(). The next one ends the
// process as usual. Always in a shared_ptr. On its executor, except for signal().
class Interruption : public std::enable_shared_from_this<Interruption> {
 public:
  explicit Interruption(const boost::asio::any_io_executor& executor)
      : signals_(executor, SIGINT, SIGTERM) {}
  void watch() {
    signals_.async_wait(
        [self = shared_from_this()](const boost::system::error_code& error, int number) {
          if (error) return;
          self->signal_ = number;
          self->signals_.clear();
          self->cancel_.emit(boost::asio::cancellation_type::terminal);
        });
  }
  void stop() {
    boost::system::error_code ignored;
    signals_.clear(ignored);
    signals_.cancel(ignored);
  }
  boost::asio::cancellation_slot slot() { return cancel_.slot(); }
  // Valid once the operation has ended; 0: it was not interrupted.
  int signal() const { return signal_; }

 private:
  boost::asio::signal_set signals_;
  boost::asio::cancellation_signal cancel_;
  int signal_ = 0;
};

// An io_context on its own thread, and blocking calls into it. The calling thread gets progress in
// order.
class ControlThread {
 public:
  ControlThread() : guard_(context_.get_executor()), thread_([this] { context_.run(); }) {}
  ~ControlThread() {
    guard_.reset();
    context_.stop();
    thread_.join();
  }
  ControlThread(const ControlThread&) = delete;
  ControlThread& operator=(const ControlThread&) = delete;

  boost::asio::any_io_executor executor() { return context_.get_executor(); }

  // `start(on_progress)` makes the coroutine. `show` runs on the thread of the caller.
  template <typename T, typename Start>
  T run(Start start, const pull::OnProgress& show,
        const std::shared_ptr<Interruption>& interruption = nullptr) {
    auto shared = std::make_shared<Shared<T>>();
    pull::OnProgress forward = [shared](const pull::Progress& update) { shared->add(update); };
    auto begin = [&]() { return start(std::move(forward)); };
    auto end = [shared, interruption](std::exception_ptr error, T result) {
      if (interruption != nullptr) interruption->stop();
      const std::lock_guard lock(shared->mutex);
      shared->error = std::move(error);
      shared->result.emplace(std::move(result));
      shared->changed.notify_one();
    };
    if (interruption != nullptr) {
      boost::asio::post(context_, [interruption] { interruption->watch(); });
      boost::asio::co_spawn(context_, std::move(begin),
                            boost::asio::bind_cancellation_slot(interruption->slot(), end));
    } else {
      boost::asio::co_spawn(context_, std::move(begin), end);
    }
    shared->show_until_done(show);
    if (shared->error) std::rethrow_exception(shared->error);
    return std::move(*shared->result);
  }

 private:
  template <typename T>
  struct Shared {
    void add(const pull::Progress& update) {
      const std::lock_guard lock(mutex);
      // A newer update replaces an older one, unless that has a note.
      if (!updates.empty() && updates.back().note.empty()) updates.pop_back();
      updates.push_back(update);
      changed.notify_one();
    }
    void show_until_done(const pull::OnProgress& show) {
      std::unique_lock lock(mutex);
      while (true) {
        changed.wait(lock, [&] { return result || !updates.empty(); });
        while (!updates.empty()) {
          const pull::Progress update = std::move(updates.front());
          updates.pop_front();
          lock.unlock();
          if (show) show(update);
          lock.lock();
        }
        if (result) return;
      }
    }
    std::mutex mutex;
    std::condition_variable changed;
    // The mutex guards all members that follow.
    std::deque<pull::Progress> updates;
    std::optional<T> result;
    std::exception_ptr error;
  };

  boost::asio::io_context context_{1};
  boost::asio::executor_work_guard<boost::asio::io_context::executor_type> guard_;
  std::thread thread_;
};

}  // namespace rekindle::agent
