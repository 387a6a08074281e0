#include "transport/engine.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <iterator>
#include <map>
#include <stdexcept>
#include <thread>
#include <unordered_map>
#include <utility>

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "src/base/log.h"
#include "src/base/unique_fd.h"
#include "src/base/worker_pool.h"
#include "transport/batch.h"
#include "transport/poller.h"

namespace rekindle::transport {

namespace {

constexpr std::chrono::milliseconds kTick{10};
constexpr std::chrono::milliseconds kDrainPatience{10000};

std::size_t default_pollers() {
  return std::clamp<std::size_t>(std::thread::hardware_concurrency(), 1, 8);
}

class EngineImpl final : public Engine, public BatchHost {
 public:
  explicit EngineImpl(const EngineOptions& options)
      : event_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (!event_) throw std::runtime_error("engine: no descriptor left for an eventfd");
    const std::size_t count =
        options.poller_threads > 0 ? options.poller_threads : default_pollers();
    for (std::size_t i = 0; i < count; ++i) {
      pollers_.push_back(std::make_unique<Poller>(fmt::format("rk-poll-{}", i), std::vector<int>(),
                                                  [this] { wake(); }));
    }
    shared_pollers_ = pollers_.size();
    const std::vector<int> allowed = allowed_cpus();
    for (const NumaNode& node : options.nodes) {
      std::vector<int> cpus;
      std::ranges::set_intersection(node.cpus, allowed, std::back_inserter(cpus));
      if (!cpus.empty()) node_pollers_[node.id].cpus = std::move(cpus);
    }
    if (node_pollers_.size() < 2) node_pollers_.clear();
    thread_ = std::thread([this] { run(); });
  }

  ~EngineImpl() override {
    stopping_ = true;
    wake();
    thread_.join();
    pollers_.clear();
  }

  std::unique_ptr<Batch> start(SliceSource& source, BatchObserver& observer,
                               const BatchOptions& options) override;

  void wake() override {
    if (awake_.exchange(true)) return;  // a wake-up is on its way
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(event_.get(), &one, sizeof one);
  }
  void detach(std::uint64_t batch_id) override;

 private:
  struct NodePollers {
    std::vector<int> cpus;
    std::vector<Poller*> pollers;  // made when they are first needed
  };

  Poller& poller_for(const PollerHome* home, int numa_node) override {
    if (home != nullptr) {
      auto& poller = homes_[home->name];
      if (poller == nullptr) {
        pollers_.push_back(
            std::make_unique<Poller>("rk-nic-" + home->name, home->cpus, [this] { wake(); }));
        poller = pollers_.back().get();
      }
      return *poller;
    }
    const auto fewer_paths = [](const auto& a, const auto& b) {
      return a->path_count() < b->path_count();
    };
    if (const auto near = node_pollers_.find(numa_node); near != node_pollers_.end()) {
      auto& pollers = near->second.pollers;
      if (pollers.empty()) add_node_pollers(near->first, near->second);
      return **std::ranges::min_element(pollers, fewer_paths);
    }
    const auto end = pollers_.begin() + static_cast<std::ptrdiff_t>(shared_pollers_);
    return **std::min_element(pollers_.begin(), end, fewer_paths);
  }
  void add_node_pollers(int node, NodePollers& near) {
    const std::size_t count = std::max<std::size_t>(shared_pollers_ / node_pollers_.size(), 1);
    for (std::size_t i = 0; i < count; ++i) {
      pollers_.push_back(std::make_unique<Poller>(fmt::format("rk-node{}-{}", node, i), near.cpus,
                                                  [this] { wake(); }));
      near.pollers.push_back(pollers_.back().get());
    }
  }
  SliceWork* acquire_work() override {
    if (free_work_.empty()) {
      all_work_.push_back(std::make_unique<SliceWork>());
      return all_work_.back().get();
    }
    SliceWork* work = free_work_.back();
    free_work_.pop_back();
    return work;
  }
  void release_work(SliceWork* work) override {
    work->path.reset();
    work->ops.clear();
    free_work_.push_back(work);
  }

  void run();
  void take_changes();
  void sleep(bool active);

  UniqueFd event_;
  std::atomic<bool> awake_ = false;
  std::atomic<bool> stopping_ = false;
  // The first pollers are for paths without a home. Only the engine thread uses all of this once it
  // runs; it makes the pollers of a home and of a NUMA node when they are first needed.
  std::size_t shared_pollers_ = 0;
  std::vector<std::unique_ptr<Poller>> pollers_;
  std::unordered_map<std::string, Poller*> homes_;
  std::map<int, NodePollers> node_pollers_;  // of nodes with CPUs; empty: there are not several
  std::mutex mutex_;
  std::condition_variable detached_;
  std::vector<std::shared_ptr<BatchImpl>> added_;  // guarded by mutex_
  std::vector<std::uint64_t> removed_;             // guarded by mutex_
  std::atomic<std::uint64_t> next_batch_ = 1;

