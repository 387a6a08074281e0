#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "src/base/worker_pool.h"
#include "src/ipc/life.h"
#include "src/ipc/life_signs.h"

namespace rekindle::ipc {

namespace {

// A worker can write its word as often as it likes. After this many wake-ups within one interval,
// the thread no longer waits on the words until the next look.
constexpr int kMaxWakeUps = 8;
// Without workers to watch.
constexpr std::chrono::seconds kIdleWait{10};

using Watched = std::vector<std::shared_ptr<const LifeSigns>>;

class Watch final : public LifeWatch {
 public:
  explicit Watch(OnDeath on_death) : on_death_(std::move(on_death)) {}

  ~Watch() override {
    stopping_.store(true);
    notify();
    if (thread_.joinable()) thread_.join();
  }

  Result<void> begin() {
    try {
      thread_ = std::thread([this] { run(); });
    } catch (const std::system_error& error) {
      return fail(ErrorCode::kExhausted, "start the thread that watches workers: {}", error.what());
    }
    return {};
  }

  Result<void> add(std::uint64_t worker, std::unique_ptr<LifePage> page, Peer peer) override {
    auto signs = std::make_shared<const LifeSigns>(worker, std::move(page), std::move(peer));
    {
      const std::lock_guard lock(mutex_);
      if (!workers_.emplace(worker, std::move(signs)).second) {
        return fail(ErrorCode::kInvalid, "worker {} is watched already", worker);
      }
    }
    notify();
    return {};
  }

  void remove(std::uint64_t worker) override {
    // Unmaps the page after the lock is released.
    std::shared_ptr<const LifeSigns> last;
    {
      const std::lock_guard lock(mutex_);
      const auto found = workers_.find(worker);
      if (found == workers_.end()) return;
      last = std::move(found->second);
      workers_.erase(found);
    }
    notify();
  }

  std::size_t size() const override {
    const std::lock_guard lock(mutex_);
    return workers_.size();
  }

 private:
  void notify() {
    std::atomic_ref(changes_).fetch_add(1);
    futex_wake_own(&changes_);
  }

  Watched snapshot() const {
    const std::lock_guard lock(mutex_);
    Watched out;
    out.reserve(workers_.size());
    for (const auto& [number, signs] : workers_) out.push_back(signs);
    return out;
  }

  void report(const LifeSigns& signs, DeathSign sign, TimePoint last_look) {
    {
      const std::lock_guard lock(mutex_);
      // The worker may have been removed meanwhile.
      if (workers_.erase(signs.worker()) == 0) return;
    }
    const TimePoint alive_at = std::max(last_look, signs.since());
    on_death_({signs.worker(), sign, SteadyClock().now() - alive_at});
  }

  void run() {
    set_thread_name("rk-life");
    FutexWaiter waiter;
    TimePoint next_look{};
    TimePoint last_look{};
    int wake_ups = 0;
    while (!stopping_.load()) {
      const FutexWord own{&changes_, std::atomic_ref(changes_).load()};
      Watched watched = snapshot();
      const TimePoint now = SteadyClock().now();
      const bool full = now >= next_look;
      if (full) {
        next_look = now + kLifeLookInterval;
        wake_ups = 0;
      }
      const bool any = look(watched, full, last_look);
      if (full) last_look = now;
      if (any) continue;
      std::vector<FutexWord> words;
      if (++wake_ups <= kMaxWakeUps) {
        for (const auto& signs : watched) words.push_back(signs->watched_word());
      }
      waiter.wait(own, words, watched.empty() ? now + kIdleWait : next_look);
    }
  }

  // True: a worker has died.
  bool look(const Watched& watched, bool full, TimePoint last_look) {
    bool any = false;
    for (const auto& signs : watched) {
      std::optional<DeathSign> sign;
      if (full) {
        sign = signs->look();
      } else if (signs->owner_died()) {
        sign = DeathSign::kFutex;
      }
      if (!sign) continue;
      any = true;
      report(*signs, *sign, last_look);
    }
    return any;
  }

  const OnDeath on_death_;
  mutable std::mutex mutex_;
  // Guarded by mutex_.
  std::map<std::uint64_t, std::shared_ptr<const LifeSigns>> workers_;
  // A futex that counts changes of workers_ and stopping_.
  alignas(4) std::uint32_t changes_ = 0;
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

}  // namespace

std::string_view to_string(DeathSign sign) {
  switch (sign) {
    case DeathSign::kFutex:
      return "futex";
    case DeathSign::kCoreDump:
      return "core dump";
    case DeathSign::kPidfd:
      return "pidfd";
  }
  return "unknown";
}

Result<std::unique_ptr<LifeWatch>> LifeWatch::start(OnDeath on_death) {
  auto watch = std::make_unique<Watch>(std::move(on_death));
  TRY_VOID(watch->begin());
  return std::unique_ptr<LifeWatch>(std::move(watch));
}

}  // namespace rekindle::ipc
