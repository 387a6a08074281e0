#pragma once

#include <cstdint>
#include <map>
#include <shared_mutex>
#include <span>
#include <vector>

#include "src/bucket/device.h"

namespace rekindle::cuda {

// Which host memory is registered with CUDA. The driver refuses a copy that reaches from one
// registration into the next, or out of one, as copies from memory that is pinned piece by piece
// do: they are cut here. Thread-safe.
class Registrations {
 public:
  void add(std::span<const std::byte> memory);
  void remove(std::span<const std::byte> memory);

  // Appends copies that together do the same, none of which crosses a border. Copies of no bytes
  // go.
  void cut(std::span<const bucket::Upload> copies, std::vector<bucket::Upload>& out) const;
  void cut(std::span<const bucket::Download> copies, std::vector<bucket::Download>& out) const;

 private:
  // How far the memory at `at` is all the same: registered as one, or not at all.
  std::uintptr_t same_until(std::uintptr_t at) const;
  void cut_one(const bucket::Upload& copy, std::vector<bucket::Upload>& out) const;
  void cut_run(bucket::Upload run, std::vector<bucket::Upload>& out) const;
  void cut_rows(bucket::Upload copy, std::vector<bucket::Upload>& out) const;

  mutable std::shared_mutex mutex_;
  std::map<std::uintptr_t, std::uintptr_t> ends_;  // by start
};

}  // namespace rekindle::cuda
