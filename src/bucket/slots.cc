#include "src/bucket/slots.h"

#include <algorithm>

#include "src/base/units.h"

namespace rekindle::bucket {

namespace {

struct Size {
  std::uint64_t bucket_bytes = 0;
  std::uint32_t slots = 0;
  std::uint64_t total() const { return bucket_bytes * slots; }
};

// Makes it the next smaller one. False: there is none.
bool shrink(Size& size, std::uint64_t least_bucket) {
  if (size.bucket_bytes / 2 >= least_bucket) {
    size.bucket_bytes = round_up(size.bucket_bytes / 2, kPartAlignment);
    return true;
  }
  return --size.slots > 0;
}

std::string warning_of(const Device& device, const Size& wanted, const Size& had) {
  if (had.slots == 1 && wanted.slots > 1) {
    return fmt::format("{} has room for one bucket of {}: copies and their consumer take turns",
                       device.name(), format_bytes(had.bucket_bytes));
  }
  if (had.bucket_bytes == wanted.bucket_bytes && had.slots == wanted.slots) return {};
  return fmt::format("{} has room for {} buckets of {}, not for {} of {}", device.name(), had.slots,
                     format_bytes(had.bucket_bytes), wanted.slots,
                     format_bytes(wanted.bucket_bytes));
}

}  // namespace

Result<Slots> allocate_slots(Device& device, const SlotOptions& options,
                             std::uint64_t payload_bytes) {
  const std::uint64_t wished = std::max(options.bucket_bytes, payload_bytes / kMostBuckets);
  const std::uint64_t asked = std::clamp(wished, kPartAlignment, kLargestBucket);
  const std::uint64_t least = std::min(asked, kSmallestBucket);
  Size wanted{round_up(asked, kPartAlignment), std::max(options.slots, 1u)};
  // The whole payload is one bucket.
  if (payload_bytes <= wanted.bucket_bytes) wanted.slots = 1;
  TRY(const DeviceMemory memory, device.memory());
  const auto fraction =
      static_cast<std::uint64_t>(static_cast<double>(memory.free_bytes) * options.free_fraction);
  const std::uint64_t budget = std::min(options.cap_bytes, fraction);
  for (Size size = wanted;;) {
    if (size.total() <= budget) {
      auto taken = device.allocate(size.total());
      if (taken) {
        Slots slots;
        slots.bucket_bytes = size.bucket_bytes;
        slots.memory = std::move(*taken);
        TRY_VOID(make_events(device, size.slots, slots.filled));
        slots.warning = warning_of(device, wanted, size);
        return slots;
      }
      if (taken.error().code() != ErrorCode::kExhausted) return fail(std::move(taken).error());
    }
    if (!shrink(size, least)) break;
  }
  return fail(
      ErrorCode::kExhausted,
      "no room for buckets on {}: {} are free, {} of them may be used, one bucket takes {}; "
      "free device memory or ask for smaller buckets",
      device.name(), format_bytes(memory.free_bytes), format_bytes(budget), format_bytes(least));
}

Result<void> make_events(Device& device, std::size_t count,
                         std::vector<std::unique_ptr<Event>>& out) {
  for (std::size_t i = 0; i < count; ++i) {
    TRY(auto event, device.make_event());
    out.push_back(std::move(event));
  }
  return {};
}

}  // namespace rekindle::bucket
