#pragma once

#include <array>
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
// Of one batch. The parts of a version may lie on as many hosts.
inline constexpr SourceIndex kMaxSources = 256;

// A set of sources.
class SourceMask {
 public:
  static constexpr std::size_t kWords = kMaxSources / 64;

  constexpr SourceMask() = default;
  // Sources 0 to 63, by bit.
  constexpr explicit SourceMask(std::uint64_t first_word) { words_[0] = first_word; }
  static constexpr SourceMask of(SourceIndex source) {
    SourceMask mask;
    mask.set(source);
    return mask;
  }
  // The sources 0 to `count` - 1.
  static constexpr SourceMask first(SourceIndex count) {
    SourceMask mask;
    for (SourceIndex source = 0; source < count; ++source) mask.set(source);
    return mask;
  }
  constexpr bool test(SourceIndex source) const { return words_[source / 64] >> source % 64 & 1; }
  constexpr void set(SourceIndex source) { words_[source / 64] |= std::uint64_t{1} << source % 64; }
  constexpr void reset(SourceIndex source) {
    words_[source / 64] &= ~(std::uint64_t{1} << source % 64);
  }
  constexpr bool empty() const { return *this == SourceMask(); }
  constexpr int count() const {
    int count = 0;
    for (const std::uint64_t word : words_) count += std::popcount(word);
    return count;
  }
  // The lowest one at or above `from`. kMaxSources: there is none.
  constexpr SourceIndex next(SourceIndex from = 0) const {
    for (std::size_t i = from / 64; i < kWords; ++i) {
      const std::uint64_t skipped = i == from / 64 ? from % 64 : 0;
      const std::uint64_t left = words_[i] >> skipped << skipped;
      if (left != 0)
        return static_cast<SourceIndex>(i * 64 + static_cast<std::size_t>(std::countr_zero(left)));
    }
    return kMaxSources;
  }
  // Bit b of word w stands for source 64 w + b.
  constexpr std::uint64_t word(std::size_t i) const { return words_[i]; }
  constexpr void set_word(std::size_t i, std::uint64_t word) { words_[i] = word; }
  constexpr SourceMask operator&(const SourceMask& other) const {
    SourceMask both;
    for (std::size_t i = 0; i < kWords; ++i) both.words_[i] = words_[i] & other.words_[i];
    return both;
  }
  constexpr SourceMask operator|(const SourceMask& other) const {
    SourceMask either;
    for (std::size_t i = 0; i < kWords; ++i) either.words_[i] = words_[i] | other.words_[i];
    return either;
  }
  constexpr SourceMask operator~() const {
    SourceMask others;
    for (std::size_t i = 0; i < kWords; ++i) others.words_[i] = ~words_[i];
    return others;
  }
  constexpr auto operator<=>(const SourceMask&) const = default;

 private:
  std::array<std::uint64_t, kWords> words_{};
};

}  // namespace rekindle::transport
