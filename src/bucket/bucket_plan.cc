#include "src/bucket/bucket_plan.h"

#include <algorithm>
#include <tuple>

#include "src/base/units.h"

namespace rekindle::bucket {

namespace {

Box rows_of(const Box& box, std::size_t dimension, std::uint64_t first, std::uint64_t count) {
  Box rows = box;
  rows.offset[dimension] += first;
  rows.extent[dimension] = count;
  return rows;
}

// Cuts a box into boxes of at most `most_bytes` whose elements follow each other row-major. A cut
// between tiles is better than a cut through one, because one side alone does not verify by the
// leaf. It is not better if an eighth of each bucket stays empty for it.
void cut(const Box& box, const Dims& tile, std::uint64_t element_bytes, std::uint64_t most_bytes,
         std::vector<Box>& out) {
  const std::uint64_t bytes = box.elements() * element_bytes;
  std::size_t dimension = 0;
  while (dimension < box.rank() && box.extent[dimension] <= 1) ++dimension;
  if (bytes <= most_bytes || dimension == box.rank()) return out.push_back(box);
  const std::uint64_t rows = box.extent[dimension];
  const std::uint64_t at_once = most_bytes / (bytes / rows);
  for (std::uint64_t first = 0, count = 0; first < rows; first += count) {
    if (at_once == 0) {
      count = 1;
      cut(rows_of(box, dimension, first, 1), tile, element_bytes, most_bytes, out);
    } else {
      count = std::min(at_once, rows - first);
      const std::uint64_t over = (box.offset[dimension] + first + count) % tile[dimension];
      if (first + count < rows && over <= at_once / 8) count -= over;
      out.push_back(rows_of(box, dimension, first, count));
    }
  }
}

}  // namespace

class PlanBuilder {
 public:
  PlanBuilder(const Contents& contents, std::uint64_t bucket_bytes)
      : contents_(contents), bucket_bytes_(bucket_bytes) {}

  Plan build(std::span<const std::uint32_t> pieces) {
    for (const std::uint32_t piece : pieces) add(piece);
    close_bucket();
    plan_.end_ = firsts();
    return std::move(plan_);
  }

  // Pieces in the order of the segments. Pieces without elements come first.
  std::vector<std::uint32_t> by_place() const {
    struct Place {
      std::uint32_t segment = 0;
      std::uint64_t offset = 0;
      std::uint32_t piece = 0;
      auto operator<=>(const Place&) const = default;
    };
    std::vector<Place> places;
    std::vector<Contents::Gather> copies;
    for (std::uint32_t i = 0; i < contents_.pieces().size(); ++i) {
      const Piece& piece = contents_.pieces()[i];
      Place place{piece.segment, piece.offset_bytes, i};
      if (!piece.in_place) {
        copies.clear();
        contents_.gather(piece, piece.box(), copies);
        if (!copies.empty()) {
          place.segment = copies.front().segment;
          place.offset = copies.front().copy.src_offset;
        }
      }
      places.push_back(place);
    }
    std::sort(places.begin(), places.end());
    std::vector<std::uint32_t> order;
    for (const Place& place : places) order.push_back(place.piece);
    return order;
  }

 private:
  void add(std::uint32_t index) {
    const Piece& piece = contents_.pieces()[index];
    plan_.payload_bytes_ += piece.bytes;
    if (piece.bytes == 0) return place(index, piece.box(), 0, 0);
    if (piece.bytes <= bucket_bytes_) return place(index, piece.box(), 0, piece.bytes);
    std::vector<Box> boxes;
    const Dims& tile = contents_.tiles().grid(piece.tensor).tile_extent();
    cut(piece.box(), tile, contents_.element_bytes(piece), bucket_bytes_, boxes);
    std::uint64_t offset = 0;
    for (const Box& box : boxes) {
      const std::uint64_t bytes = box.elements() * contents_.element_bytes(piece);
      place(index, box, offset, bytes);
      offset += bytes;
    }
  }

  // A piece is not cut to fill a bucket, because consumers prefer whole tensors.
  void place(std::uint32_t index, const Box& box, std::uint64_t offset, std::uint64_t bytes) {
    const Piece& piece = contents_.pieces()[index];
    std::uint64_t at = round_up(used_, kPartAlignment);
    if (at + bytes > bucket_bytes_) {
      close_bucket();
      at = 0;
    }
    if (!open_) {
      plan_.buckets_.push_back(firsts());
      open_ = true;
    }
    plan_.parts_.push_back({index, offset, bytes, at});
    used_ = at + bytes;
    if (bytes == 0) return;
    add_copies(piece, box, offset, bytes, at);
    add_tiles(piece, box);
  }

