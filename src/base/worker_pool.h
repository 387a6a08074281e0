#pragma once

#include <condition_variable>
#include <csignal>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include <pthread.h>

#include "src/base/numa_nodes.h"

namespace rekindle {

// The threads of a pool that run on one NUMA node.
struct WorkerGroup {
  std::size_t threads = 0;
  int node = -1;
  std::vector<int> cpus;  // empty: any
  bool operator==(const WorkerGroup&) const = default;
};
// Splits the threads by the CPUs of each node that are in `allowed`. If only one node gets threads,
// or the nodes are unknown, there is one group, on any CPU.
std::vector<WorkerGroup> worker_groups(std::span<const NumaNode> nodes,
                                       std::span<const int> allowed, std::size_t threads);

// A fixed number of threads and bounded queues: digests, file copies, blocking calls. Each group of
// threads has its own queue. A thread whose queue is empty takes a job of another one, so no thread
// sleeps while a job waits. Jobs must not throw. The destructor runs the queued jobs and joins.
class WorkerPool {
 public:
  WorkerPool(const std::string& name, std::size_t threads, std::size_t max_queued);
  // `max_queued`: of all queues together.
  WorkerPool(const std::string& name, std::span<const WorkerGroup> groups, std::size_t max_queued);
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  // Waits for room in the queue. Never call it from a job of the same pool or from a poller.
  void submit(std::function<void()> job);
  // False when the queue is full. `node`: where the bytes of the job lie. The threads of that node
  // run it, unless they are busy. Jobs of other nodes go to the groups in turn.
  [[nodiscard]] bool try_submit(std::function<void()> job, int node = -1);

  std::size_t thread_count() const { return threads_.size(); }

  // Runs body(0) … body(count - 1) on the pool and waits for all of them.
  void parallel_for(std::size_t count, const std::function<void(std::size_t)>& body);

 private:
  using Job = std::function<void()>;
  struct Group {
    int node = -1;
    std::vector<int> cpus;
    std::condition_variable has_job;
    std::deque<Job> jobs;      // guarded by mutex_
    std::size_t sleeping = 0;  // threads, also those that are being woken; guarded by mutex_
  };
  void run(const std::string& name, Group& own);
  // The caller holds mutex_.
  void push(Job job, int node);
  Job take(Group& own);
  Group& group_for(int node);
  void wake_one(Group& group);

  const std::size_t max_queued_;
  std::mutex mutex_;
  std::condition_variable has_room_;
  std::deque<Group> groups_;    // at least one; none is added while threads run
  std::size_t next_group_ = 0;  // guarded by mutex_
  std::size_t queued_ = 0;      // in all queues; guarded by mutex_
  bool stopping_ = false;       // guarded by mutex_
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
