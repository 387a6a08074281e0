#pragma once

#include <bit>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "src/base/result.h"
#include "src/base/units.h"

namespace rekindle::transport {

// Names a registered region of one incarnation of one process. A region that is registered again
// has another generation. So an old key is kStale; it never leads to other bytes.
struct RegionKey {
  std::uint32_t region = 0;
  std::uint32_t generation = 0;
  auto operator<=>(const RegionKey&) const = default;
};

// One strided read of `count` runs of `run_bytes`. Run i comes from remote_offset + i *
// remote_stride of the region and lands at local + i * local_stride. Verbs expands it to work
// requests. TCP sends it as it is, and the server gathers the runs.
struct ReadOp {
  std::uint64_t wr_id = 0;  // slot and generation of the poster's table, never a pointer
  RegionKey remote;
  std::uint64_t remote_offset = 0;  // bytes
  // Must stay valid until this op's Completion.
  std::byte* local = nullptr;
  std::uint64_t run_bytes = 0;
  std::uint64_t count = 1;
  std::uint64_t remote_stride = 0;  // bytes; 0 when count == 1
  std::uint64_t local_stride = 0;   // bytes; 0 when count == 1
  // `local` is an address of DeviceLanding: nothing is mapped there, and only a NIC can write to
  // it.
  bool in_device = false;

  std::uint64_t total_bytes() const { return run_bytes * count; }
};

// Overflow-safe checks of a strided range. A peer's request is not to be trusted.
struct StridedRange {
  std::uint64_t offset = 0;
  std::uint64_t run_bytes = 0;
  std::uint64_t count = 0;
  std::uint64_t stride = 0;
};

// run_bytes * count, or nothing when that overflows.
constexpr std::optional<std::uint64_t> payload_bytes(std::uint64_t run_bytes, std::uint64_t count) {
  std::uint64_t total = 0;
  if (__builtin_mul_overflow(run_bytes, count, &total)) return std::nullopt;
  return total;
}

// Whether every run lies in [0, limit).
constexpr bool fits(const StridedRange& range, std::uint64_t limit) {
  const auto total = payload_bytes(range.run_bytes, range.count);
  if (!total) return false;
  if (*total == 0) return range.offset <= limit;
  std::uint64_t last = 0;  // where the last run starts
  if (__builtin_mul_overflow(range.count - 1, range.stride, &last)) return false;
  if (__builtin_add_overflow(last, range.offset, &last)) return false;
  return in_range(last, range.run_bytes, limit);
}

// One past the last byte of a range that fits and is not empty.
constexpr std::uint64_t end_of(const StridedRange& range) {
  return range.offset + (range.count - 1) * range.stride + range.run_bytes;
}

enum class OpStatus : std::uint8_t {
  kOk,
  kStale,     // key of another generation or incarnation: look the source up again
  kDenied,    // the session may not read this region, or its grant was revoked
  kInvalid,   // outside the region
  kPeerLost,  // the connection broke
  kTimeout,   // no progress by the deadline
  kAborted,   // abort() was called
  kFault,     // the source could not read its own bytes (truncated file, EIO)
  // This side could not write its own memory: a truncated file, or a full or failing device. No
  // peer causes it or reports it.
  kLocalFault,
};
std::string_view to_string(OpStatus status);
ErrorCode to_error_code(OpStatus status);

// Runs a part of an op's copy between two file mappings. Either file may be truncated meanwhile.
// kFault: the source could not be read. kLocalFault: the destination could not be written.
OpStatus guard_op(const ReadOp& op, const std::function<void()>& copy);

struct Completion {
  std::uint64_t wr_id = 0;
  OpStatus status = OpStatus::kOk;
};

// Indices into the engine's tables for one batch.
using SourceIndex = std::uint32_t;
using SliceIndex = std::uint32_t;
inline constexpr SourceIndex kMaxSources = 64;

// A set of sources.
class SourceMask {
 public:
  constexpr SourceMask() = default;
  constexpr explicit SourceMask(std::uint64_t bits) : bits_(bits) {}
  constexpr bool test(SourceIndex source) const { return bits_ >> source & 1; }
  constexpr void set(SourceIndex source) { bits_ |= std::uint64_t{1} << source; }
  constexpr void reset(SourceIndex source) { bits_ &= ~(std::uint64_t{1} << source); }
  constexpr bool empty() const { return bits_ == 0; }
  constexpr int count() const { return std::popcount(bits_); }
  constexpr std::uint64_t bits() const { return bits_; }
  constexpr SourceMask operator&(SourceMask other) const { return SourceMask(bits_ & other.bits_); }
  constexpr SourceMask operator|(SourceMask other) const { return SourceMask(bits_ | other.bits_); }
  constexpr SourceMask operator~() const { return SourceMask(~bits_); }
  bool operator==(const SourceMask&) const = default;

 private:
  std::uint64_t bits_ = 0;
};

}  // namespace rekindle::transport