  void add_copies(const Piece& piece, const Box& box, std::uint64_t offset, std::uint64_t bytes,
                  std::uint64_t at) {
    if (piece.in_place) {
      return add_copy({piece.segment, piece.offset_bytes + offset, at, bytes, 1, 0, 0});
    }
    gathered_.clear();
    contents_.gather(piece, box, gathered_);
    for (const auto& [segment, copy] : gathered_) {
      add_copy({segment, copy.src_offset, at + copy.dst_offset, copy.run_bytes, copy.count,
                copy.src_stride, copy.dst_stride});
    }
  }

  void add_copy(const SegmentCopy& copy) {
    auto& copies = plan_.copies_;
    if (copies.size() > plan_.buckets_.back().first_copy) {
      SegmentCopy& last = copies.back();
      if (last.rows == 1 && copy.rows == 1 && last.segment == copy.segment &&
          last.from + last.run_bytes == copy.from && last.at + last.run_bytes == copy.at) {
        last.run_bytes += copy.run_bytes;
        return;
      }
    }
    copies.push_back(copy);
  }

  void add_tiles(const Piece& piece, const Box& box) {
    const TileMap& tiles = contents_.tiles();
    const TileIndex first = tiles.first_tile(piece.tensor);
    if (box.extent.product() == Dims::from(piece.full_shape())->product()) {
      bucket_tiles_.emplace_back(first, tiles.first_tile(piece.tensor + 1));
      return;
    }
    touched_.clear();
    tiles.grid(piece.tensor).tiles_of(box, touched_);
    for (const std::uint64_t tile : touched_) {
      const auto index = first + static_cast<TileIndex>(tile);
      if (!bucket_tiles_.empty() && bucket_tiles_.back().second == index) {
        ++bucket_tiles_.back().second;
      } else {
        bucket_tiles_.emplace_back(index, index + 1);
      }
    }
  }

  void close_bucket() {
    if (!open_) return;
    std::sort(bucket_tiles_.begin(), bucket_tiles_.end());
    const std::size_t first = plan_.buckets_.back().first_tiles;
    for (const auto& run : bucket_tiles_) {
      if (plan_.tiles_.size() > first && run.first <= plan_.tiles_.back().second) {
        plan_.tiles_.back().second = std::max(plan_.tiles_.back().second, run.second);
      } else {
        plan_.tiles_.push_back(run);
      }
    }
    bucket_tiles_.clear();
    plan_.buckets_.back().bytes = used_;
    used_ = 0;
    open_ = false;
  }

  Plan::Bucket firsts() const {
    return {0, plan_.parts_.size(), plan_.copies_.size(), plan_.tiles_.size()};
  }

  const Contents& contents_;
  const std::uint64_t bucket_bytes_;
  Plan plan_;
  bool open_ = false;
  // Of the open bucket.
  std::uint64_t used_ = 0;
  TileRuns bucket_tiles_;
  std::vector<std::uint64_t> touched_;
  std::vector<Contents::Gather> gathered_;
};

namespace {

Result<void> check_size(std::uint64_t bucket_bytes) {
  if (bucket_bytes >= kPartAlignment) return {};
  return fail(ErrorCode::kInvalid, "buckets of {} bytes are too small, {} is the least",
              bucket_bytes, kPartAlignment);
}

}  // namespace

Result<Plan> Plan::create(const Contents& contents, std::uint64_t bucket_bytes) {
  TRY_VOID(check_size(bucket_bytes));
  PlanBuilder builder(contents, bucket_bytes);
  return builder.build(builder.by_place());
}

Result<Plan> Plan::in_order(const Contents& contents, std::span<const std::uint32_t> pieces,
                            std::uint64_t bucket_bytes) {
  TRY_VOID(check_size(bucket_bytes));
  return PlanBuilder(contents, bucket_bytes).build(pieces);
}

namespace {

template <typename T>
std::span<const T> slice(const std::vector<T>& all, std::size_t first, std::size_t end) {
  return std::span<const T>(all).subspan(first, end - first);
}

}  // namespace

const Plan::Bucket& Plan::after(std::size_t bucket) const {
  return bucket + 1 < buckets_.size() ? buckets_[bucket + 1] : end_;
}

std::span<const Part> Plan::parts(std::size_t bucket) const {
  return slice(parts_, buckets_[bucket].first_part, after(bucket).first_part);
}

std::span<const SegmentCopy> Plan::copies(std::size_t bucket) const {
  return slice(copies_, buckets_[bucket].first_copy, after(bucket).first_copy);
}

std::span<const std::pair<TileIndex, TileIndex>> Plan::tiles(std::size_t bucket) const {
  return slice(tiles_, buckets_[bucket].first_tiles, after(bucket).first_tiles);
}

std::size_t Plan::tile_count(std::size_t bucket) const {
  std::size_t count = 0;
  for (const auto& [begin, end] : tiles(bucket)) count += end - begin;
  return count;
}

std::size_t Plan::most_tiles() const {
  std::size_t most = 0;
  for (std::size_t bucket = 0; bucket < size(); ++bucket) most = std::max(most, tile_count(bucket));
  return most;
}

}  // namespace rekindle::bucket
