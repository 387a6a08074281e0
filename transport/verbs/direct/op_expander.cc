#include "transport/verbs/direct/op_expander.h"

#include <algorithm>
#include <cassert>
#include <cstring>

namespace rekindle::transport::verbs {
namespace {

// The pieces of local memory that hold the payload from byte `skip` of run `run` on.
class LocalRuns {
 public:
  LocalRuns(const ReadOp& op, std::uint64_t run, std::uint64_t skip)
      : stride_(op.local_stride),
        run_bytes_(op.run_bytes),
        begin_(op.local + run * op.local_stride),
        address_(begin_ + skip),
        left_(op.run_bytes - skip) {
    if (op.count > 1 && op.local_stride == op.run_bytes) left_ += (op.count - 1 - run) * run_bytes_;
  }

  std::byte* address() const { return address_; }
  std::uint64_t bytes() const { return left_; }  // in one piece
  // At most bytes().
  void advance(std::uint64_t bytes) {
    address_ += bytes;
    left_ -= bytes;
    if (left_ > 0) return;
    begin_ += stride_;
    address_ = begin_;
    left_ = run_bytes_;
  }

 private:
  std::uint64_t stride_;
  std::uint64_t run_bytes_;
  std::byte* begin_;  // of the run
  std::byte* address_;
  std::uint64_t left_;
};

}  // namespace

OpCursor::OpCursor(const ReadOp& op, const ExpandLimits& limits) : total_(op.total_bytes()) {
  // Bytes of a bounce block cannot be copied to a device.
  if (op.count == 1 || op.in_device) return;
  to_registered_ = cheaper_reads(op, Landing::kRegistered, limits.max_sge, limits.costs);
  to_unregistered_ = cheaper_reads(op, Landing::kUnregistered, limits.max_sge, limits.costs);
}

std::uint64_t OpCursor::gather(const ReadOp& op, const ExpandLimits& limits,
                               const AddressBook& book, std::uint64_t wanted,
                               ReadRequest& request) const {
  LocalRuns runs(op, run_, skip_);
  std::uint64_t gathered = 0;
  request.sge_count = 0;
  while (gathered < wanted && request.sge_count < limits.max_sge) {
    const LocalSpan span = book.local(runs.address());
    if (span.bytes == 0) break;
    const std::uint64_t bytes = std::min({runs.bytes(), span.bytes, wanted - gathered});
    request.sges[request.sge_count++] = {reinterpret_cast<std::uint64_t>(runs.address()),
                                         static_cast<std::uint32_t>(bytes), span.lkey};
    gathered += bytes;
    runs.advance(bytes);
  }
  return gathered;
}

std::uint64_t OpCursor::whole_runs(const ReadOp& op, std::uint64_t room) const {
  if (skip_ > 0 || room < op.run_bytes) return 0;
  return std::min(1 + (room - op.run_bytes) / op.remote_stride, op.count - run_);
}

void OpCursor::look_up_next(const ReadOp& op, const ExpandLimits& limits, const AddressBook& book,
                            ReadRequest& request) {
  assert(!done());
  stretch_ = 0;
  const bool consecutive = op.count == 1 || op.remote_stride == op.run_bytes;
  request.remote_offset = op.remote_offset + run_ * op.remote_stride + skip_;
  request.payload_offset = position_;
  const std::uint64_t span = book.remote_span(op.remote, request.remote_offset);
  const std::uint64_t contiguous =
      std::min(consecutive ? total_ - position_ : op.run_bytes - skip_, span);

  std::uint64_t bytes = 0;
  if (to_registered_ == RunReads::kInPlace) {
    bytes = gather(op, limits, book, std::min<std::uint64_t>(contiguous, limits.request_bytes),
                   request);
  }
  std::uint64_t wire_bytes = bytes;
  request.bounced = bytes == 0;
  if (request.bounced) {
    request.sge_count = 0;
    const auto room = std::min<std::uint64_t>(span, limits.bounce_bytes);
    const std::uint64_t runs = to_unregistered_ == RunReads::kTogether ? whole_runs(op, room) : 0;
    wire_bytes =
        runs > 1 ? (runs - 1) * op.remote_stride + op.run_bytes : std::min(contiguous, room);
    bytes = runs > 1 ? runs * op.run_bytes : wire_bytes;
  }
  request.wire_bytes = static_cast<std::uint32_t>(wire_bytes);
  request.payload_bytes = static_cast<std::uint32_t>(bytes);
  if (!consecutive && !request.bounced && bytes == op.run_bytes && request.sge_count == 1) {
    find_stretch(op, span, book);
  }
  advance(op, bytes);
}

// Counts the runs after the present one that need no look-up.
void OpCursor::find_stretch(const ReadOp& op, std::uint64_t remote_bytes, const AddressBook& book) {
  if (op.remote_stride == 0 || op.local_stride == 0) return;
  const LocalSpan local = book.local(op.local + run_ * op.local_stride);
  stretch_ = std::min({op.count - run_ - 1, (remote_bytes - op.run_bytes) / op.remote_stride,
                       (local.bytes - op.run_bytes) / op.local_stride});
  stretch_lkey_ = local.lkey;
}

void OpCursor::advance(const ReadOp& op, std::uint64_t bytes) {
  position_ += bytes;
  skip_ += bytes;
  if (skip_ < op.run_bytes) return;
  if (skip_ == op.run_bytes) {
    ++run_;
    skip_ = 0;
    return;
  }
  run_ += skip_ / op.run_bytes;
  skip_ %= op.run_bytes;
}

void scatter(const ReadOp& op, const ReadRequest& request, const std::byte* block) {
  // Otherwise the payload has no gaps, and may begin or end within a run.
  const bool whole_runs = request.wire_bytes != request.payload_bytes;
  const std::uint64_t gap = whole_runs ? op.remote_stride - op.run_bytes : 0;
  LocalRuns runs(op, request.payload_offset / op.run_bytes, request.payload_offset % op.run_bytes);
  for (std::uint64_t left = request.payload_bytes; left > 0;) {
    std::uint64_t bytes = std::min(runs.bytes(), left);
    if (whole_runs) bytes = op.run_bytes;
    std::memcpy(runs.address(), block, bytes);
    runs.advance(bytes);
    block += bytes + gap;
    left -= bytes;
  }
}

}  // namespace rekindle::transport::verbs
