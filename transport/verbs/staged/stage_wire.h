#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "src/base/result.h"
#include "transport/read_op.h"

// The messages of a staged link (docs/internals/verbs.md, "Staged serving"): of fixed size,
// little-endian, and checked as they come in. Pure.
namespace rekindle::transport::verbs {

inline constexpr std::uint32_t kStageVersion = 1;
inline constexpr std::size_t kMaxStageBlocks = 4;  // of one link
inline constexpr std::uint32_t kMaxStageBlockBytes = 256 << 10;
inline constexpr std::size_t kStageRequestBytes = 40;
inline constexpr std::size_t kStageAnswerBytes = 16;
inline constexpr std::size_t kStageMessageBytes = 64;  // room for either

// From the puller: gather these runs, one behind the other, into the block of this slot. The source
// owns the block until its answer, the puller from then until its next request.
struct StageRequest {
  std::uint16_t slot = 0;
  std::uint32_t sequence = 0;  // comes back in the answer
  RegionKey region;
  std::uint64_t offset = 0;
  std::uint64_t stride = 0;  // 0 when count == 1
  std::uint32_t run_bytes = 0;
  std::uint32_t count = 0;

  std::uint64_t total_bytes() const { return std::uint64_t{run_bytes} * count; }
};

// From the source: the result of a request.
struct StageAnswer {
  std::uint16_t slot = 0;
  std::uint32_t sequence = 0;
  OpStatus status = OpStatus::kOk;  // kOk, kStale, kDenied, kInvalid or kFault
  std::uint32_t bytes = 0;          // in the block; 0 unless kOk
};

struct StageLimits {
  std::size_t slots = 0;
  std::uint32_t block_bytes = 0;
};

using StageBytes = std::span<const std::byte>;
// Returns the bytes written: kStageRequestBytes or kStageAnswerBytes. `out` has room for them.
std::size_t encode(const StageRequest& request, std::span<std::byte> out);
std::size_t encode(const StageAnswer& answer, std::span<std::byte> out);
// kInvalid: it is no such message, or it asks for more than a block or for nothing. These do not
// check whether the runs lie in the region.
Result<StageRequest> parse_stage_request(StageBytes bytes, const StageLimits& limits);
Result<StageAnswer> parse_stage_answer(StageBytes bytes, const StageLimits& limits);

}  // namespace rekindle::transport::verbs
