#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "src/base/clock.h"
#include "src/bucket/plan.h"
#include "src/bucket/slots.h"

// The one way of weights into a GPU: fetch → spread → deliver, bucket by bucket through a few slots
// of device memory. A local re-attach, a pull and a broadcast differ in their stages only:
//   local      fetch: upload from the segments   spread: none   deliver: to a worker by IPC
//   pull       the same, as tiles verify         spread: none   deliver: the same
//   broadcast  fetch: upload of what is owned    spread: NCCL   deliver: the same, once verified
// The first two verify before they deliver if the pipeline is given a Verify.
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
  // Whether all that was queued, and that the device has done, has gone well. What was aborted
  // ends, too: so a bucket that was spread is handed over only once it has been filled and this is
  // fine.
  virtual Result<void> check() = 0;
};

// Compares what a slot was filled with with what it should be.
class Verify {
 public:
  virtual ~Verify() = default;
  // Queues what it takes of the device: the bucket is in the slot at `at`.
  virtual Result<void> enqueue(std::size_t bucket, std::uint32_t slot, DeviceAddress at,
                               Stream& stream) = 0;
  // Once the device has done that. False: some bytes are wrong.
  virtual Result<bool> check(std::uint32_t slot) = 0;
  // Of one whose bytes are wrong: queues to fill it again from this host's memory, and to compare
  // it again. False: that cannot be, or was done before.
  virtual Result<bool> refill(std::uint32_t slot, Stream& stream) = 0;
  // Names the device, and a tensor whose bytes are wrong.
  virtual Error wrong(std::uint32_t slot) const = 0;
};

class Deliver {
 public:
  virtual ~Deliver() = default;
  // The consumer may read the slot behind Slots::filled[slot].
  virtual Result<void> hand_over(std::size_t bucket, std::uint32_t slot) = 0;
  // Whether it has said that it queued its last read of the slot, and that read has been done.
  // Asked again and again: a consumer that is stopped must never hold up a stream.
  virtual Result<bool> released(std::uint32_t slot) = 0;
  // The bucket's bytes are wrong, and right ones cannot be had: the consumer never gets them. Fine:
  // it counts as handed over, and released() tells when its slot is free. An error ends the
  // pipeline.
  virtual Result<void> spoil(std::size_t /*bucket*/, Error why) { return fail(std::move(why)); }
};

// Copies what passes to elsewhere, beside the delivery. Never waits.
class Keep {
 public:
  virtual ~Keep() = default;
  // The slot at `at` has been filled, and is fine. May queue copies of it.
  virtual Result<void> offer(std::size_t bucket, std::uint32_t slot, DeviceAddress at,
                             TimePoint now) = 0;
  // Whether it needs the slot no more. Asked again and again.
  virtual Result<bool> done(std::uint32_t slot) = 0;
  // Until the device has done what was queued.
  virtual Result<void> drain(TimePoint deadline) = 0;
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
  // Is offered every bucket that was spread, and outlives the pipeline. Before the first step.
  void keep_with(Keep& keep) { keep_ = &keep; }
  // Checks every bucket before it is handed over. It has a stream of its own, so that later buckets
  // are fetched meanwhile. Ends with go_on_without_spread(). `verify` outlives its use. Call it
  // before start(), or right after go_on_without_spread().
  Result<void> verify_with(Verify& verify);
  // Waits for what is queued on the device, not for the consumer.
  ~Pipeline();

  enum class State {
    kFetching,   // a slot is free, nothing can be fetched yet
    kReleasing,  // every slot is with the consumer, or the last ones are
    kDone,       // every bucket was delivered and released
  };
  // Does all that can be done now. kTimeout: the consumer kept a slot beyond its deadline, or a
  // spread made no progress by its own; kInternal: the device did not fill one by then. After any
  // error: only go_on_without_spread(), when it has one, and the destructor.
  Result<State> step(TimePoint now);
  // By when step() must be called again, however quiet it is.
  std::optional<TimePoint> deadline() const;
  // Whether a bucket waits for the device to spread or verify it. The device does not signal that:
  // call step() again after a short pause.
  bool awaits_hand_over() const;
  // The same of a bucket that is being kept.
  bool awaits_keep() const;
  std::size_t delivered() const { return delivered_; }
  // Buckets for which hand_over() or spoil() was called. With a spread or a Verify that is after
  // the device has filled and checked them.
  std::size_t handed_over() const { return handed_over_; }
  // Goes on without its spread, after an error of it, or because it shall: buckets that were queued
  // and not handed over are forgotten, those that the consumer has stay its own until it releases
  // them. The next `buckets` buckets have `fetch`'s numbers. What is queued on the device must end:
  // the spread was aborted. kTimeout: it does not by `deadline`, and only drain() and the
  // destructor are left.
  Result<void> go_on_without_spread(std::size_t buckets, Fetch& fetch, TimePoint deadline);
  // Until the device has done what was queued: before memory that it reads is let go.
  Result<void> drain(TimePoint deadline);

 private:
  Result<bool> fill(std::uint32_t slot, TimePoint now);
  Result<void> hand_over_next(TimePoint now);
  Result<bool> hand_over_filled(TimePoint now);
  // kAgain: the slot is being filled again.
  enum class Verdict { kRight, kWrong, kAgain };
  Result<Verdict> verify(std::uint32_t slot, TimePoint now);
  Result<void> pass_over_next(TimePoint now);
  // Told before the device has filled it, so that the consumer waits on the device.
  bool hands_over_at_once() const { return spread_ == nullptr && verify_ == nullptr; }
  Result<Stream*> go_on(Stream& before, Event& event, Stream& after);
  Result<bool> collect(TimePoint now);
  Result<bool> is_free(std::uint32_t slot, TimePoint now);
  Result<void> check_filled(std::uint32_t slot, TimePoint now);
  TimePoint latest(TimePoint now) const;

  struct Slot;
  static TimePoint next_of(const Slot& slot);
  struct Slot {
    bool busy = false;
    bool filled = false;
    bool handed_over = false;
    bool kept = true;       // or is not to be
    bool released = false;  // by the consumer
    std::size_t bucket = 0;
    TimePoint fill_by{};
    TimePoint release_by{};  // once it is handed over
    TimePoint keep_by{};     // likewise
  };
  Device& device_;
  std::size_t buckets_;  // to be handed over in all
  Slots& slots_;
  Fetch* fetch_;
  Spread* spread_;
  Deliver& deliver_;
  Keep* keep_ = nullptr;
  Verify* verify_ = nullptr;
  const PipelineOptions options_;
  std::unique_ptr<Stream> fetch_stream_;
  std::unique_ptr<Stream> spread_stream_;        // null without spread_
  std::unique_ptr<Stream> verify_stream_;        // null without verify_
  std::vector<std::unique_ptr<Event>> fetched_;  // per slot; with spread_ only
  std::vector<std::unique_ptr<Event>> brought_;  // per slot; with verify_ only
  std::vector<Slot> states_;
  std::uint32_t next_slot_ = 0;       // to be filled
  std::uint32_t next_hand_over_ = 0;  // slot
  std::size_t queued_ = 0;
  std::size_t handed_over_ = 0;
  std::size_t delivered_ = 0;
};

}  // namespace rekindle::bucket
