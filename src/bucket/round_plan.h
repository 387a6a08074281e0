#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "src/base/digest.h"
#include "src/bucket/bucket_plan.h"

// The plan of a broadcast round (docs/internals/rounds.md): which owner uploads which bytes, in
// which bucket. Each owner has a share of the bytes that every rank wants. Bucket k consists of
// equal parts, one per owner: part s holds bucket k of the plan of share s. So all owners upload at
// the same time, and one collective in place does the rest. Pieces that not every rank wants are
// outside of the shares: they are uploaded after the round.
namespace rekindle::bucket {

// A digest of the names, types and boxes of all pieces, in order. Ranks that want the same pieces
// have the same digest.
Digest digest_of(const Contents& contents);
// Of contents that are to have these boxes, in this order for each tensor.
Digest digest_of(const TensorSet& tensors, std::span<const TensorBox> boxes);

// What a piece is, for comparisons between ranks: a key of its name, type and box, and its bytes.
struct PieceKey {
  std::uint64_t key = 0;
  std::uint64_t bytes = 0;
  bool operator==(const PieceKey&) const = default;
};
// The pieces of contents that are to have these boxes, in the order of Contents::pieces().
std::vector<PieceKey> keys_of(const TensorSet& tensors, std::span<const TensorBox> boxes);

// Ranges of indices into Contents::pieces(), ascending and disjoint.
using PieceRuns = std::vector<std::pair<std::uint32_t, std::uint32_t>>;
// The share of a piece that the round does not bring.
inline constexpr std::uint32_t kNoShare = 0xffffffff;

// Spreads the pieces over `shares` owners, in their order, so that each has about as many bytes.
// Returns the share of each piece. `brought`: the pieces that the round brings; empty: all of them.
// The others have kNoShare.
std::vector<std::uint32_t> share_out(std::span<const Piece> pieces, std::uint32_t shares,
                                     const PieceRuns& brought = {});

// Room for a seal at the end of a share (bucket_verify.h).
inline constexpr std::uint64_t kSealRoom = kPartAlignment;
// The smallest share with room for a seal and for data.
inline constexpr std::uint64_t kSmallestShare = kSealRoom + kPartAlignment;

class RoundPlan {
 public:
  // `share_of`: the share of each piece, or kNoShare. The plan of the shares depends on their
  // pieces only, not on the places of their bytes. `seal_room`: free bytes at the end of each
  // share, 0 or kSealRoom. `rest_bytes`: of a bucket of pieces without a share; 0: bucket_bytes.
  // kInvalid: a share is out of range, or takes too many buckets.
  static Result<RoundPlan> create(const Contents& contents, std::span<const std::uint32_t> share_of,
                                  std::uint32_t shares, std::uint64_t bucket_bytes,
                                  std::uint64_t seal_room = 0, std::uint64_t rest_bytes = 0);

  // Number of buckets of the round.
  std::size_t size() const { return size_; }
  std::uint32_t shares() const { return static_cast<std::uint32_t>(plans_.size()); }
  std::uint64_t share_bytes() const { return share_bytes_; }
  std::uint64_t bucket_bytes() const { return share_bytes_ * shares(); }
  // In a share with a seal.
  std::uint64_t seal_at() const { return share_bytes_ - kSealRoom; }
  const Plan& plan_of(std::uint32_t share) const { return plans_[share]; }
  // Of the pieces without a share. nullptr: there are none.
  const Plan* rest() const { return rest_ ? &*rest_ : nullptr; }
  // All parts of bucket `index`; `at` counts from the bucket's start.
  std::vector<Part> parts(std::size_t index) const;

 private:
  std::vector<Plan> plans_;
  std::optional<Plan> rest_;
  std::uint64_t share_bytes_ = 0;
  std::size_t size_ = 0;
};

}  // namespace rekindle::bucket