  // Engine thread only.
  std::unordered_map<std::uint64_t, std::shared_ptr<BatchImpl>> batches_;
  std::vector<std::unique_ptr<SliceWork>> all_work_;
  std::vector<SliceWork*> free_work_;
  std::thread thread_;
};

// The caller's end of a batch.
class BatchHandle final : public Batch {
 public:
  BatchHandle(std::shared_ptr<BatchImpl> batch, BatchHost& host)
      : batch_(std::move(batch)), host_(host) {}
  ~BatchHandle() override {
    batch_->cancel();
    // Memory must not be freed under a reader. While a path does not drain, only waiting is safe.
    while (!batch_->wait_finished(kDrainPatience)) {
      log::error("engine.drain", "batch", batch_->id(), "hint",
                 "a path has not drained for 10 s; its memory is kept until it does");
    }
    host_.detach(batch_->id());
  }
  void add_paths(SourceIndex source, std::vector<std::unique_ptr<Path>> paths) override {
    batch_->add_paths(source, std::move(paths));
  }
  void remove_source(SourceIndex source, Error cause) override {
    batch_->remove_source(source, std::move(cause));
  }
  void resolve(SliceIndex slice, Verdict verdict) override { batch_->resolve(slice, verdict); }
  void add_neighbour(SourceIndex source, std::uint64_t order_seed) override {
    batch_->add_neighbour(source, order_seed);
  }
  void candidates_added(SourceIndex source, std::vector<SliceIndex> slices) override {
    batch_->candidates_added(source, std::move(slices));
  }
  void cancel() override { batch_->cancel(); }
  BatchProgress progress() const override { return batch_->progress(); }

 private:
  const std::shared_ptr<BatchImpl> batch_;
  BatchHost& host_;
};

std::unique_ptr<Batch> EngineImpl::start(SliceSource& source, BatchObserver& observer,
                                         const BatchOptions& options) {
  // The constructor visits every slice. It runs without the lock, as other batches continue.
  auto batch = std::make_shared<BatchImpl>(next_batch_++, *this, source, observer, options);
  {
    const std::lock_guard lock(mutex_);
    added_.push_back(batch);
  }
  wake();
  return std::make_unique<BatchHandle>(std::move(batch), *this);
}

void EngineImpl::detach(std::uint64_t batch_id) {
  std::unique_lock lock(mutex_);
  removed_.push_back(batch_id);
  wake();
  detached_.wait(lock, [&] {
    return std::find(removed_.begin(), removed_.end(), batch_id) == removed_.end();
  });
}

void EngineImpl::take_changes() {
  const std::lock_guard lock(mutex_);
  for (auto& batch : added_) batches_.emplace(batch->id(), std::move(batch));
  added_.clear();
  for (const auto id : removed_) batches_.erase(id);
  if (removed_.empty()) return;
  removed_.clear();
  detached_.notify_all();
}

void EngineImpl::run() {
  set_thread_name("rk-engine");
  TimePoint next_tick = std::chrono::steady_clock::now();
  while (!stopping_) {
    take_changes();
    const TimePoint now = std::chrono::steady_clock::now();
    for (const auto& poller : pollers_) {
      PollerEvent event;
      while (poller->next_event(event)) {
        const auto found = batches_.find(event.path->batch);
        if (found != batches_.end()) found->second->on_event(event, now);
      }
    }
    const bool tick = now >= next_tick;
    if (tick) next_tick = now + kTick;
    bool active = false;
    for (const auto& [id, batch] : batches_) {
      batch->step(now, tick);
      active = active || !batch->finished();
    }
    sleep(active);
  }
}

void EngineImpl::sleep(bool active) {
  pollfd waiting{event_.get(), POLLIN, 0};
  const int timeout_ms = active ? static_cast<int>(kTick.count()) : -1;
  const int ready = ::poll(&waiting, 1, stopping_ ? 0 : timeout_ms);
  if (ready > 0) {
    std::uint64_t drained = 0;
    [[maybe_unused]] const ssize_t got = ::read(event_.get(), &drained, sizeof drained);
  }
  // This comes after the read. A thread that saw `awake_` set has published its news before, and
  // the next turn takes it. A later thread writes to the eventfd again.
  awake_.exchange(false);
}

}  // namespace

std::unique_ptr<Engine> Engine::create(const EngineOptions& options) {
  return std::make_unique<EngineImpl>(options);
}

}  // namespace rekindle::transport
