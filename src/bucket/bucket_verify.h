#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "src/bucket/bucket_checks.h"
#include "src/bucket/round_stages.h"

// Verifies the buckets in a device's slots, those of a round and those that were uploaded from this
// host's memory. A tile that lies whole in one part is compared with the checkpoint's leaf. A part
// of a tile, a rest, has no leaf: each of the two has another value to compare it with.
namespace rekindle::bucket {

// Digests of boxes in a device's memory, one batch at a time. The device computes them; if it
// cannot, the boxes are copied to host memory and digested there, which is slow. One thread.
class BoxDigests {
 public:
  explicit BoxDigests(Device& device) : device_(device) {}

  // Makes room for a batch of so many boxes before the first one. A larger batch makes room itself.
  Result<void> reserve(std::size_t count);
  // The last batch must be done.
  Result<void> queue(std::span<const BoxBytes> boxes, Stream& stream);
  // Of the last batch, after the device has done it.
  std::vector<Digest> values() const;

 private:
  Result<void> queue_copies(std::span<const BoxBytes> boxes, Stream& stream);

  Device& device_;
  // Null: none yet, or the host computes them.
  std::unique_ptr<Digests> digests_;
  bool by_host_ = false;
  // Of the boxes in copied_.
  std::vector<std::uint64_t> lengths_;
  std::vector<std::byte> copied_;
};

// The slots of a Verify, the values to compare in each, and one refill for each bucket.
class SlotVerify : public Verify {
 public:
  Result<bool> check(std::uint32_t slot) final;
  Result<bool> refill(std::uint32_t slot, Stream& stream) final;
  Error wrong(std::uint32_t slot) const final;

  std::uint64_t refilled() const { return refilled_; }  // buckets

 protected:
  // Parts that lie together. A bucket of a round has several shares, an uploaded one has one.
  struct Share {
    std::uint32_t share = 0;
    DeviceAddress at = 0;
    BucketChecks checks;
    // The values of the rests, once they are known.
    std::optional<std::vector<Digest>> rests;
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
  // `first` and `again`: the sources of a bucket's bytes, for the log. All outlive it.
  struct Subject {
    Device& device;
    const Contents& contents;
    std::span<const Digest> leaves;  // of all tiles of the contents
    const char* first;
    const char* again;
  };
  explicit SlotVerify(const Subject& subject) : subject_(subject) {}

  // `tiles`: the most tiles of a bucket. kInvalid: there is not one leaf for each tile. kExhausted:
  // the device has no room.
  Result<void> make_slots(std::uint32_t count, std::size_t tiles);
  Slot& begin(std::size_t bucket, std::uint32_t slot, DeviceAddress at);
  // Queues the digests of all shares.
  Result<void> queue(Slot& slot, Stream& stream);
  std::size_t number_of(const Slot& slot) const {
    return static_cast<std::size_t>(&slot - slots_.data());
  }

  // The first rest with a wrong digest; nullopt: all are right.
  virtual std::optional<std::size_t> wrong_rest(const Slot& slot, Share& share,
                                                std::span<const Digest> values) = 0;
  // Queues the uploads that fill the slot again. False: this is not possible.
  virtual Result<bool> fill_again(Slot& slot, Stream& stream) = 0;
  // The end of "bytes of tensor … do not match their digest after …".
  virtual const char* after(const Slot& slot) const = 0;

 private:
  const Subject subject_;
  std::vector<Slot> slots_;
  std::vector<BoxBytes> boxes_;  // of the bucket that is being queued
  std::uint64_t refilled_ = 0;
};

// Of buckets that were uploaded from this host's memory. A rest is compared with a digest of the
// host's own bytes, which verified when they arrived. The thread that calls check() computes that
// digest, on one core.
class UploadVerify final : public SlotVerify {
 public:
  using PartsOf = std::function<std::vector<Part>(std::size_t bucket)>;
  struct Means {  // all outlive it
    Device& device;
    Fetch& fetch;  // the pipeline's, which can queue a bucket once more
    const Contents& contents;
    std::span<const Digest> leaves;  // of all tiles of the contents
    const SegmentFetch::Segments& segments;
  };
  // `parts_of` returns the parts of a bucket, by the numbers that `fetch` gives out. For the rest,
  // see make_slots().
  static Result<std::unique_ptr<UploadVerify>> create(Means means, std::uint32_t slots,
                                                      std::size_t tiles, PartsOf parts_of);

  Result<void> enqueue(std::size_t bucket, std::uint32_t slot, DeviceAddress at,
                       Stream& stream) override;

 private:
  UploadVerify(const Means& means, PartsOf parts_of);
  std::optional<std::size_t> wrong_rest(const Slot& slot, Share& share,
                                        std::span<const Digest> values) override;
  Result<bool> fill_again(Slot& slot, Stream& stream) override;
  const char* after(const Slot& slot) const override;

  const Means means_;
  const PartsOf parts_of_;
};

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

// The seals of an owner's share of a round: one digest over the digests of a bucket's rests. The
// owner computes them from its host's memory, whose bytes it has verified. The seal lies behind the
// share's parts and travels with them.
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

// Of the buckets of a round. A seal shows that bytes changed on the way, its own or others. Rests
// that are uploaded instead must agree with the seal or with the rests that came.
class RoundVerify final : public SlotVerify {
 public:
  // This host's copy, with all tiles that are here, for each share.
  using OwnCopy = std::function<Result<RoundTail::Fetches>()>;
  struct Means {  // all outlive it
    Device& device;
    const RoundPlan& plan;  // with room for seals
    const Contents& contents;
    std::span<const Digest> leaves;  // of all tiles of the contents
  };
  // As make_slots().
  static Result<std::unique_ptr<RoundVerify>> create(Means means, std::uint32_t slots,
                                                     OwnCopy own_copy);

  Result<void> enqueue(std::size_t bucket, std::uint32_t slot, DeviceAddress at,
                       Stream& stream) override;

 private:
  RoundVerify(const Means& means, OwnCopy own_copy, std::unique_ptr<PinnedDigests> seals);
  Digest& seal_of(const Slot& slot, const Share& share);
  std::optional<std::size_t> wrong_rest(const Slot& slot, Share& share,
                                        std::span<const Digest> values) override;
  Result<bool> fill_again(Slot& slot, Stream& stream) override;
  const char* after(const Slot& slot) const override;

  const Means means_;
  const OwnCopy own_copy_;
  const std::unique_ptr<PinnedDigests> seals_;  // as they came: of each share of each slot
};

}  // namespace rekindle::bucket
