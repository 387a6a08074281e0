#pragma once

#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "src/base/units.h"
#include "transport/schedule/batch_sources.h"
#include "transport/schedule/slice_table.h"

namespace rekindle::transport {

// A batch of equal slices and its sources, for tests of one part of the policy at a time.
class ScheduleFixture : public ::testing::Test {
 protected:
  static constexpr std::uint64_t kSliceBytes = 1 * kMiB;

  explicit ScheduleFixture(SliceIndex count = 8)
      : infos(count, SliceInfo{kSliceBytes, SourceMask(1)}),
        slices(count, [this](SliceIndex slice) { return infos[slice]; }),
        sources(options) {}

  void everybody_holds_everything(int source_count) {
    for (auto& info : infos) info.candidates = SourceMask((std::uint64_t{1} << source_count) - 1);
  }
  PathId connect(SourceIndex source, std::string home = {}) {
    return sources.add_path(source, "path", std::move(home), "fake");
  }
  void post(PathId path, SliceIndex slice) {
    sources.post(path, slice, kSliceBytes, now);
    slices.post(slice, sources.path(path).source());
  }
  // Gives the source a measured goodput.
  void measure(PathId path, std::uint64_t bytes_per_second) {
    sources.bytes_landed(path, sources.path(path).bytes_landed + bytes_per_second);
    sources.sample_goodput(std::chrono::seconds(1));
  }

  TimePoint now{std::chrono::seconds(1)};
  BatchOptions options;
  std::vector<SliceInfo> infos;
  SliceTable slices;
  BatchSources sources;
};

}  // namespace rekindle::transport
