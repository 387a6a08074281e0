#pragma once

#include <cstdint>
#include <string>

#include "src/base/result.h"
#include "src/bucket/device.h"

// `rekindle bench register --gpu`: tmpfs memory pinned for a GPU as the device process pins
// segments, fresh and with its pages there, next to touching as many fresh pages without it. Rounds
// are interleaved and the figures are medians.
namespace rekindle::bench {

struct PinOptions {
  std::uint64_t bytes = std::uint64_t{1} << 30;
  bool huge = false;
  std::size_t rounds = 5;
};

struct PinReport {
  PinOptions options;
  std::string device;
  double touched = 0;   // decimal GB/s, as all
  double fresh = 0;     // pinned, and faulted in by that
  double resident = 0;  // pinned, the pages were there
  double unpinned = 0;
};

// kInvalid: bad options; what the device says when it does not pin.
Result<PinReport> run_bench_pin(bucket::Device& device, const PinOptions& options);

std::string to_text(const PinReport& report);
std::string to_json(const PinReport& report);

}  // namespace rekindle::bench
