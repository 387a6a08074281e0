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

// Private to the double device and what spreads among such: streams and events.
namespace rekindle::bucket {

// Of fixed size, so that no process can make another's mapping fault.
Result<UniqueFd> make_memfd(const char* name, std::uint64_t bytes);
bool has_fixed_size(int fd, std::uint64_t bytes);  // so much at least

// Shared and writable.
class Mapping {
 public:
  static Result<std::unique_ptr<Mapping>> of(int fd, std::uint64_t bytes);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  void* data() const { return data_; }
  std::uint64_t bytes() const { return bytes_; }

 private:
  Mapping(void* data, std::uint64_t bytes) : data_(data), bytes_(bytes) {}
  void* const data_;
  const std::uint64_t bytes_;
};

// In memory that all processes of an event map; a new memfd's zeros are one that was never
// recorded. When its recorder dies it stays undone.
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
  DoubleEvent(std::shared_ptr<EventPage> page, UniqueFd fd)
      : page_(std::move(page)), fd_(std::move(fd)) {}
  const EventPage& page() const { return *page_; }
  const std::shared_ptr<EventPage>& shared_page() const { return page_; }
  const UniqueFd& fd() const { return fd_; }  // none: opened

 private:
  const std::shared_ptr<EventPage> page_;  // queued work may outlive the event
  const UniqueFd fd_;
};

class DoubleDigests final : public Digests {
 public:
  explicit DoubleDigests(std::size_t capacity) : capacity_(capacity) {}
  std::size_t capacity() const override { return capacity_; }
  std::span<const Digest> values() const override { return values_; }
  // The results of a batch of so many boxes; its stream writes them.
  std::span<Digest> begin(std::size_t count) {
    values_.assign(count, {});
    return values_;
  }

 private:
  const std::size_t capacity_;
  std::vector<Digest> values_;
};

// A thread that does what it is given, in order. Thread-safe.
class DoubleQueue {
 public:
  // Checks often whether it shall stop; false: it did.
  using Work = std::function<bool(const std::atomic<bool>& stop)>;

  DoubleQueue();
  ~DoubleQueue();  // what is still queued is not done
  DoubleQueue(const DoubleQueue&) = delete;
  DoubleQueue& operator=(const DoubleQueue&) = delete;
  void push(Work work);
  bool wait_empty(TimePoint deadline);

 private:
  void run();

  std::atomic<bool> stop_ = false;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> work_;  // guarded by mutex_; the first is being done
  std::thread thread_;
};

// Streams of one queue are one stream.
std::unique_ptr<Stream> make_double_stream(std::shared_ptr<DoubleQueue> queue);
// Work of the stream's, in order. kInvalid: it is no double's.
Result<void> push_work(Stream& stream, DoubleQueue::Work work);

// One turn of polling for what another process writes: sleeps, longer from time to time.
void nap(std::chrono::microseconds& length);

}  // namespace rekindle::bucket
