#include "src/base/worker_pool.h"

#include <algorithm>
#include <atomic>
#include <iterator>
#include <latch>
#include <utility>

#include <pthread.h>

namespace rekindle {

void set_thread_name(const std::string& name) {
  pthread_setname_np(pthread_self(), name.substr(0, 15).c_str());
}

std::vector<WorkerGroup> worker_groups(std::span<const NumaNode> nodes,
                                       std::span<const int> allowed, std::size_t threads) {
  std::vector<WorkerGroup> groups;
  std::size_t all_cpus = 0;
  for (const NumaNode& node : nodes) {
    WorkerGroup group{0, node.id, {}};
    std::ranges::set_intersection(node.cpus, allowed, std::back_inserter(group.cpus));
    all_cpus += group.cpus.size();
    if (!group.cpus.empty()) groups.push_back(std::move(group));
  }
  std::size_t cpus = 0;
  std::size_t given = 0;
  for (WorkerGroup& group : groups) {
    cpus += group.cpus.size();
    group.threads = threads * cpus / all_cpus - given;
    given += group.threads;
  }
  // Where there are few threads, a small node gets none.
  std::erase_if(groups, [](const WorkerGroup& group) { return group.threads == 0; });
  if (groups.size() < 2) return {{threads, -1, {}}};
  return groups;
}

WorkerPool::WorkerPool(const std::string& name, std::size_t threads, std::size_t max_queued)
    : WorkerPool(name, std::vector<WorkerGroup>{{threads, -1, {}}}, max_queued) {}

WorkerPool::WorkerPool(const std::string& name, std::span<const WorkerGroup> groups,
                       std::size_t max_queued)
    : max_queued_(max_queued) {
  for (const WorkerGroup& group : groups) {
    Group& own = groups_.emplace_back();
    own.node = group.node;
    own.cpus = group.cpus;
  }
  for (std::size_t i = 0; i < groups.size(); ++i) {
    for (std::size_t thread = 0; thread < groups[i].threads; ++thread) {
      threads_.emplace_back([this, name, &own = groups_[i]] { run(name, own); });
    }
  }
}

WorkerPool::~WorkerPool() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  for (Group& group : groups_) group.has_job.notify_all();
  for (auto& thread : threads_) thread.join();
}

void WorkerPool::submit(Job job) {
  std::unique_lock lock(mutex_);
  has_room_.wait(lock, [this] { return queued_ < max_queued_; });
  push(std::move(job), -1);
}

bool WorkerPool::try_submit(Job job, int node) {
  const std::lock_guard lock(mutex_);
  if (queued_ >= max_queued_) return false;
  push(std::move(job), node);
  return true;
}

void WorkerPool::push(Job job, int node) {
  Group& group = group_for(node);
  group.jobs.push_back(std::move(job));
  ++queued_;
  wake_one(group);
}

WorkerPool::Group& WorkerPool::group_for(int node) {
  const auto own = std::ranges::find(groups_, node, &Group::node);
  if (node >= 0 && own != groups_.end()) return *own;
  return groups_[next_group_++ % groups_.size()];
}

// Wakes a thread for a job of this group: one of its own, else one of another group.
void WorkerPool::wake_one(Group& group) {
  if (group.sleeping > 0) return group.has_job.notify_one();
  const auto other = std::ranges::find_if(groups_, [](const Group& g) { return g.sleeping > 0; });
  if (other != groups_.end()) other->has_job.notify_one();
}

// An empty job: there is none. The thread that takes a job wakes another one for the next job,
// because a wake-up may have gone to a thread that was awake already.
WorkerPool::Job WorkerPool::take(Group& own) {
  const auto has_jobs = [](const Group& group) { return !group.jobs.empty(); };
  Group* from = &own;
  if (own.jobs.empty()) {
    from = &*std::ranges::max_element(groups_, {}, [](const Group& g) { return g.jobs.size(); });
  }
  if (from->jobs.empty()) return {};
  Job job = std::move(from->jobs.front());
  from->jobs.pop_front();
  --queued_;
  if (const auto next = std::ranges::find_if(groups_, has_jobs); next != groups_.end()) {
    wake_one(*next);
  }
  return job;
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

void WorkerPool::run(const std::string& name, Group& own) {
  set_thread_name(name);
  keep_thread_to(own.cpus);
  std::unique_lock lock(mutex_);
  while (true) {
    Job job = take(own);
    if (job) {
      lock.unlock();
      has_room_.notify_one();
      job();
      job = nullptr;
      lock.lock();
    } else if (stopping_) {
      return;
    } else {
      ++own.sleeping;
      own.has_job.wait(lock);
      --own.sleeping;
    }
  }
}

}  // namespace rekindle
