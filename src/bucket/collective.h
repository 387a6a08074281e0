#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "src/bucket/device.h"

namespace rekindle::bucket {

// One device's rank among those that spread bytes to each other, after ncclComm_t. One thread at a
// time. After any error only abort() and the destructor.
class Collective {
 public:
  virtual ~Collective() = default;  // aborts

  virtual std::uint32_t rank() const = 0;
  virtual std::uint32_t ranks() const = 0;
  // In place, queued on `stream`: share i, the `share_bytes` at `at` + i * share_bytes, goes from
  // rank owners[i] to all others. Every rank queues the same in the same order, and has to settle()
  // before it queues the next.
  virtual Result<void> spread(DeviceAddress at, std::uint64_t share_bytes,
                              std::span<const std::uint32_t> owners, Stream& stream) = 0;
  // Whether what was begun (to meet, to spread) has been queued by all that it takes. What failed
  // shows here, kPeerLost among it: to be asked also while the device works, and once it has.
  virtual Result<bool> settled() = 0;
  // What is queued ends soon, and leaves whatever bytes.
  virtual void abort() = 0;
};

// Makes them. Thread-safe; lives longer than what it has made.
class Collectives {
 public:
  virtual ~Collectives() = default;
  // One rank makes it, all meet by it.
  virtual Result<std::string> make_id() = 0;
  // Begins to meet the others; settled() tells when all have. The device lives longer.
  virtual Result<std::unique_ptr<Collective>> meet(Device& device, std::uint32_t rank,
                                                   std::uint32_t ranks, std::string_view id) = 0;
};

}  // namespace rekindle::bucket
