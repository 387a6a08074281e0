#include "recovery/pull/memory_path.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "src/base/units.h"
#include "transport/guarded_op.h"

namespace rekindle::pull {

using transport::Completion;
using transport::OpStatus;
using transport::ReadOp;

namespace {

constexpr std::size_t kMaxQueued = 64;
constexpr std::uint64_t kBytesPerPoll = 8 * kMiB;

}  // namespace

MemoryPath::MemoryPath(std::string name, std::vector<std::span<const std::byte>> segments,
                       std::shared_ptr<const void> keep_alive)
    : name_(std::move(name)), segments_(std::move(segments)), keep_alive_(std::move(keep_alive)) {}

Result<std::size_t> MemoryPath::post(std::span<const ReadOp> ops) {
  if (aborted_) return fail(ErrorCode::kPeerLost, "{} was closed", name_);
  const std::size_t taken = std::min(ops.size(), kMaxQueued - std::min(kMaxQueued, queue_.size()));
  queue_.insert(queue_.end(), ops.begin(), ops.begin() + static_cast<std::ptrdiff_t>(taken));
  return taken;
}

std::size_t MemoryPath::poll(std::span<Completion> out) {
  std::size_t finished = 0;
  std::uint64_t copied = 0;
  while (finished < out.size() && !queue_.empty() && copied < kBytesPerPoll) {
    const ReadOp& op = queue_.front();
    const OpStatus status = aborted_ ? OpStatus::kAborted : execute(op);
    if (status == OpStatus::kOk) {
      copied += op.total_bytes();
      bytes_landed_ += op.total_bytes();
    }
    out[finished++] = {op.wr_id, status};
    queue_.pop_front();
  }
  return finished;
}

void MemoryPath::abort() { aborted_ = true; }

OpStatus MemoryPath::execute(const ReadOp& op) {
  if (op.remote.region >= segments_.size()) return OpStatus::kStale;
  const auto segment = segments_[op.remote.region];
  if (op.count == 0 || op.run_bytes == 0) return OpStatus::kInvalid;
  std::uint64_t span_bytes = 0;
  if (__builtin_mul_overflow(op.remote_stride, op.count - 1, &span_bytes) ||
      __builtin_add_overflow(span_bytes, op.run_bytes, &span_bytes) ||
      !in_range(op.remote_offset, span_bytes, segment.size())) {
    return OpStatus::kInvalid;
  }
  return transport::guard_op(op, [&] {
    for (std::uint64_t i = 0; i < op.count; ++i) {
      std::memcpy(op.local + i * op.local_stride,
                  segment.data() + op.remote_offset + i * op.remote_stride, op.run_bytes);
    }
  });
}

}  // namespace rekindle::pull
