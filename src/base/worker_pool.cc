#include "src/base/worker_pool.h"

#include <algorithm>
#include <atomic>
#include <latch>
#include <utility>

#include <pthread.h>

namespace rekindle {

void set_thread_name(const std::string& name) {
  pthread_setname_np(pthread_self(), name.substr(0, 15).c_str());
}

WorkerPool::WorkerPool(const std::string& name, std::size_t threads, std::size_t max_queued)
    : max_queued_(max_queued) {
  threads_.reserve(threads);
  for (std::size_t i = 0; i < threads; ++i) {
    threads_.emplace_back([this, name] { run(name); });
  }
}

WorkerPool::~WorkerPool() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  has_job_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void WorkerPool::submit(std::function<void()> job) {
  {
    std::unique_lock lock(mutex_);
    has_room_.wait(lock, [this] { return jobs_.size() < max_queued_; });
    jobs_.push_back(std::move(job));
  }
  has_job_.notify_one();
}

bool WorkerPool::try_submit(std::function<void()> job) {
  {
    const std::lock_guard lock(mutex_);
    if (jobs_.size() >= max_queued_) return false;
    jobs_.push_back(std::move(job));
  }
  has_job_.notify_one();
  return true;
}

void WorkerPool::parallel_for(std::size_t count, const std::function<void(std::size_t)>& body) {
  const std::size_t lanes = std::min(count, threads_.size());
  std::atomic<std::size_t> next = 0;
  std::latch done(static_cast<std::ptrdiff_t>(lanes));
  for (std::size_t lane = 0; lane < lanes; ++lane) {
    submit([&] {
      for (std::size_t i = next++; i < count; i = next++) body(i);
      done.count_down();
    });
  }
  done.wait();
}

void WorkerPool::run(const std::string& name) {
  set_thread_name(name);
  while (true) {
    std::function<void()> job;
    {
      std::unique_lock lock(mutex_);
      has_job_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
      if (jobs_.empty()) return;
      job = std::move(jobs_.front());
      jobs_.pop_front();
    }
    has_room_.notify_one();
    job();
  }
}

}  // namespace rekindle
