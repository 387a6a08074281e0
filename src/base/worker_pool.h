#pragma once

#include <condition_variable>
#include <csignal>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <pthread.h>

namespace rekindle {

// A fixed number of threads and a bounded queue: digests, file copies, blocking calls. Jobs must
// not throw. The destructor runs the queued jobs and joins.
class WorkerPool {
 public:
  WorkerPool(const std::string& name, std::size_t threads, std::size_t max_queued);
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  // Waits for room in the queue. Never call it from a job of the same pool or from a poller.
  void submit(std::function<void()> job);
  // False when the queue is full.
  [[nodiscard]] bool try_submit(std::function<void()> job);

  std::size_t thread_count() const { return threads_.size(); }

  // Runs body(0) … body(count - 1) on the pool and waits for all of them.
  void parallel_for(std::size_t count, const std::function<void(std::size_t)>& body);

 private:
  void run(const std::string& name);

  const std::size_t max_queued_;
  std::mutex mutex_;
  std::condition_variable has_job_;
  std::condition_variable has_room_;
  std::deque<std::function<void()>> jobs_;  // guarded by mutex_
  bool stopping_ = false;                   // guarded by mutex_
  std::vector<std::thread> threads_;
};

void set_thread_name(const std::string& name);  // at most 15 characters are kept

// Threads that start while this object lives get no signals: those belong to the application.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace rekindle
