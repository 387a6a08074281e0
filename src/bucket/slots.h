#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "src/bucket/bucket_plan.h"
#include "src/bucket/device.h"

namespace rekindle::bucket {

struct SlotOptions {
  // At most kLargestBucket.
  std::uint64_t bucket_bytes = kDefaultBucket;
  // With at least 2, the stages overlap.
  std::uint32_t slots = 3;
  // Largest fraction of the device's free memory.
  double free_fraction = 0.1;
  // Of all slots together.
  std::uint64_t cap_bytes = 1ull << 30;
};

// A few bucket buffers of one device in one allocation, each with the event behind which it is
// filled.
struct Slots {
  std::uint64_t bucket_bytes = 0;
  std::unique_ptr<Memory> memory;
  // One per slot.
  std::vector<std::unique_ptr<Event>> filled;
  // Names the memory that was not available; "": all was.
  std::string warning;

  std::uint32_t count() const { return static_cast<std::uint32_t>(filled.size()); }
  DeviceAddress at(std::uint32_t slot) const { return memory->address() + slot * bucket_bytes; }
};

// Takes less if the device has less: buckets are halved down to kSmallestBucket, then slots are
// given up until one is left, with a warning, because stages then run one after the other.
// kExhausted: not even that fits; the message names the needed memory. One slot is enough for a
// payload that fits it.
Result<Slots> allocate_slots(Device& device, const SlotOptions& options,
                             std::uint64_t payload_bytes);

// Makes `count` events and appends them.
Result<void> make_events(Device& device, std::size_t count,
                         std::vector<std::unique_ptr<Event>>& out);

}  // namespace rekindle::bucket
