#pragma once

#include <cassert>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "transport/engine.h"

namespace rekindle::transport {

// The state of every slice of one batch, and the sums that follow from it.
//
//   open --post--> posted --land--> landed --accept--> done
//     ^______________|_________________|   reopen
class SliceTable {
 public:
  using InfoOf = std::function<SliceInfo(SliceIndex)>;
  enum class State : std::uint8_t { kOpen, kPosted, kLanded, kDone };

  SliceTable(SliceIndex count, InfoOf info_of)
      : info_of_(std::move(info_of)), slices_(count), open_(count) {
    for (SliceIndex slice = 0; slice < count; ++slice) open_bytes_ += info(slice).bytes;
  }

  SliceIndex count() const { return static_cast<SliceIndex>(slices_.size()); }
  SliceInfo info(SliceIndex slice) const { return info_of_(slice); }
  State state(SliceIndex slice) const { return slices_[slice].state; }
  bool is_open(SliceIndex slice) const { return state(slice) == State::kOpen; }
  // The source that has the slice in flight, or sent it.
  SourceIndex source_of(SliceIndex slice) const { return slices_[slice].source; }

  void post(SliceIndex slice, SourceIndex source) {
    move(slice, State::kPosted);
    slices_[slice].source = static_cast<std::uint8_t>(source);
  }
  void land(SliceIndex slice) { move(slice, State::kLanded); }
  void accept(SliceIndex slice) { move(slice, State::kDone); }
  void reopen(SliceIndex slice) { move(slice, State::kOpen); }

  std::uint64_t open() const { return open_; }
  std::uint64_t posted() const { return posted_; }
  std::uint64_t landed() const { return landed_; }
  std::uint64_t done() const { return count() - open_ - posted_ - landed_; }
  std::uint64_t open_bytes() const { return open_bytes_; }
  // Landed bytes wait for their verdict.
  std::uint64_t landed_bytes() const { return landed_bytes_; }
  std::uint64_t done_bytes() const { return done_bytes_; }
  // Slices are in flight, or wait for their verdict.
  bool any_under_way() const { return posted_ > 0 || landed_ > 0; }

 private:
  struct Slice {
    State state = State::kOpen;
    std::uint8_t source = 0;
  };

  void move(SliceIndex slice, State to) {
    const std::uint64_t bytes = info(slice).bytes;
    switch (slices_[slice].state) {
      case State::kOpen:
        --open_;
        open_bytes_ -= bytes;
        break;
      case State::kPosted:
        --posted_;
        break;
      case State::kLanded:
        --landed_;
        landed_bytes_ -= bytes;
        break;
      case State::kDone:
        assert(false && "a slice that is done stays done");
        return;
    }
    slices_[slice].state = to;
    switch (to) {
      case State::kOpen:
        ++open_;
        open_bytes_ += bytes;
        break;
      case State::kPosted:
        ++posted_;
        break;
      case State::kLanded:
        ++landed_;
        landed_bytes_ += bytes;
        break;
      case State::kDone:
        done_bytes_ += bytes;
        break;
    }
  }

  const InfoOf info_of_;
  std::vector<Slice> slices_;
  std::uint64_t open_ = 0;
  std::uint64_t posted_ = 0;
  std::uint64_t landed_ = 0;
  std::uint64_t open_bytes_ = 0;
  std::uint64_t landed_bytes_ = 0;
  std::uint64_t done_bytes_ = 0;
};

}  // namespace rekindle::transport
