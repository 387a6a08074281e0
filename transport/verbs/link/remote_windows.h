#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "src/base/result.h"
#include "transport/read_op.h"

namespace rekindle::transport::verbs {

// A part of a region, as the source's NIC knows it.
struct RemoteWindow {
  RegionKey region;
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  std::uint64_t address = 0;
  std::vector<std::uint32_t> keys;  // per queue pair, or one for all of them

  std::uint32_t key(std::size_t queue_pair) const {
    return keys.size() == 1 ? keys.front() : keys[queue_pair];
  }
};

// The regions that a granted handshake lets one path read. Immutable.
class RemoteWindows {
 public:
  // kInvalid: a region with holes or overlaps, or not as many keys as queue pairs.
  static Result<RemoteWindows> create(std::vector<RemoteWindow> windows,
                                      std::vector<RegionKey> stale, std::size_t queue_pairs);

  // The size of a region. kStale: it is not served any more. kDenied: the session may not read it.
  struct Found {
    OpStatus status = OpStatus::kOk;
    std::uint64_t bytes = 0;
  };
  Found region(RegionKey key) const;
  const RemoteWindow& at(RegionKey region, std::uint64_t offset) const;  // inside the region

 private:
  std::vector<RemoteWindow> windows_;  // by region and offset
  std::vector<RegionKey> stale_;       // sorted
};

}  // namespace rekindle::transport::verbs
