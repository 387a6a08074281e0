#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "src/base/clock.h"
#include "src/bucket/plan.h"
#include "src/bucket/slots.h"

// The one way of weights into a GPU: fetch → spread → deliver, bucket by bucket through a few slots
// of device memory. A local re-attach, a pull and a broadcast differ in their stages only:
//   local      fetch: upload from the segments   spread: none   deliver: to a worker by IPC
//   pull       the same, as tiles verify         spread: none   deliver: the same
//   broadcast  fetch: upload of what is owned    spread: NCCL   deliver: the same
// Stages queue work on streams and order it by events; nothing here waits.
namespace rekindle::bucket {

class Fetch {
 public:
  virtual ~Fetch() = default;
  // The next bucket that can be filled now, each once; nullopt: none yet, or no more.
  virtual std::optional<std::size_t> next() = 0;
  virtual Result<void> enqueue(std::size_t bucket, DeviceAddress to, Stream& stream) = 0;
};

class Spread {
 public:
  virtual ~Spread() = default;
  // In place: the bucket's bytes at `at` go from their owner to all members.
  virtual Result<void> enqueue(std::size_t bucket, DeviceAddress at, Stream& stream) = 0;
};

class Deliver {
 public:
  virtual ~Deliver() = default;
  // The consumer may read the slot behind Slots::filled[slot].
  virtual Result<void> hand_over(std::size_t bucket, std::uint32_t slot) = 0;
  // Whether it has said that it queued its last read of the slot, and that read has been done.
  // Asked again and again: a consumer that is stopped must never hold up a stream.
  virtual Result<bool> released(std::uint32_t slot) = 0;
};

struct PipelineOptions {
  std::chrono::milliseconds release_deadline{30'000};  // of a consumer, for each bucket
  std::chrono::milliseconds fill_deadline{10'000};     // of the device: its copies, and a spread
};

// One device's producer. One thread at a time.
class Pipeline {
 public:
  // `spread` may be null; it has a stream of its own, so that buckets are fetched while earlier
  // ones are spread. All must outlive the pipeline.
  Pipeline(Device& device, std::size_t buckets, Slots& slots, Fetch& fetch, Spread* spread,
           Deliver& deliver, PipelineOptions options = {});
  Pipeline(Device& device, const Plan& plan, Slots& slots, Fetch& fetch, Spread* spread,
           Deliver& deliver, PipelineOptions options = {})
      : Pipeline(device, plan.size(), slots, fetch, spread, deliver, options) {}
  Result<void> start();  // makes its streams
  // Waits for what is queued on the device, not for the consumer.
  ~Pipeline();

  enum class State {
    kFetching,   // a slot is free, nothing can be fetched yet
    kReleasing,  // every slot is with the consumer, or the last ones are
    kDone,       // every bucket was delivered and released
  };
  // Does all that can be done now. kTimeout: the consumer kept a slot beyond its deadline;
  // kInternal: the device did not fill one by then. After any error: only the destructor.
  Result<State> step(TimePoint now);
  // By when step() must be called again, however quiet it is.
  std::optional<TimePoint> deadline() const;
  std::size_t delivered() const { return delivered_; }
  // Until the device has done what was queued: before memory that it reads is let go.
  Result<void> drain(TimePoint deadline);

 private:
  Result<bool> fill(std::uint32_t slot, TimePoint now);
  Result<bool> collect(TimePoint now);
  Result<void> check_filled(std::uint32_t slot, TimePoint now);

  struct Slot {
    bool busy = false;
    bool filled = false;
    TimePoint fill_by{};
    TimePoint release_by{};
  };
  Device& device_;
  const std::size_t buckets_;
  Slots& slots_;
  Fetch& fetch_;
  Spread* const spread_;
  Deliver& deliver_;
  const PipelineOptions options_;
  std::unique_ptr<Stream> fetch_stream_;
  std::unique_ptr<Stream> spread_stream_;        // null without spread_
  std::vector<std::unique_ptr<Event>> fetched_;  // per slot; with spread_ only
  std::vector<Slot> states_;
  std::uint32_t next_slot_ = 0;
  std::size_t filled_ = 0;
  std::size_t delivered_ = 0;
};

}  // namespace rekindle::bucket
