#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "src/base/clock.h"
#include "src/bucket/pinned.h"
#include "src/bucket/pipeline.h"
#include "src/bucket/round_plan.h"
#include "src/bucket/segment_fetch.h"

namespace rekindle::bucket {

// Limits the bytes of background work: so many per second, from a beginning. Unused bytes are not
// lost. Pure.
class Allowance {
 public:
  Allowance(std::uint64_t bytes_per_second, TimePoint begin)
      : bytes_per_second_(bytes_per_second), begin_(begin) {}

  bool has_room(std::uint64_t bytes, TimePoint now) const;
  // False: they are too many so far, and none were taken.
  bool take(std::uint64_t bytes, TimePoint now);
  // Bytes that nothing holds back. Afterwards there may be room for none for a while.
  void use(std::uint64_t bytes) { taken_ += bytes; }
  std::uint64_t taken() const { return taken_; }

 private:
  const std::uint64_t bytes_per_second_;
  const TimePoint begin_;
  std::uint64_t taken_ = 0;
};

// A run of tiles. Of each of them, `parts` of `of` parts are in the segments.
struct KeptTiles {
  TileIndex begin = 0;
  TileIndex end = 0;
  std::uint32_t parts = 0;
  std::uint32_t of = 0;
  bool operator==(const KeptTiles&) const = default;
};

// Copies a round's buckets into the segments of a copy that lacks them: every `count`th bucket that
// fits the limits; of it, the shares that go to pinned, writable memory and touch no final tile.
// No other code writes there meanwhile.
class SegmentKeep final : public Keep {
 public:
  struct Which {
    std::uint32_t index = 0;
    std::uint32_t count = 1;
  };
  // The device's link to its host, if the round sends bytes of each bucket over it to other hosts.
  struct Link {
    // For kept and passing bytes together.
    Allowance allowance;
    std::uint64_t passing_bytes = 0;
  };
  struct Limits {
    Allowance kept;
    std::optional<Link> link = std::nullopt;
  };
  // All arguments outlive this object. `final_tiles` covers all tiles of the contents.
  SegmentKeep(Device& device, const RoundPlan& plan, const Pinner& pinner,
              SegmentFetch::Segments segments, TileSet final_tiles, Which which, Limits limits,
              std::uint32_t slots);
  // Makes the stream.
  Result<void> start();

  Result<void> offer(std::size_t bucket, std::uint32_t slot, DeviceAddress at,
                     TimePoint now) override;
  Result<bool> done(std::uint32_t slot) override;
  Result<void> drain(TimePoint deadline) override;

  // Of the buckets that have arrived. After drain(): of all buckets.
  std::vector<KeptTiles> kept() const;
  std::uint64_t kept_bytes() const { return kept_bytes_; }

 private:
  // The shares of a bucket that are copied.
  struct Kept {
    std::size_t bucket = 0;
    std::vector<std::uint32_t> shares;
  };
  bool fits(std::uint32_t share, std::size_t bucket, std::uint64_t& bytes) const;
  std::vector<std::uint32_t> shares_to_keep(std::size_t bucket, std::uint64_t& bytes) const;
  bool take(std::uint64_t bytes, TimePoint now);
  void land(std::uint32_t slot);

  Device& device_;
  const RoundPlan& plan_;
  const Pinner& pinner_;
  const SegmentFetch::Segments segments_;
  const TileSet final_tiles_;
  const Which which_;
  Limits limits_;
  std::unique_ptr<Stream> stream_;
  struct Slot {
    std::unique_ptr<Event> copied;
    // What is being copied.
    std::optional<Kept> kept;
    std::uint64_t bytes = 0;
  };
  std::vector<Slot> slots_;
  bool failed_ = false;
  // What has arrived.
  std::vector<Kept> landed_;
  std::uint64_t kept_bytes_ = 0;
  // Of the bucket that is being queued.
  std::vector<Download> downloads_;
};

}  // namespace rekindle::bucket
