#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "src/bucket/box_digests.h"
#include "src/bucket/bucket_checks.h"
#include "src/bucket/segment_fetch.h"

namespace rekindle::bucket {

// Verifies on the device the buckets that were uploaded from this host's memory. RoundVerify does
// this for the buckets of a round. A tile that lies whole in one part is compared with the
// checkpoint's leaf; the device computes the digest. A part of a tile has no leaf. It is compared
// with a digest of the host's own bytes, which verified when they arrived. The thread that calls
// check() computes that digest, on one core.
class UploadVerify final : public Verify {
 public:
  using PartsOf = std::function<std::vector<Part>(std::size_t bucket)>;
  struct Means {  // all outlive it
    Device& device;
    Fetch& fetch;  // the pipeline's, which can queue a bucket once more
    const Contents& contents;
    std::span<const Digest> leaves;  // of all tiles of the contents
    const SegmentFetch::Segments& segments;
  };
  // `parts_of` returns the parts of a bucket, by the numbers that `fetch` gives out. `tiles` is the
  // most tiles that a bucket touches; digests for so many are allocated at once. kInvalid: there is
  // not one leaf for each tile. kExhausted: the device has no room.
  static Result<std::unique_ptr<UploadVerify>> create(Means means, std::uint32_t slots,
                                                      std::size_t tiles, PartsOf parts_of);

  Result<void> enqueue(std::size_t bucket, std::uint32_t slot, DeviceAddress at,
                       Stream& stream) override;
  Result<bool> check(std::uint32_t slot) override;
  Result<bool> refill(std::uint32_t slot, Stream& stream) override;
  Error wrong(std::uint32_t slot) const override;

  std::uint64_t refilled() const { return refilled_; }  // buckets

 private:
  struct Slot {
    explicit Slot(Device& device) : digests(device) {}
    std::size_t bucket = 0;
    DeviceAddress at = 0;
    BucketChecks checks;  // with addresses on the device
    BoxDigests digests;
    // What the digests of the rests should be. Computed at the first check of the bucket.
    std::optional<std::vector<Digest>> rests;
    bool refilled = false;
    std::string wrong;  // the tensor
  };
  UploadVerify(Means means, PartsOf parts_of) : means_(means), parts_of_(std::move(parts_of)) {}
  std::optional<std::size_t> wrong_box(Slot& slot) const;

  const Means means_;
  const PartsOf parts_of_;
  std::vector<Slot> slots_;
  std::uint64_t refilled_ = 0;
};

}  // namespace rekindle::bucket
