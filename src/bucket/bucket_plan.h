#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "src/bucket/contents.h"

// Cuts a session's contents into buckets. Pure.
namespace rekindle::bucket {

// Of each part in its bucket.
inline constexpr std::uint64_t kPartAlignment = 256;
inline constexpr std::uint64_t kSmallestBucket = 16ull << 20;
inline constexpr std::uint64_t kDefaultBucket = 64ull << 20;
inline constexpr std::uint64_t kLargestBucket = 256ull << 20;
// Of one session. With more, buckets are made larger.
inline constexpr std::uint64_t kMostBuckets = 1 << 16;

// A run of one piece's row-major bytes. Most pieces are one part. A piece larger than a bucket has
// several, in order. A piece without elements is one part of 0 bytes.
struct Part {
  // Index into Contents::pieces().
  std::uint32_t piece = 0;
  // In the piece.
  std::uint64_t offset_bytes = 0;
  std::uint64_t bytes = 0;
  // In the bucket; a multiple of kPartAlignment.
  std::uint64_t at = 0;
  bool operator==(const Part&) const = default;
};

// A copy of `rows` runs from a segment to the bucket.
struct SegmentCopy {
  std::uint32_t segment = 0;
  // Counts from the segment's start.
  std::uint64_t from = 0;
  // In the bucket.
  std::uint64_t at = 0;
  std::uint64_t run_bytes = 0;
  std::uint64_t rows = 1;
  std::uint64_t from_stride = 0;
  std::uint64_t to_stride = 0;
  bool operator==(const SegmentCopy&) const = default;
};

// Buckets in the order of their bytes in the segments, so that neighbouring parts are one copy.
// Each element of each piece is in exactly one part.
class Plan {
 public:
  // kInvalid: the bucket is smaller than kPartAlignment.
  static Result<Plan> create(const Contents& contents, std::uint64_t bucket_bytes);
  // Only these pieces, in this order. The parts do not depend on the layout.
  static Result<Plan> in_order(const Contents& contents, std::span<const std::uint32_t> pieces,
                               std::uint64_t bucket_bytes);

  std::size_t size() const { return buckets_.size(); }
  // With padding.
  std::uint64_t bytes(std::size_t bucket) const { return buckets_[bucket].bytes; }
  std::span<const Part> parts(std::size_t bucket) const;
  std::span<const SegmentCopy> copies(std::size_t bucket) const;
  // Tiles that must verify before the bucket is filled; ascending, disjoint.
  std::span<const std::pair<TileIndex, TileIndex>> tiles(std::size_t bucket) const;
  // Of tiles(bucket).
  std::size_t tile_count(std::size_t bucket) const;
  // The largest tile_count().
  std::size_t most_tiles() const;
  std::uint64_t payload_bytes() const { return payload_bytes_; }

 private:
  friend class PlanBuilder;
  struct Bucket {
    std::uint64_t bytes = 0;
    std::size_t first_part = 0;
    std::size_t first_copy = 0;
    std::size_t first_tiles = 0;
  };
  const Bucket& after(std::size_t bucket) const;
  std::vector<Bucket> buckets_;
  // The bucket behind the last one.
  Bucket end_;
  std::vector<Part> parts_;
  std::vector<SegmentCopy> copies_;
  TileRuns tiles_;
  std::uint64_t payload_bytes_ = 0;
};

}  // namespace rekindle::bucket
