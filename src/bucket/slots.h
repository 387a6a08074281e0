#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "src/bucket/device.h"
#include "src/bucket/plan.h"

namespace rekindle::bucket {

struct SlotOptions {
  std::uint64_t bucket_bytes = kDefaultBucket;  // at most kLargestBucket
  std::uint32_t slots = 3;                      // at least 2 overlap the stages
  double free_fraction = 0.1;                   // of the device's free memory, at most
  std::uint64_t cap_bytes = 1ull << 30;         // of all slots together
};

// A few bucket buffers of one device, in one allocation, each with the event behind which it has
// been filled.
struct Slots {
  std::uint64_t bucket_bytes = 0;
  std::unique_ptr<Memory> memory;
  std::vector<std::unique_ptr<Event>> filled;  // one per slot
  std::string warning;                         // what could not be had; "" when all was

  std::uint32_t count() const { return static_cast<std::uint32_t>(filled.size()); }
  DeviceAddress at(std::uint32_t slot) const { return memory->address() + slot * bucket_bytes; }
};

// Takes less where the device has less: buckets are halved down to kSmallestBucket, then slots
// given up to the last (stages one after the other, with a warning), then kExhausted with what
// would be needed. One slot is enough for a payload that fits it.
Result<Slots> allocate_slots(Device& device, const SlotOptions& options,
                             std::uint64_t payload_bytes);

}  // namespace rekindle::bucket
