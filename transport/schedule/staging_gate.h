#pragma once

#include <optional>
#include <set>

#include "src/base/clock.h"
#include "src/base/result.h"
#include "transport/schedule/slice_table.h"

namespace rekindle::transport {

// Which slices may be posted while staging memory is short.
//
// Slices of one group share a buffer, from the first that is posted until all have landed. Once the
// source of the slices has run out of memory, only slices of such begun groups are posted, as they
// free memory. Everything is posted again after memory has been freed.
class StagingGate {
 public:
  StagingGate(const SliceTable& slices, Duration patience) : slices_(slices), patience_(patience) {}

  // The slice is open again, since there was no memory for it.
  void refused(SliceIndex slice, TimePoint now);
  void freed();
  // A slice of this group was posted, or is open again.
  void group_changed(const SliceInfo& info);

  // Memory is short: only next_of_begun_group() is posted.
  bool is_short() const { return short_; }
  bool nothing_may_be_posted() const { return short_ && begun_groups_.empty(); }
  // The first open slice of a begun group that `may_serve` accepts and that was not refused.
  template <typename MayServe>
  std::optional<SliceIndex> next_of_begun_group(const MayServe& may_serve) const {
    for (const SliceIndex first : begun_groups_) {
      const SliceIndex size = slices_.info(first).group_size;
      for (SliceIndex slice = first; slice < first + size; ++slice) {
        if (!slices_.is_open(slice) || refused_.contains(slice)) continue;
        if (may_serve(slice, slices_.info(slice))) return slice;
      }
    }
    return std::nullopt;
  }

  // Others may hold the memory: without slices under way the gate opens at each tick. After
  // `patience` without a change it returns the error that ends the batch.
  std::optional<Error> tick(TimePoint now);
  void forgive(Duration pause) {
    if (stuck_since_) *stuck_since_ += pause;
  }

 private:
  const SliceTable& slices_;
  const Duration patience_;
  bool short_ = false;
  std::set<SliceIndex> refused_;  // since memory is short
  // By first slice. Some slices of a begun group are open, some are not.
  std::set<SliceIndex> begun_groups_;
  // Memory is short, and no slice of this batch will free any.
  std::optional<TimePoint> stuck_since_;
};

}  // namespace rekindle::transport
