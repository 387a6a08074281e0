#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "src/bucket/device.h"

// Private to double devices and their collectives: streams and events.
namespace rekindle::bucket {

// A memfd of fixed size, so that no process can make another's mapping fault.
Result<UniqueFd> make_memfd(const char* name, std::uint64_t bytes);
// Whether its size is fixed and at least `bytes`.
bool has_fixed_size(int fd, std::uint64_t bytes);

// A shared mapping.
class Mapping {
 public:
  static Result<std::unique_ptr<Mapping>> of(int fd, std::uint64_t bytes,
                                             Access access = Access::kWrite);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  void* data() const { return data_; }
  std::uint64_t bytes() const { return bytes_; }
  Access access() const { return access_; }
  Result<void> set_access(Access access);

 private:
  Mapping(void* data, std::uint64_t bytes, Access access)
      : data_(data), bytes_(bytes), access_(access) {}
  void* const data_;
  const std::uint64_t bytes_;
  Access access_;
};

// Lies in memory that all processes of an event map. The zeros of a new memfd are an event that was
// never recorded. An event whose recorder dies is never done.
struct EventState {
  std::atomic<std::uint64_t> recorded;
  std::atomic<std::uint64_t> completed;
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

class EventPage {
 public:
  explicit EventPage(std::unique_ptr<Mapping> mapping) : mapping_(std::move(mapping)) {}
  EventState& state() const { return *static_cast<EventState*>(mapping_->data()); }

 private:
  const std::unique_ptr<Mapping> mapping_;
};

class DoubleEvent final : public Event {
 public:
  // `only_for`: the device whose streams may wait for it. Null: all devices'.
  DoubleEvent(std::shared_ptr<EventPage> page, UniqueFd fd, const Device* only_for)
      : page_(std::move(page)), fd_(std::move(fd)), only_for_(only_for) {}
  const EventPage& page() const { return *page_; }
  const std::shared_ptr<EventPage>& shared_page() const { return page_; }
  // Empty if the event was opened from a handle.
  const UniqueFd& fd() const { return fd_; }
  const Device* only_for() const { return only_for_; }

 private:
  // Shared, because queued work may outlive the event.
  const std::shared_ptr<EventPage> page_;
  const UniqueFd fd_;
  const Device* const only_for_;
};

class DoubleDigests final : public Digests {
 public:
  explicit DoubleDigests(std::size_t capacity) : capacity_(capacity) {}
  std::size_t capacity() const override { return capacity_; }
  std::span<const Digest> values() const override { return values_; }
  // Room for the results of a batch of so many boxes, which its stream writes.
  std::span<Digest> begin(std::size_t count) {
    values_.assign(count, {});
    return values_;
  }

 private:
  const std::size_t capacity_;
  std::vector<Digest> values_;
};

// A thread that does its work in order. Thread-safe.
class DoubleQueue {
 public:
  // Work checks `stop` often, and returns false if it has stopped.
  using Work = std::function<bool(const std::atomic<bool>& stop)>;

  DoubleQueue();
  // Drops the queued work.
  ~DoubleQueue();
  DoubleQueue(const DoubleQueue&) = delete;
  DoubleQueue& operator=(const DoubleQueue&) = delete;
  void push(Work work);
  bool wait_empty(TimePoint deadline);

 private:
  void run();

  std::atomic<bool> stop_ = false;
  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_. The thread does the first one.
  std::deque<Work> work_;
  std::thread thread_;
};

// All streams of a queue are one stream.
std::unique_ptr<Stream> make_double_stream(std::shared_ptr<DoubleQueue> queue,
                                           const Device& device);
// Queues work on the stream. kInvalid: it is not a stream of a double.
Result<void> push_work(Stream& stream, DoubleQueue::Work work);

// Sleeps once while the caller polls for the write of another process. Each sleep is longer, up to
// a limit.
void nap(std::chrono::microseconds& length);

}  // namespace rekindle::bucket
