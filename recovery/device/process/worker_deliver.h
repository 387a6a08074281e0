#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "recovery/device/process/session_mailbox.h"
#include "src/bucket/bucket_messages.h"
#include "src/bucket/pipeline.h"
#include "src/ipc/channel.h"

namespace rekindle::device {

// The pipeline's last stage: a worker at the other end of a socket (src/bucket/bucket_messages.h).
// The worker is not trusted: if it breaks the protocol, hangs or dies, only its own session fails.
// The session's thread only.
class WorkerDeliver final : public bucket::Deliver {
 public:
  WorkerDeliver(ipc::Channel channel, bucket::Device& device);

  // Tells the worker where its buckets will be.
  Result<void> offer(bucket::Slots& slots);
  // Returns the parts of a bucket that is handed over from now on.
  using PartsOf = std::function<std::vector<bucket::Part>(std::size_t bucket)>;
  void bring(PartsOf parts_of) { parts_of_ = std::move(parts_of); }
  // Reads the worker's messages. kPeerLost: it has closed the channel. kInvalid: it broke the
  // protocol. A worker that has failed sends its own error.
  Result<void> receive(TimePoint now);
  Result<void> send(TimePoint now);
  // Sends the last message, once, as far as the worker takes it.
  void say(bucket::Message last);
  // Waits until the worker has closed its end. False: the deadline has passed, or `stop` is
  // readable.
  bool wait_closed(int stop, TimePoint deadline);

  Result<void> hand_over(std::size_t bucket, std::uint32_t slot) override;
  Result<bool> released(std::uint32_t slot) override;

  // The worker has released a slot, and the device has not finished the worker's reads.
  bool awaits_device() const { return awaited_ > 0; }
  TimePoint last_release() const { return last_release_; }
  // Handed over so far.
  std::uint64_t bytes() const { return bytes_; }
  const ipc::Channel& channel() const { return channel_; }
  bool closed() const { return closed_; }

 private:
  struct Slot {
    enum class State { kOurs, kWorkers, kReleased } state = State::kOurs;
    std::uint64_t sequence = 0;
    std::unique_ptr<bucket::Event> released;
  };
  Result<void> push(bucket::Message message);
  Result<void> on_message(bucket::Message message, TimePoint now);
  Result<void> on_opened(const bucket::OpenedMessage& opened);
  Result<void> on_released(const bucket::ReleasedMessage& released, TimePoint now);

  ipc::Channel channel_;
  bucket::Device& device_;
  PartsOf parts_of_;
  std::vector<Slot> slots_;
  bool opened_ = false;
  bool closed_ = false;
  bool said_last_ = false;
  std::uint64_t sequence_ = 0;
  std::uint32_t awaited_ = 0;
  std::uint64_t bytes_ = 0;
  TimePoint last_release_{};
};

// Hands a round's buckets to the session's worker. When the worker is lost, the buckets are
// discarded, because the other ranks wait for this one. The session's thread only.
class RoundDeliver final : public bucket::Deliver {
 public:
  // `patience`: how long the worker may keep a bucket; check() applies it. `version`: for messages.
  RoundDeliver(WorkerDeliver& worker, std::uint32_t slots, std::chrono::milliseconds patience,
               std::string version)
      : worker_(worker), patience_(patience), version_(std::move(version)), kept_since_(slots) {}

  Result<void> hand_over(std::size_t bucket, std::uint32_t slot) override;
  Result<bool> released(std::uint32_t slot) override;
  // Loses the worker. The round goes on.
  Result<void> spoil(std::size_t bucket, Error why) override;
  // From now on the buckets are uploads of this host's copy.
  void leave_round() { in_round_ = false; }

  // A failure of the worker in any of these loses it.
  void hear(TimePoint now);
  void send(TimePoint now);
  // Called at least twice a second. A much longer gap counts as a stop of this process.
  void check(TimePoint now);
  // Tells the worker. Its buckets may then be overwritten.
  void lose(Error why);

  const std::optional<Error>& lost() const { return lost_; }
  const WorkerDeliver* worker() const { return lost_ ? nullptr : &worker_; }
  bool awaits_device() const { return !lost_ && worker_.awaits_device(); }
  // When to call check() again.
  std::optional<TimePoint> deadline() const;
  TimePoint last_change() const { return last_change_; }

 private:
  std::optional<TimePoint> first_due() const;

  WorkerDeliver& worker_;
  const std::chrono::milliseconds patience_;
  const std::string version_;
  // Per slot, since when the worker has it.
  std::vector<std::optional<TimePoint>> kept_since_;
  std::optional<TimePoint> checked_;
  std::optional<Error> lost_;
  bool in_round_ = true;
  TimePoint last_change_{};
};

// A device gives no signal when it is done, so a session's thread polls it. It polls without a
// pause at first, and then pauses in proportion to the time that the device has already taken.
// nullopt: poll now.
std::optional<Duration> pause_before_asking(Duration quiet);

// Sleeps until the worker or the mailbox has a message, at most `pause`. `worker` is null when it
// is lost.
void sleep_for(Duration pause, const WorkerDeliver* worker, const Mailbox& mailbox);

}  // namespace rekindle::device
