#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "src/bucket/bucket_verify.h"
#include "src/bucket/slots.h"

// The stages of buckets that NICs of this host write into the device's slots, without a copy in
// host memory. The device digests each tile, and compares it with the checkpoint's leaf.
namespace rekindle::bucket {

// A bucket that can be verified on the device alone: each of its tiles lies whole in one part.
struct DirectBucket {
  std::size_t bucket = 0;
  // Where its boxes lie in the slot; the segment means nothing.
  std::vector<LayoutEntry> entries;
};
// The others have parts of tiles, for which the device has nothing to compare with, or no bytes.
std::vector<DirectBucket> direct_buckets(const Contents& contents, const Plan& plan);

// Reads buckets into slots over the network. One thread.
class SlotReader {
 public:
  virtual ~SlotReader() = default;
  // Returns when all bytes of the bucket are in the slot, and nothing writes there any more. With
  // `wrong` tiles it was read before, and at least these come again, from another host if possible.
  // After an error the reader is of no further use.
  virtual Result<void> read(std::size_t bucket, std::uint32_t slot,
                            std::span<const TileIndex> wrong) = 0;
  // The device cannot see the bytes that have come, so no more are wanted.
  virtual void give_up() = 0;
};

// Reads the buckets in their order. Queues nothing, but waits for the bytes: the device verifies
// one bucket, and the worker reads another, while the next one comes.
class DirectFetch final : public Fetch {
 public:
  // All outlive it.
  DirectFetch(Device& device, const Slots& slots, SlotReader& reader,
              std::vector<std::size_t> buckets)
      : device_(device), slots_(slots), reader_(reader), buckets_(std::move(buckets)) {}

  // The first `count` of them.
  std::span<const std::size_t> first(std::size_t count) const {
    return std::span(buckets_).first(count);
  }
  std::optional<std::size_t> next() override;
  Result<void> enqueue(std::size_t bucket, DeviceAddress to, Stream& stream) override;
  Result<void> read(std::size_t bucket, DeviceAddress to, std::span<const TileIndex> wrong);

 private:
  Device& device_;
  const Slots& slots_;
  SlotReader& reader_;
  const std::vector<std::size_t> buckets_;
  std::size_t next_ = 0;
};

// Has a bucket with wrong bytes read once more.
class DirectVerify final : public SlotVerify {
 public:
  using PartsOf = std::function<std::vector<Part>(std::size_t bucket)>;
  // All outlive it.
  struct Means {
    Device& device;
    DirectFetch& fetch;
    const Contents& contents;
    // Of all tiles of the contents.
    std::span<const Digest> leaves;
  };
  // See SlotVerify::make_slots().
  static Result<std::unique_ptr<DirectVerify>> create(Means means, std::uint32_t slots,
                                                      std::size_t tiles, PartsOf parts_of);

  Result<void> enqueue(std::size_t bucket, std::uint32_t slot, DeviceAddress at,
                       Stream& stream) override;

 private:
  DirectVerify(const Means& means, PartsOf parts_of);
  std::optional<std::size_t> wrong_rest(const Slot& slot, Share& share,
                                        std::span<const Digest> values) override;
  Result<bool> fill_again(Slot& slot, Stream& stream) override;
  const char* after(const Slot& slot) const override;

  const Means means_;
  const PartsOf parts_of_;
};

}  // namespace rekindle::bucket
