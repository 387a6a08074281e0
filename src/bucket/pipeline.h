#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "src/base/clock.h"
#include "src/bucket/bucket_plan.h"
#include "src/bucket/slots.h"

// All weights reach a GPU this way: fetch → spread → deliver, bucket by bucket through a few slots
// of device memory. A local re-attach, a pull and a broadcast differ only in their stages:
//   local      fetch: upload from the segments   spread: none   deliver: to a worker by IPC
//   pull       the same, as tiles verify         spread: none   deliver: the same
//   broadcast  fetch: upload of owned shares     spread: NCCL   deliver: the same, after a check
//   direct     fetch: NICs write into the slot   spread: none   deliver: the same, after a check
// The first two check each bucket before delivery if the pipeline has a Verify. Stages queue work
// on streams and order it by events; nothing here waits.
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
  // Sends the bucket's bytes at `at` from their owners to all members, in place.
  virtual Result<void> enqueue(std::size_t bucket, DeviceAddress at, Stream& stream) = 0;
  // Whether all work that the device has done so far was right. Aborted work ends as well, so a
  // bucket that was spread is handed over only after it is filled and this check succeeds.
  virtual Result<void> check() = 0;
  // True: it waits for other processes, and they may be the reason if a bucket is not filled in
  // time.
  virtual bool has_peers() const { return true; }
};

// Compares the bytes in a slot with the right ones.
class Verify {
 public:
  virtual ~Verify() = default;
  // Queues the device's part of the work. The bucket is in the slot at `at`.
  virtual Result<void> enqueue(std::size_t bucket, std::uint32_t slot, DeviceAddress at,
                               Stream& stream) = 0;
  // After the device has done that. False: some bytes are wrong.
  virtual Result<bool> check(std::uint32_t slot) = 0;
  // For a slot with wrong bytes: queues work that fills it again from this host's memory and
  // compares it again. False: this is not possible, or was done before.
  virtual Result<bool> refill(std::uint32_t slot, Stream& stream) = 0;
  // The error names the device, and a tensor with wrong bytes.
  virtual Error wrong(std::uint32_t slot) const = 0;
};

class Deliver {
 public:
  virtual ~Deliver() = default;
  // The consumer may read the slot behind Slots::filled[slot].
  virtual Result<void> hand_over(std::size_t bucket, std::uint32_t slot) = 0;
  // Whether the consumer has released the slot and its last read is done. This is polled, because a
  // stopped consumer must never block a stream.
  virtual Result<bool> released(std::uint32_t slot) = 0;
  // The bucket's bytes are wrong and cannot be replaced, so the consumer never gets them. On
  // success the bucket counts as handed over, and released() reports when its slot is free. An
  // error ends the pipeline.
  virtual Result<void> spoil(std::size_t /*bucket*/, Error why) { return fail(std::move(why)); }
};

// Copies passing buckets to another place, beside the delivery. Never waits.
class Keep {
 public:
  virtual ~Keep() = default;
  // The slot at `at` is filled with right bytes. May queue copies of it.
  virtual Result<void> offer(std::size_t bucket, std::uint32_t slot, DeviceAddress at,
                             TimePoint now) = 0;
  // Whether it no longer needs the slot. This is polled.
  virtual Result<bool> done(std::uint32_t slot) = 0;
  // Waits until the device has done the queued work.
  virtual Result<void> drain(TimePoint deadline) = 0;
};

