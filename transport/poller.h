#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include <boost/lockfree/spsc_queue.hpp>

#include "src/base/unique_fd.h"
#include "transport/path.h"

namespace rekindle::transport {

// A path as the engine thread and its poller share it.
struct PathHandle {
  std::uint64_t batch = 0;
  std::uint32_t id = 0;                         // PathId in its batch
  std::atomic<std::uint64_t> bytes_landed = 0;  // written by the poller
  std::string why_broken;                       // written by the poller, once, before `broken`
  std::atomic<bool> broken = false;

  std::string why() const { return broken.load(std::memory_order_acquire) ? why_broken : ""; }
};

// The ops of one slice on one path. Recycled by the engine: nothing is allocated per slice once the
// vectors have grown.
struct SliceWork {
  std::shared_ptr<PathHandle> path;
  SliceIndex slice = 0;
  std::vector<ReadOp> ops;
  // The poller's:
  std::size_t posted = 0;
  std::size_t open = 0;
  OpStatus worst = OpStatus::kOk;
  std::uint16_t slot = 0;
  SliceWork* next_pending = nullptr;
};

// A poller's news for the engine thread.
struct PollerEvent {
  enum class Kind : std::uint8_t { kSliceDone, kPathClosed } kind = Kind::kSliceDone;
  SliceWork* work = nullptr;  // kSliceDone: all its ops were reported
  PathHandle* path = nullptr;
};

// A thread that owns paths. It posts and polls, and sleeps in epoll when nothing moves. Rings carry
// work in and events out. Adding and aborting paths is rare and takes a lock.
class Poller {
 public:
  // The poller's thread calls `wake_engine` after it has queued events. It keeps to `cpus` if the
  // machine allows it; empty: any CPU.
  Poller(std::string name, std::vector<int> cpus, std::function<void()> wake_engine);
  ~Poller();  // every path must have been closed
  Poller(const Poller&) = delete;
  Poller& operator=(const Poller&) = delete;

  // --- the engine thread
  void add_path(std::shared_ptr<PathHandle> handle, std::unique_ptr<Path> path);
  void abort_path(std::shared_ptr<PathHandle> handle);  // ends in kPathClosed
  [[nodiscard]] bool post(SliceWork* work);             // false: the ring is full
  bool next_event(PollerEvent& event) { return events_.pop(event); }
  std::size_t path_count() const { return path_count_.load(std::memory_order_relaxed); }

 private:
  struct Owned;
  struct Command {
    std::shared_ptr<PathHandle> handle;
    std::unique_ptr<Path> path;  // null: abort
  };

  void run(const std::string& name);
  bool take_commands();
  bool take_work();
  bool drive(Owned& owned);
  void post_pending(Owned& owned);
  void complete(Owned& owned, const Completion& completion);
  void probe_idle(Owned& owned);
  void end_path(Owned& owned, bool broke);
  void fail_unposted(Owned& owned);
  void finish_work(Owned& owned, std::uint32_t slot);
  void watch(Owned& owned);
  void emit(const PollerEvent& event);
  void flush_events();
  void sleep(bool busy, int idle_turns);
  int longest_sleep_ms(bool busy, int idle_turns);
  void wait_events(int timeout_ms);
  void wake();

  const std::function<void()> wake_engine_;
  UniqueFd epoll_, event_;
  boost::lockfree::spsc_queue<SliceWork*> work_;
  boost::lockfree::spsc_queue<PollerEvent> events_;
  std::atomic<bool> stopping_ = false;
  std::atomic<std::size_t> path_count_ = 0;
  std::mutex mutex_;
  std::vector<Command> commands_;  // guarded by mutex_
  std::atomic<bool> has_commands_ = false;

  // Poller thread only.
  std::unordered_map<PathHandle*, std::unique_ptr<Owned>> paths_;
  std::deque<PollerEvent> overflow_;  // when events_ is full
  bool emitted_ = false;
  std::thread thread_;
};

}  // namespace rekindle::transport
