#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "recovery/device/process/worker_deliver.h"

namespace rekindle::device {

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

}  // namespace rekindle::device
