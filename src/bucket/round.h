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
#include "src/bucket/collective.h"
#include "src/bucket/pipeline.h"
#include "src/bucket/plan.h"
#include "src/bucket/segment_fetch.h"

// A broadcast round (docs/rounds.md): owners have a part each of what every rank wants. Bucket k is
// made of equal shares, one per owner: share s holds bucket k of part s' own plan. So all owners
// upload at once, and one collective in place does the rest.
namespace rekindle::bucket {

// Who wants the same has the same: names, types and boxes of all pieces, in their order.
Digest digest_of(const Contents& contents);

// Spreads the pieces over `shares` owners, in their order, so that each has about as many bytes.
// Returns the share of each piece.
std::vector<std::uint32_t> share_out(std::span<const Piece> pieces, std::uint32_t shares);

// At the end of a share there may be room for its seal (round_verify.h).
inline constexpr std::uint64_t kSealRoom = kPartAlignment;
// The least share that has room for a seal, and for something else.
inline constexpr std::uint64_t kSmallestShare = kSealRoom + kPartAlignment;

class RoundPlan {
 public:
  // `share_of`: of each piece. The same for the same pieces, wherever their bytes lie. `seal_room`:
  // bytes at the end of each share that no part lies in, 0 or kSealRoom. kInvalid: a share that is
  // none.
  static Result<RoundPlan> create(const Contents& contents, std::span<const std::uint32_t> share_of,
                                  std::uint32_t shares, std::uint64_t bucket_bytes,
                                  std::uint64_t seal_room = 0);

  std::size_t size() const { return size_; }  // buckets
  std::uint32_t shares() const { return static_cast<std::uint32_t>(plans_.size()); }
  std::uint64_t share_bytes() const { return share_bytes_; }
  std::uint64_t bucket_bytes() const { return share_bytes_ * shares(); }
  std::uint64_t seal_at() const { return share_bytes_ - kSealRoom; }  // in a share with a seal
  const Plan& plan_of(std::uint32_t share) const { return plans_[share]; }
  // All that bucket `index` brings; `at` counts from the bucket's start.
  std::vector<Part> parts(std::size_t index) const;

 private:
  std::vector<Plan> plans_;
  std::uint64_t share_bytes_ = 0;
  std::size_t size_ = 0;
};

// What an owner adds to each bucket of its share.
class ShareSeal {
 public:
  virtual ~ShareSeal() = default;
  // To the share's bucket at `to`, beside its parts.
  virtual Result<void> enqueue(std::size_t bucket, DeviceAddress to, Stream& stream) = 0;
};

// One rank's uploads into its share of each bucket, in order; without a share, nothing.
class RoundFetch final : public Fetch {
 public:
  struct Own {
    std::uint32_t share = 0;
    SegmentFetch& fetch;        // of plan_of(share)
    ShareSeal* seal = nullptr;  // or none
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
    std::chrono::milliseconds peers{5000};  // to queue their part of a bucket; then kTimeout
    std::function<bool()> stop;             // asked while it waits: then kStale
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

// What a round that has ended early still owes, from the segments alone, share by share as it gets
// here.
class RoundTail final : public Fetch {
 public:
  using Fetches = std::vector<std::unique_ptr<SegmentFetch>>;  // of each share's plan
  // Buckets of the round before `first` were delivered. Both outlive this.
  RoundTail(const RoundPlan& plan, Fetches& fetches, std::size_t first);

  std::size_t size() const { return size_; }
  std::optional<std::size_t> next() override;
  Result<void> enqueue(std::size_t bucket, DeviceAddress to, Stream& stream) override;
  std::vector<Part> parts(std::size_t index) const;  // of one that next() has given out

 private:
  const RoundPlan& plan_;
  Fetches& fetches_;
  std::size_t size_ = 0;
  std::vector<std::pair<std::uint32_t, std::size_t>> given_;  // share, its bucket
};

}  // namespace rekindle::bucket
