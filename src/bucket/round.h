#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "src/base/digest.h"
#include "src/bucket/device.h"
#include "src/bucket/pipeline.h"
#include "src/bucket/plan.h"
#include "src/bucket/segment_fetch.h"

// A broadcast round (docs/internals/rounds.md). Each owner has a share of the bytes that every rank
// wants. Bucket k consists of equal parts, one per owner: part s holds bucket k of the plan of
// share s. So all owners upload at the same time, and one collective in place does the rest.
namespace rekindle::bucket {

// A digest of the names, types and boxes of all pieces, in order. Ranks that want the same pieces
// have the same digest.
Digest digest_of(const Contents& contents);

// Spreads the pieces over `shares` owners, in their order, so that each has about as many bytes.
// Returns the share of each piece.
std::vector<std::uint32_t> share_out(std::span<const Piece> pieces, std::uint32_t shares);

// Room for a seal at the end of a share (bucket_verify.h).
inline constexpr std::uint64_t kSealRoom = kPartAlignment;
// The smallest share with room for a seal and for data.
inline constexpr std::uint64_t kSmallestShare = kSealRoom + kPartAlignment;

class RoundPlan {
 public:
  // `share_of`: the share of each piece. The plan depends on the pieces only, not on the places of
  // their bytes. `seal_room`: free bytes at the end of each share, 0 or kSealRoom. kInvalid: a
  // share is out of range.
  static Result<RoundPlan> create(const Contents& contents, std::span<const std::uint32_t> share_of,
                                  std::uint32_t shares, std::uint64_t bucket_bytes,
                                  std::uint64_t seal_room = 0);

  // Number of buckets.
  std::size_t size() const { return size_; }
  std::uint32_t shares() const { return static_cast<std::uint32_t>(plans_.size()); }
  std::uint64_t share_bytes() const { return share_bytes_; }
  std::uint64_t bucket_bytes() const { return share_bytes_ * shares(); }
  // In a share with a seal.
  std::uint64_t seal_at() const { return share_bytes_ - kSealRoom; }
  const Plan& plan_of(std::uint32_t share) const { return plans_[share]; }
  // All parts of bucket `index`; `at` counts from the bucket's start.
  std::vector<Part> parts(std::size_t index) const;

 private:
  std::vector<Plan> plans_;
  std::uint64_t share_bytes_ = 0;
  std::size_t size_ = 0;
};

// The addition of an owner to each bucket of its share.
class ShareSeal {
 public:
  virtual ~ShareSeal() = default;
  // Adds to the share's bucket at `to`, beside its parts.
  virtual Result<void> enqueue(std::size_t bucket, DeviceAddress to, Stream& stream) = 0;
};

// One rank's uploads into its share of each bucket, in order; without a share, nothing.
class RoundFetch final : public Fetch {
 public:
  struct Own {
    std::uint32_t share = 0;
    // Of plan_of(share).
    SegmentFetch& fetch;
    // May be null.
    ShareSeal* seal = nullptr;
  };
  RoundFetch(const RoundPlan& plan, std::optional<Own> own) : plan_(plan), own_(own) {}

  std::optional<std::size_t> next() override;
  Result<void> enqueue(std::size_t bucket, DeviceAddress to, Stream& stream) override;

 private:
  const RoundPlan& plan_;
  const std::optional<Own> own_;
  std::size_t next_ = 0;
};

// Spreads each bucket's shares from their owners.
class RoundSpread final : public Spread {
 public:
  struct Patience {
    // For the peers to queue their part of a bucket; then kTimeout.
    std::chrono::milliseconds peers{5000};
    // Called while it waits. True: kStale.
    std::function<bool()> stop;
  };
  RoundSpread(Collective& collective, std::uint64_t share_bytes, std::vector<std::uint32_t> owners,
              Patience patience);

  Result<void> enqueue(std::size_t bucket, DeviceAddress at, Stream& stream) override;
  Result<void> check() override;

 private:
  Collective& collective_;
  const std::uint64_t share_bytes_;
  const std::vector<std::uint32_t> owners_;
  const Patience patience_;
};

// The remaining buckets of a round that has ended early, from the segments alone, share by share as
// they arrive.
class RoundTail final : public Fetch {
 public:
  // Of each share's plan.
  using Fetches = std::vector<std::unique_ptr<SegmentFetch>>;
  // Buckets of the round before `first` were delivered. Both outlive this.
  RoundTail(const RoundPlan& plan, Fetches& fetches, std::size_t first);

  std::size_t size() const { return size_; }
  std::optional<std::size_t> next() override;
  Result<void> enqueue(std::size_t bucket, DeviceAddress to, Stream& stream) override;
  // Of a bucket that next() has returned.
  std::vector<Part> parts(std::size_t index) const;

 private:
  const RoundPlan& plan_;
  Fetches& fetches_;
  std::size_t size_ = 0;
  // Share and its bucket.
  std::vector<std::pair<std::uint32_t, std::size_t>> given_;
};

}  // namespace rekindle::bucket
