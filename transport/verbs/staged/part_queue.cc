#include "transport/verbs/staged/part_queue.h"

#include <algorithm>
#include <functional>

namespace rekindle::transport::verbs {

ReadOp with_merged_runs(const ReadOp& op) {
  const bool dense = op.remote_stride == op.run_bytes && op.local_stride == op.run_bytes;
  if (op.count <= 1 || !dense) return op;
  ReadOp merged = op;
  merged.run_bytes = op.total_bytes();
  merged.count = 1;
  merged.remote_stride = merged.local_stride = 0;
  return merged;
}

ReadOp next_part(const ReadOp& op, std::uint64_t position, std::uint64_t max_bytes) {
  const std::uint64_t run = position / op.run_bytes;
  const std::uint64_t skip = position % op.run_bytes;
  ReadOp part = op;
  part.remote_offset = op.remote_offset + run * op.remote_stride + skip;
  part.local = op.local + run * op.local_stride + skip;
  part.count = 1;
  if (skip != 0 || op.run_bytes > max_bytes) {
    // The rest of the run is cut into pieces of about the same size, so that none has a few bytes.
    const std::uint64_t left = op.run_bytes - skip;
    const std::uint64_t pieces = (left - 1) / max_bytes + 1;
    part.run_bytes = (left - 1) / pieces + 1;
  } else {
    part.count = std::min(max_bytes / op.run_bytes, op.count - run);
  }
  if (part.count == 1) part.remote_stride = part.local_stride = 0;
  return part;
}

void PartQueue::add(std::uint16_t slot, const ReadOp& op) {
  Op& state = ops_[slot];
  state = {};
  state.read = with_merged_runs(op);
  state.total = op.total_bytes();
  (empty() ? first_ : ops_[last_].next) = slot;
  last_ = slot;
}

std::uint64_t PartQueue::bytes_wanted(std::uint64_t max_bytes) const {
  const Op& op = ops_[first_];
  return op.next == kNone ? std::min(max_bytes, op.total - op.position) : max_bytes;
}

PartQueue::Part PartQueue::take(std::uint64_t max_bytes) {
  Op& op = ops_[first_];
  Part part{next_part(op.read, op.position, max_bytes), first_, 1};
  const bool whole = part.read.total_bytes() == op.total;
  ++op.outstanding;
  op.position += part.read.total_bytes();
  if (op.position < op.total) return part;
  std::uint16_t last = first_;
  leave();
  while (whole && !empty() && continues(part.read, ops_[first_].read) &&
         part.read.total_bytes() + part.read.run_bytes <= max_bytes) {
    const std::uint16_t next = first_;
    Op& more = ops_[next];
    if (part.read.count == 1) {
      part.read.remote_stride = more.read.remote_offset - part.read.remote_offset;
      part.read.local_stride = static_cast<std::uint64_t>(more.read.local - part.read.local);
    }
    ++part.read.count;
    ++part.op_count;
    ++more.outstanding;
    more.position = more.total;
    leave();
    last = ops_[last].next = next;
  }
  return part;
}

bool PartQueue::continues(const ReadOp& part, const ReadOp& read) {
  const std::uint64_t last = (part.count - 1) * part.remote_stride;
  const std::byte* const last_local = part.local + (part.count - 1) * part.local_stride;
  if (read.count != 1 || read.run_bytes != part.run_bytes || read.remote != part.remote) {
    return false;
  }
  if (std::less<>()(read.local, last_local + part.run_bytes) ||
      read.remote_offset < part.remote_offset + last) {
    return false;
  }
  return part.count == 1 ||
         (read.remote_offset - part.remote_offset - last == part.remote_stride &&
          static_cast<std::uint64_t>(read.local - last_local) == part.local_stride);
}

}  // namespace rekindle::transport::verbs
