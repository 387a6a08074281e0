#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "src/base/result.h"
#include "src/base/units.h"

namespace rekindle::device {

// GPUs made of host memory: for machines without one, and for tests.
struct Doubles {
  std::uint32_t count = 0;
  std::uint64_t bytes = kGiB;  // of memory, each
};
Result<Doubles> parse_doubles(std::string_view text);  // "2", "2:512MiB"

// Which GPUs an agent fills buckets on.
struct GpuOptions {
  enum class Use { kAuto, kNone, kDouble };
  Use use = Use::kAuto;
  Doubles doubles;
  std::uint64_t bucket_bytes = 0;  // for workers that say nothing; 0: 64 MiB
  // The device process verifies every bucket that it uploads, on the GPU, before the worker hears
  // of it.
  bool verify_uploads = false;
  // Of what a broadcast brings, copied to a host that lacks it, by each device; 0: nothing.
  std::uint64_t keep_bytes_per_second = 8'000'000'000;
  std::vector<std::string> arguments;  // of the device process beside its own: how it logs
  std::vector<std::string> wrapper;    // words before its command: a debugger or a sanitizer
};
Result<GpuOptions> parse_gpu(std::string_view text);  // "auto", "none", "double:2:512MiB"

}  // namespace rekindle::device