struct PipelineOptions {
  // For the consumer, for each bucket.
  std::chrono::milliseconds release_deadline{30'000};
  // For the device: its copies, and a spread.
  std::chrono::milliseconds fill_deadline{10'000};
};

// One device's producer. One thread at a time.
class Pipeline {
 public:
  // `spread` may be null. It has a stream of its own, so that buckets are fetched while earlier
  // ones are spread. All arguments must outlive the pipeline.
  Pipeline(Device& device, std::size_t buckets, Slots& slots, Fetch& fetch, Spread* spread,
           Deliver& deliver, PipelineOptions options = {});
  Pipeline(Device& device, const Plan& plan, Slots& slots, Fetch& fetch, Spread* spread,
           Deliver& deliver, PipelineOptions options = {})
      : Pipeline(device, plan.size(), slots, fetch, spread, deliver, options) {}
  // Makes the streams.
  Result<void> start();
  // `keep` is offered every bucket that was spread, and outlives the pipeline. Call it before the
  // first step.
  void keep_with(Keep& keep) { keep_ = &keep; }
  // Later buckets come from `fetch` and are also spread. Ends with go_on_without_spread(). Both
  // outlive their use. Call it after start(), between two steps, on a pipeline without a spread.
  Result<void> spread_with(Fetch& fetch, Spread& spread);
  // Checks every bucket before it is handed over. It has a stream of its own, so that later buckets
  // are fetched meanwhile. Ends with go_on_without_spread(). `verify` outlives its use. Call it
  // before start(), or right after go_on_without_spread().
  Result<void> verify_with(Verify& verify);
  // Waits for the queued work of the device, not for the consumer.
  ~Pipeline();

  enum class State {
    // A slot is free, and no bucket can be fetched yet.
    kFetching,
    // The consumer has every slot, or the last ones.
    kReleasing,
    // Every bucket was delivered and released.
    kDone,
  };
  // Does all work that is possible now. kTimeout: the consumer kept a slot beyond its deadline, or
  // a spread made no progress by its deadline. kInternal: the device did not fill a slot in time.
  // After any error, call only go_on_without_spread() or the destructor.
  Result<State> step(TimePoint now);
  // When step() must be called again at the latest.
  std::optional<TimePoint> deadline() const;
  // Whether a bucket waits for the device to spread or verify it. The device does not signal that:
  // call step() again after a short pause.
  bool awaits_hand_over() const;
  // The same for a bucket that is being kept.
  bool awaits_keep() const;
  std::size_t delivered() const { return delivered_; }
  // Buckets for which hand_over() or spoil() was called. With a spread or a Verify that is after
  // the device has filled and checked them.
  std::size_t handed_over() const { return handed_over_; }
  // From the arrival of a bucket on the device until it has been verified there, of all buckets
  // together.
  Duration verifying() const { return verifying_; }
  // Continues without a spread, after an error of it, of a fetch or of a Verify, or on request.
  // Buckets that were queued and not handed over are forgotten. The consumer keeps its buckets
  // until it releases them. The next `buckets` buckets have the numbers of `fetch`. The queued work
  // of the device must end: a spread was aborted. kTimeout: it does not end by `deadline`; then
  // call only drain() or the destructor.
  Result<void> go_on_without_spread(std::size_t buckets, Fetch& fetch, TimePoint deadline);
  // Waits until the device has done the queued work. Call it before the memory that it reads is
  // freed.
  Result<void> drain(TimePoint deadline);

 private:
  Result<bool> fill(std::uint32_t slot, TimePoint now);
  Result<void> hand_over_next(TimePoint now);
  Result<bool> hand_over_filled(TimePoint now);
  // kAgain: the slot is being filled again.
  enum class Verdict { kRight, kWrong, kAgain };
  Result<Verdict> verify(std::uint32_t slot, TimePoint now);
  Result<void> pass_over_next(TimePoint now);
  // The consumer hears of a bucket before the device has filled it, and waits on the device.
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
    // Kept, or not to be kept.
    bool kept = true;
    // By the consumer.
    bool released = false;
    std::size_t bucket = 0;
    // With verify_: when its bytes were seen on the device. Zero: not yet.
    TimePoint brought_at{};
    TimePoint fill_by{};
    // Both are set when the bucket is handed over.
    TimePoint release_by{};
    TimePoint keep_by{};
  };
  Device& device_;
  // Number of buckets in all.
  std::size_t buckets_;
  Slots& slots_;
  Fetch* fetch_;
  Spread* spread_;
  Deliver& deliver_;
  Keep* keep_ = nullptr;
  Verify* verify_ = nullptr;
  const PipelineOptions options_;
  std::unique_ptr<Stream> fetch_stream_;
  // Null without spread_ and verify_.
  std::unique_ptr<Stream> spread_stream_;
  std::unique_ptr<Stream> verify_stream_;
  // Per slot; only with spread_ and verify_.
  std::vector<std::unique_ptr<Event>> fetched_;
  std::vector<std::unique_ptr<Event>> brought_;
  std::vector<Slot> states_;
  // The slot to fill next, and the slot to hand over next.
  std::uint32_t next_slot_ = 0;
  std::uint32_t next_hand_over_ = 0;
  std::size_t queued_ = 0;
  std::size_t handed_over_ = 0;
  std::size_t delivered_ = 0;
  Duration verifying_{};
};

}  // namespace rekindle::bucket
