#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "recovery/device/process/worker_deliver.h"

namespace rekindle::device {

// Hands a round's buckets to the session's worker, and to nobody once that is lost: the other ranks
// wait for what this one queues. The session's thread only.
class RoundDeliver final : public bucket::Deliver {
 public:
  // `patience`: for a worker to give a bucket back, where check() is asked.
  // `version`: for messages.
  RoundDeliver(WorkerDeliver& worker, std::uint32_t slots, std::chrono::milliseconds patience,
               std::string version)
      : worker_(worker), patience_(patience), version_(std::move(version)), kept_since_(slots) {}

  Result<void> hand_over(std::size_t bucket, std::uint32_t slot) override;
  Result<bool> released(std::uint32_t slot) override;
  // Loses the worker; the round goes on.
  Result<void> spoil(std::size_t bucket, Error why) override;
  // The buckets from here on are uploads of this host's copy.
  void leave_round() { in_round_ = false; }

  // What goes wrong with the worker in any of these loses it.
  void hear(TimePoint now);
  void send(TimePoint now);
  // Asked at least twice a second: a longer gap is taken for a pause of this process.
  void check(TimePoint now);
  // It is told, and then its buckets are overwritten.
  void lose(Error why);

  const std::optional<Error>& lost() const { return lost_; }
  const WorkerDeliver* worker() const { return lost_ ? nullptr : &worker_; }
  bool awaits_device() const { return !lost_ && worker_.awaits_device(); }
  std::optional<TimePoint> deadline() const;  // when check() is to be asked again
  TimePoint last_change() const { return last_change_; }

 private:
  std::optional<TimePoint> first_due() const;

  WorkerDeliver& worker_;
  const std::chrono::milliseconds patience_;
  const std::string version_;
  std::vector<std::optional<TimePoint>> kept_since_;  // per slot; unset: not with the worker
  std::optional<TimePoint> checked_;
  std::optional<Error> lost_;
  bool in_round_ = true;
  TimePoint last_change_{};
};

}  // namespace rekindle::device
