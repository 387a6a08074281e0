#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "src/base/result.h"
#include "src/base/units.h"

namespace rekindle::device {

// GPUs made of host memory, for machines without a GPU and for tests.
struct Doubles {
  std::uint32_t count = 0;
  // Memory of each.
  std::uint64_t bytes = kGiB;
};
// "2", "2:512MiB".
Result<Doubles> parse_doubles(std::string_view text);

// Whether this build can drive GPUs at all.
bool built_with_cuda();

// The GPUs on which an agent fills buckets.
struct GpuOptions {
  enum class Use { kAuto, kNone, kDouble };
  Use use = Use::kAuto;
  Doubles doubles;
  // For workers that name no size; 0: 64 MiB.
  std::uint64_t bucket_bytes = 0;
  // The device process verifies every uploaded bucket on the GPU before the worker hears of it.
  bool verify_uploads = false;
  // Each device copies the bytes of a broadcast to its host at this rate, if the host lacks them;
  // 0: it copies none.
  std::uint64_t keep_bytes_per_second = 8'000'000'000;
  // Idle GPUs whose links to the host one upload may use as well.
  static constexpr std::uint32_t kAutoHelpers = 3;
  std::uint32_t helpers = kAutoHelpers;
  // Further arguments of the device process, for its log.
  std::vector<std::string> arguments;
  // Comes before the command of the device process: a debugger or a sanitizer.
  std::vector<std::string> wrapper;
};
// "auto", "none", "double:2:512MiB".
Result<GpuOptions> parse_gpu(std::string_view text);
// "auto", "none", "2".
Result<std::uint32_t> parse_helpers(std::string_view text);

}  // namespace rekindle::device
