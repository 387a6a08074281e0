#include "transport/verbs/direct/op_expander.h"

#include <algorithm>
#include <cassert>
#include <cstring>

namespace rekindle::transport::verbs {
namespace {

// Payload bytes from `position` on that lie in one piece of local memory, and where.
struct LocalRun {
  std::byte* address = nullptr;
  std::uint64_t bytes = 0;
};
LocalRun local_run(const ReadOp& op, std::uint64_t position) {
  if (op.count == 1 || op.local_stride == op.run_bytes) {
    return {op.local + position, op.total_bytes() - position};
  }
  const std::uint64_t skip = position % op.run_bytes;
  return {op.local + position / op.run_bytes * op.local_stride + skip, op.run_bytes - skip};
}

// How many whole runs a covering read of at most `room` bytes brings. 0: it does not pay.
std::uint64_t covered_runs(const ReadOp& op, const ExpandLimits& limits, std::uint64_t first_run,
                           std::uint64_t room) {
  const std::uint64_t gap = op.remote_stride - op.run_bytes;
  if (op.remote_stride < op.run_bytes || gap > limits.request_cost_bytes) return 0;
  if (room < op.run_bytes) return 0;
  const std::uint64_t runs = 1 + (room - op.run_bytes) / op.remote_stride;
  const std::uint64_t fitting = std::min(runs, op.count - first_run);
  return fitting >= 2 ? fitting : 0;
}

// Fills the scatter list with up to `wanted` payload bytes; returns how many it holds.
std::uint64_t gather(const ReadOp& op, const ExpandLimits& limits, const AddressBook& book,
                     std::uint64_t wanted, ReadRequest& request) {
  std::uint64_t gathered = 0;
  request.sge_count = 0;
  while (gathered < wanted && request.sge_count < limits.max_sge) {
    const LocalRun run = local_run(op, request.payload_offset + gathered);
    const LocalSpan span = book.local(run.address);
    if (span.bytes == 0) break;
    const std::uint64_t bytes = std::min({run.bytes, span.bytes, wanted - gathered});
    request.sges[request.sge_count++] = {reinterpret_cast<std::uint64_t>(run.address),
                                         static_cast<std::uint32_t>(bytes), span.lkey};
    gathered += bytes;
  }
  return gathered;
}

}  // namespace

void OpCursor::next(const ReadOp& op, const ExpandLimits& limits, const AddressBook& book,
                    ReadRequest& request) {
  assert(!done());
  const std::uint64_t run = position_ / op.run_bytes;
  const std::uint64_t skip = position_ % op.run_bytes;
  const bool remote_dense = op.count == 1 || op.remote_stride == op.run_bytes;
  request.remote_offset = op.remote_offset + run * op.remote_stride + skip;
  request.payload_offset = position_;
  request.bounced = false;
  const std::uint64_t span = book.remote_span(op.remote, request.remote_offset);

  if (!remote_dense && skip == 0) {
    const auto room = std::min<std::uint64_t>(span, limits.bounce_bytes);
    if (const std::uint64_t runs = covered_runs(op, limits, run, room); runs > 0) {
      request.wire_bytes = static_cast<std::uint32_t>((runs - 1) * op.remote_stride + op.run_bytes);
      request.payload_bytes = static_cast<std::uint32_t>(runs * op.run_bytes);
      request.bounced = true;
      request.sge_count = 0;
      position_ += request.payload_bytes;
      return;
    }
  }

  const std::uint64_t contiguous = remote_dense ? total_ - position_ : op.run_bytes - skip;
  std::uint64_t bytes = std::min<std::uint64_t>({contiguous, span, limits.request_bytes});
  const std::uint64_t gathered = gather(op, limits, book, bytes, request);
  const bool too_short = gathered < bytes && gathered < limits.request_cost_bytes &&
                         request.sge_count == limits.max_sge;
  if (gathered == 0 || too_short) {
    bytes = std::min<std::uint64_t>(bytes, limits.bounce_bytes);
    request.bounced = true;
    request.sge_count = 0;
  } else {
    bytes = gathered;
  }
  request.wire_bytes = request.payload_bytes = static_cast<std::uint32_t>(bytes);
  position_ += bytes;
}

void scatter(const ReadOp& op, const ReadRequest& request, const std::byte* block) {
  const bool covering = request.wire_bytes != request.payload_bytes;
  std::uint64_t done = 0;
  while (done < request.payload_bytes) {
    const std::uint64_t position = request.payload_offset + done;
    const LocalRun run = local_run(op, position);
    std::uint64_t bytes = std::min<std::uint64_t>(run.bytes, request.payload_bytes - done);
    std::uint64_t from = done;
    if (covering) {  // it begins and ends with whole runs
      bytes = op.run_bytes;
      from = done / op.run_bytes * op.remote_stride;
    }
    std::memcpy(run.address, block + from, bytes);
    done += bytes;
  }
}

}  // namespace rekindle::transport::verbs
