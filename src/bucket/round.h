#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "src/bucket/pipeline.h"
#include "src/bucket/plan.h"
#include "src/bucket/segment_fetch.h"

// A broadcast round: each rank owns a part of the weights in its host's memory, and every rank gets
// all of them. Bucket k is made of equal shares, one per rank: share r holds bucket k of rank r's
// own plan. So all ranks upload at once, and one all-gather in place does the rest.
namespace rekindle::bucket {

// Spreads tensors over `ranks` owners, in the order of the set, so that each has about as many
// bytes. Returns the owner of each tensor.
std::vector<std::uint32_t> share_out(const TensorSet& tensors, std::uint32_t ranks);

class RoundPlan {
 public:
  // The parts that `owner` says are each rank's, whole tensors of `contents`, in the order of the
  // set: every rank comes to the same plan, wherever its copy has them. kInvalid: `contents` has
  // boxes that are no whole tensors, or `owner` names no rank.
  static Result<RoundPlan> create(const Contents& contents, std::span<const std::uint32_t> owner,
                                  std::uint32_t ranks, std::uint64_t bucket_bytes);

  std::size_t size() const { return size_; }  // buckets
  std::uint32_t ranks() const { return static_cast<std::uint32_t>(plans_.size()); }
  std::uint64_t share_bytes() const { return share_bytes_; }
  std::uint64_t bucket_bytes() const { return share_bytes_ * ranks(); }
  const Plan& plan_of(std::uint32_t rank) const { return plans_[rank]; }
  // All that bucket `index` brings; `at` counts from the bucket's start.
  std::vector<Part> parts(std::size_t index) const;

 private:
  std::vector<Plan> plans_;
  std::uint64_t share_bytes_ = 0;
  std::size_t size_ = 0;
};

// One rank's uploads into its share of each bucket, in order: all ranks go through the same
// buckets.
class RoundFetch final : public Fetch {
 public:
  RoundFetch(const RoundPlan& plan, std::uint32_t rank, SegmentFetch& own)
      : plan_(plan), rank_(rank), own_(own) {}

  std::optional<std::size_t> next() override;
  Result<void> enqueue(std::size_t bucket, DeviceAddress to, Stream& stream) override;

 private:
  const RoundPlan& plan_;
  const std::uint32_t rank_;
  SegmentFetch& own_;
  std::size_t next_ = 0;
};

}  // namespace rekindle::bucket
