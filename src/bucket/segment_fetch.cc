#include "src/bucket/segment_fetch.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace rekindle::bucket {

SegmentFetch::SegmentFetch(const Plan& plan, const Pinner& pinner, Segments segments,
                           TileIndex tile_count)
    : plan_(plan),
      pinner_(pinner),
      segments_(std::move(segments)),
      ready_(tile_count),
      waiting_(plan.size()) {
  std::iota(waiting_.begin(), waiting_.end(), std::size_t{0});
}

Result<void> SegmentFetch::mark_ready(const TileRuns& runs) {
  for (const auto& [begin, end] : runs) {
    if (begin >= end || end > ready_.size()) {
      return fail(ErrorCode::kInternal, "tiles {} to {} are said to be here, of {}", begin, end,
                  ready_.size());
    }
    ready_.set_range(begin, end);
  }
  return {};
}

void SegmentFetch::mark_all_ready() { all_ready_ = true; }

bool SegmentFetch::is_ready(std::size_t bucket) {
  if (!all_ready_) {
    for (const auto& [begin, end] : plan_.tiles(bucket)) {
      for (TileIndex tile = begin; tile < end; ++tile) {
        if (!ready_.test(tile)) return false;
      }
    }
  }
  if (!waits_for_pins_) return true;
  const auto copies = plan_.copies(bucket);
  for (const SegmentCopy& copy : copies) {
    const std::uint64_t reach = (copy.rows - 1) * copy.from_stride + copy.run_bytes;
    if (!pinner_.settled(*segments_[copy.segment], copy.from, reach)) return false;
  }
  return true;
}

std::optional<std::size_t> SegmentFetch::next() {
  const auto found = std::find_if(waiting_.begin(), waiting_.end(),
                                  [this](std::size_t bucket) { return is_ready(bucket); });
  if (found == waiting_.end()) return std::nullopt;
  const std::size_t bucket = *found;
  waiting_.erase(found);
  given_.push_back(bucket);
  return bucket;
}

bool SegmentFetch::take(std::size_t bucket) {
  if (!is_ready(bucket)) return false;
  waiting_.erase(std::remove(waiting_.begin(), waiting_.end(), bucket), waiting_.end());
  return true;
}

void SegmentFetch::give_again_after(std::size_t count) {
  const auto first = given_.begin() + static_cast<std::ptrdiff_t>(count);
  waiting_.insert(waiting_.begin(), first, given_.end());
  given_.erase(first, given_.end());
}

void SegmentFetch::skip(std::size_t count) {
  std::erase_if(waiting_, [count](std::size_t bucket) { return bucket < count; });
}

std::span<const Upload> SegmentFetch::uploads(std::size_t bucket, DeviceAddress to) {
  uploads_.clear();
  for (const SegmentCopy& copy : plan_.copies(bucket)) {
    uploads_.push_back({segments_[copy.segment]->data() + copy.from, to + copy.at, copy.run_bytes,
                        copy.rows, copy.from_stride, copy.to_stride});
  }
  return uploads_;
}

Result<void> SegmentFetch::enqueue(std::size_t bucket, DeviceAddress to, Stream& stream) {
  const auto all = uploads(bucket, to);
  return all.empty() ? Result<void>() : stream.upload(all);
}

std::vector<const std::byte*> data_of(const SegmentFetch::Segments& segments) {
  std::vector<const std::byte*> data;
  for (const auto& segment : segments) data.push_back(segment->data());
  return data;
}

}  // namespace rekindle::bucket
