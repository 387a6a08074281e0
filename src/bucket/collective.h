#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "src/bucket/device.h"

namespace rekindle::bucket {

// One device's rank among the devices that spread bytes to each other, modelled on ncclComm_t. One
// thread at a time. After any error, call only abort() or the destructor.
class Collective {
 public:
  // Aborts.
  virtual ~Collective() = default;

  virtual std::uint32_t rank() const = 0;
  virtual std::uint32_t ranks() const = 0;
  // Queues on `stream`, in place: share i, the `share_bytes` at `at` + i * share_bytes, goes from
  // rank owners[i] to all others. Every rank queues the same calls in the same order, and settled()
  // must be true before the next one.
  virtual Result<void> spread(DeviceAddress at, std::uint64_t share_bytes,
                              std::span<const std::uint32_t> owners, Stream& stream) = 0;
  // Whether all ranks have queued the last call (to meet or to spread). It also reports later
  // failures, such as kPeerLost, so ask it while the device works, and again when it is done.
  virtual Result<bool> settled() = 0;
  // The queued work ends soon, and may leave any bytes.
  virtual void abort() = 0;
};

// Makes collectives. Thread-safe; lives longer than they do.
class Collectives {
 public:
  virtual ~Collectives() = default;
  // One rank makes the id; all ranks meet by it.
  virtual Result<std::string> make_id() = 0;
  // Begins to meet the other ranks; settled() is true when all have met. The device lives longer.
  virtual Result<std::unique_ptr<Collective>> meet(Device& device, std::uint32_t rank,
                                                   std::uint32_t ranks, std::string_view id) = 0;
};

}  // namespace rekindle::bucket
