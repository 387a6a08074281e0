#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <variant>

#include "recovery/device/device_order.h"
#include "recovery/device/process/round_deliver.h"
#include "recovery/device/process/uploading.h"
#include "src/bucket/round.h"
#include "src/bucket/round_verify.h"
#include "src/bucket/segment_keep.h"
#include "src/bucket/upload_verify.h"

namespace rekindle::device {

// A session's part in a round (docs/rounds.md): it meets the other ranks, spreads, and brings what
// the round has left out from the segments. A worker that is lost does not end it. The session's
// thread only.
class Spreading {
 public:
  Spreading(const SessionMeans& means, SpreadOrder order);
  ~Spreading();
  Spreading(const Spreading&) = delete;
  Spreading& operator=(const Spreading&) = delete;

  // False: the ranks have not met, and nothing was handed over. An error: the worker's.
  Result<bool> begin();
  // Until the worker has every bucket and has released it. The worker's error: after the round.
  Result<void> deliver_all();

  bucket::Pipeline* pipeline() { return pipeline_.get(); }  // null before it has begun
  TimePoint met() const { return met_; }
  std::uint64_t refilled() const;  // buckets that did not match and were uploaded once more

 private:
  Result<void> plan();
  Result<std::unique_ptr<bucket::SegmentFetch>> fetch_of(std::uint32_t share) const;
  Result<void> meet();
  Result<void> start();
  Result<void> start_verifying();
  Result<bucket::RoundTail::Fetches> own_copy() const;
  Result<void> start_keeping();
  Result<void> end_keeping();
  Result<void> hear(TimePoint now);
  Result<bucket::Pipeline::State> advance(TimePoint now);
  Result<void> leave(Error why);
  Result<void> start_verifying_tail();
  void finish();
  void say_over(std::optional<Error> error);
  void tell_progress(TimePoint now);
  void wait(bucket::Pipeline::State state, TimePoint now) const;

  const SessionMeans means_;
  const SpreadOrder order_;
  RoundDeliver deliver_;
  bool spreading_ = true;  // SpreadOver was not said yet
  const TimePoint ordered_;
  TimePoint met_{};
  TimePoint told_at_{};
  std::uint64_t told_bytes_ = 0;
  std::optional<bucket::RoundPlan> plan_;
  bucket::RoundTail::Fetches fetches_;  // of the own share, if it has one; after the round: of all
  std::unique_ptr<bucket::Collective> collective_;  // null: kept, or none
  std::optional<bucket::RoundFetch> fetch_;
  std::optional<bucket::RoundSpread> spread_;
  std::optional<bucket::RoundTail> tail_;
  std::optional<bucket::SegmentKeep> keep_;
  std::unique_ptr<bucket::RoundSeal> seal_;  // of the own share, if it has one
  std::unique_ptr<bucket::RoundVerify> verify_;
  std::uint64_t refilled_in_round_ = 0;                // once verify_ is gone
  std::unique_ptr<bucket::UploadVerify> tail_verify_;  // of tail_; null: not wanted
  std::unique_ptr<bucket::Pipeline> pipeline_;
};

}  // namespace rekindle::device
