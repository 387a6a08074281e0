#include "transport/verbs/stage_part.h"

#include <algorithm>

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
    // What is left of the run in pieces of about the same size: none of a few bytes.
    const std::uint64_t left = op.run_bytes - skip;
    const std::uint64_t pieces = (left - 1) / max_bytes + 1;
    part.run_bytes = (left - 1) / pieces + 1;
  } else {
    part.count = std::min(max_bytes / op.run_bytes, op.count - run);
  }
  if (part.count == 1) part.remote_stride = part.local_stride = 0;
  return part;
}

}  // namespace rekindle::transport::verbs
