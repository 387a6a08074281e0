#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "src/bucket/box_digests.h"
#include "src/bucket/bucket_checks.h"
#include "src/bucket/round.h"

// How a rank knows that a round has brought it the right bytes. Tiles that lie whole in a bucket
// are compared with the checkpoint's leaves. For the rest, parts of tiles, the owner of a share
// computes digests from its host's memory, whose bytes it has verified, and writes one digest over
// them, the seal, behind the share's parts: it travels with them. A seal shows that bytes changed
// on the way, its own or others. What is uploaded instead has to agree with one of the two.
namespace rekindle::bucket {

// Digests in host memory that a device reads and writes without a detour.
class PinnedDigests {
 public:
  static Result<std::unique_ptr<PinnedDigests>> create(Device& device, std::size_t count);
  std::span<Digest> all() { return {digests_.get(), count_}; }

 private:
  struct Free {
    void operator()(Digest* memory) const;
  };
  PinnedDigests(Digest* digests, std::size_t count) : digests_(digests), count_(count) {}
  const std::unique_ptr<Digest, Free> digests_;
  const std::size_t count_;
  std::unique_ptr<Pin> pin_;  // goes first; null: it cannot be pinned
};

// The seals of an owner's share.
class RoundSeal final : public ShareSeal {
 public:
  // All but `segments` outlive it; it outlives what is queued.
  static Result<std::unique_ptr<RoundSeal>> create(Device& device, const RoundPlan& plan,
                                                   const Contents& contents,
                                                   const SegmentFetch::Segments& segments,
                                                   std::uint32_t share);
  // Reads the segments: all tiles of the bucket have verified.
  Result<void> enqueue(std::size_t bucket, DeviceAddress to, Stream& stream) override;

 private:
  RoundSeal(const RoundPlan& plan, const Contents& contents, SegmentFetch::Segments segments,
            std::uint32_t share, std::unique_ptr<PinnedDigests> seals);
  const RoundPlan& plan_;
  const Contents& contents_;
  const SegmentFetch::Segments segments_;
  const std::uint32_t share_;
  const std::unique_ptr<PinnedDigests> seals_;  // of each bucket
};

class RoundVerify final : public Verify {
 public:
  // This host's copy, with all tiles that are here, for each share.
  using OwnCopy = std::function<Result<RoundTail::Fetches>()>;
  struct Means {  // all outlive it
    Device& device;
    const RoundPlan& plan;  // with room for seals
    const Contents& contents;
    std::span<const Digest> leaves;  // of all tiles of the contents
  };
  // kInvalid: not a leaf for each tile.
  static Result<std::unique_ptr<RoundVerify>> create(Means means, std::uint32_t slots,
                                                     OwnCopy own_copy);

  Result<void> enqueue(std::size_t bucket, std::uint32_t slot, DeviceAddress at,
                       Stream& stream) override;
  Result<bool> check(std::uint32_t slot) override;
  Result<bool> refill(std::uint32_t slot, Stream& stream) override;
  Error wrong(std::uint32_t slot) const override;

  std::uint64_t refilled() const { return refilled_; }  // buckets

 private:
  struct Share {
    std::uint32_t share = 0;
    BucketChecks checks;
    // Once it was filled again: of its rests as they had come.
    std::optional<std::vector<Digest>> came;
  };
  struct Slot {
    explicit Slot(Device& device) : digests(device) {}
    std::size_t bucket = 0;
    DeviceAddress at = 0;
    std::vector<Share> shares;
    BoxDigests digests;
    bool refilled = false;
    std::string wrong;  // the tensor
  };
  RoundVerify(Means means, OwnCopy own_copy, std::unique_ptr<PinnedDigests> seals);
  Result<void> queue(std::uint32_t slot, Stream& stream);
  bool is_right(const Share& share, std::span<const Digest> values, const Digest& seal,
                std::string& wrong) const;

  const Means means_;
  const OwnCopy own_copy_;
  const std::unique_ptr<PinnedDigests> seals_;  // as they came: of each share of each slot
  std::vector<Slot> slots_;
  std::vector<BoxBytes> boxes_;  // of the bucket that is being queued
  std::uint64_t refilled_ = 0;
};

}  // namespace rekindle::bucket
