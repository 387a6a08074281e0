#include "recovery/pull/slice_staging.h"

namespace rekindle::pull {

using transport::SliceIndex;

SliceIndex SliceStaging::key_of(SliceIndex slice) const {
  return plan_.kind(slice) == planner::SliceKind::kStaged ? plan_.group_first(slice) : slice;
}

std::byte* SliceStaging::acquire() {
  if (free_.empty()) {
    if (buffers_.size() == kMaxBuffers) return nullptr;
    buffers_.push_back(std::make_unique_for_overwrite<std::byte[]>(kBufferBytes));
    free_.push_back(buffers_.back().get());
  }
  std::byte* buffer = free_.back();
  free_.pop_back();
  return buffer;
}

Result<std::byte*> SliceStaging::take(SliceIndex slice, std::uint64_t bytes) {
  if (bytes > kBufferBytes) {
    return fail(ErrorCode::kInternal, "slice {} needs {} of staging, a buffer has {}", slice,
                format_bytes(bytes), format_bytes(kBufferBytes));
  }
  const std::lock_guard lock(mutex_);
  const auto found = staged_.find(key_of(slice));
  if (found != staged_.end()) {
    ++found->second.slices;
    return found->second.buffer;
  }
  std::byte* buffer = acquire();
  if (buffer == nullptr) return fail(ErrorCode::kExhausted, "no staging buffer is free");
  staged_[key_of(slice)] = {buffer, 1};
  return buffer;
}

void SliceStaging::leave(SliceIndex slice) {
  const std::lock_guard lock(mutex_);
  const auto found = staged_.find(key_of(slice));
  if (found == staged_.end() || --found->second.slices > 0) return;
  free_.push_back(found->second.buffer);
  staged_.erase(found);
}

std::byte* SliceStaging::buffer_of(SliceIndex slice) const {
  const std::lock_guard lock(mutex_);
  const auto found = staged_.find(key_of(slice));
  return found == staged_.end() ? nullptr : found->second.buffer;
}

}  // namespace rekindle::pull
