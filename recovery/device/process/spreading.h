#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <variant>

#include "recovery/device/device_order.h"
#include "recovery/device/process/uploading.h"
#include "recovery/device/process/worker_deliver.h"
#include "src/bucket/bucket_verify.h"
#include "src/bucket/round_stages.h"
#include "src/bucket/segment_keep.h"

namespace rekindle::device {

// A session's part in a round (docs/internals/rounds.md): it meets the other ranks, spreads, and
// then uploads from the segments what the round has not brought. The loss of its worker does not
// end it. The session's thread only.
class Spreading {
 public:
  Spreading(const SessionMeans& means, SpreadOrder order);
  ~Spreading();
  Spreading(const Spreading&) = delete;
  Spreading& operator=(const Spreading&) = delete;

  // False: the ranks have not met, and nothing was handed over. Errors come from the worker.
  Result<bool> begin();
  // Returns when the worker has released every bucket. An error of the worker counts after the
  // round.
  Result<void> deliver_all();

  // Null before it has begun.
  bucket::Pipeline* pipeline() { return pipeline_.get(); }
  TimePoint met() const { return met_; }
  // Buckets that did not match and were uploaded once more.
  std::uint64_t refilled() const;

 private:
  Result<void> plan();
  Result<void> want_share();
  Result<std::unique_ptr<bucket::SegmentFetch>> fetch_of(const bucket::Plan& plan) const;
  Result<void> meet();
  Result<void> start();
  Result<void> start_verifying();
  Result<bucket::RoundTail::Fetches> own_copy() const;
  Result<void> start_keeping();
  Result<void> end_keeping();
  Result<void> hear(TimePoint now);
  Result<bucket::Pipeline::State> advance(TimePoint now);
  Result<void> leave(Error why);
  Result<void> start_tail();
  Result<void> start_verifying_tail();
  Result<void> check_share(bucket::Pipeline::State state, TimePoint now);
  void finish();
  void say_over(std::optional<Error> error);
  void tell_progress(TimePoint now);
  void wait(bucket::Pipeline::State state, TimePoint now) const;

  const SessionMeans means_;
  const SpreadOrder order_;
  RoundDeliver deliver_;
  // SpreadOver was not sent yet.
  bool spreading_ = true;
  const TimePoint ordered_;
  TimePoint met_{};
  TimePoint told_at_{};
  std::uint64_t told_bytes_ = 0;
  // Since when no bucket of a share that is being fetched was there. Zero: one was.
  TimePoint lacking_since_{};
  std::optional<bucket::RoundPlan> plan_;
  // In the round: of the rank's own share, if it has one. After the round: as the tail has them.
  bucket::RoundTail::Fetches fetches_;
  // Null before the ranks meet, and after the round.
  std::unique_ptr<bucket::Collective> collective_;
  std::optional<bucket::RoundFetch> fetch_;
  std::optional<bucket::RoundSpread> spread_;
  std::optional<bucket::RoundTail> tail_;
  std::optional<bucket::SegmentKeep> keep_;
  // Of the rank's own share, if it has one.
  std::unique_ptr<bucket::RoundSeal> seal_;
  std::unique_ptr<bucket::RoundVerify> verify_;
  // Set when verify_ is destroyed.
  std::uint64_t refilled_in_round_ = 0;
  // Of tail_. Null: uploads are not verified.
  std::unique_ptr<bucket::UploadVerify> tail_verify_;
  std::unique_ptr<bucket::Pipeline> pipeline_;
};

}  // namespace rekindle::device
