#pragma once

#include <cstdint>
#include <map>
#include <shared_mutex>
#include <span>
#include <vector>

#include "src/bucket/device.h"

namespace rekindle::cuda {

// The host memory that is registered with CUDA. The driver refuses a copy that crosses the border
// of a registration. Segments are pinned piece by piece, so their copies are cut here at the
// borders. Thread-safe.
class Registrations {
 public:
  void add(std::span<const std::byte> memory);
  void remove(std::span<const std::byte> memory);

  // Appends copies that together do the same, and none of which crosses a border. Copies without
  // bytes are dropped.
  void cut(std::span<const bucket::Upload> copies, std::vector<bucket::Upload>& out) const;
  void cut(std::span<const bucket::Download> copies, std::vector<bucket::Download>& out) const;

 private:
  // The end of the range around `at` that is registered as one, or not registered at all.
  std::uintptr_t same_until(std::uintptr_t at) const;
  void cut_one(const bucket::Upload& copy, std::vector<bucket::Upload>& out) const;
  void cut_run(bucket::Upload run, std::vector<bucket::Upload>& out) const;
  void cut_rows(bucket::Upload copy, std::vector<bucket::Upload>& out) const;

  mutable std::shared_mutex mutex_;
  // The end of each registration, by its start.
  std::map<std::uintptr_t, std::uintptr_t> ends_;
};

}  // namespace rekindle::cuda
