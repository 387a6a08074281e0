#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "src/base/blake3_core.h"
#include "src/base/digest.h"
#include "src/bucket/bucket_plan.h"

// The comparisons that cover every byte of some parts. Pure.
namespace rekindle::bucket {

// Boxes that cover the parts, each byte once: tiles that lie whole in one part, for which the
// checkpoint has leaves, and the rests of the parts.
struct BucketChecks {
  struct Tile {
    TileIndex tile = 0;
    std::uint32_t piece = 0;
  };
  struct Rest {  // at most 1 MiB of a tile
    std::uint32_t piece = 0;
    Box box;  // of its tensor
  };
  std::vector<Tile> tiles;
  std::vector<Rest> rests;
  // First of all tiles, then of all rests. Addresses count from where Part::at does.
  std::vector<BoxBytes> boxes;

  std::uint32_t piece_of(std::size_t box) const {
    return box < tiles.size() ? tiles[box].piece : rests[box - tiles.size()].piece;
  }
};

// The elements of a part, which has some.
Box box_of(const Contents& contents, const Part& part);
// Parts of one Plan: each is a box whose elements follow each other in its piece.
BucketChecks checks_of(const Contents& contents, std::span<const Part> parts);

// Of a rest, row-major, from the segments that hold it.
Digest digest_of_rest(const Contents& contents, const BucketChecks::Rest& rest,
                      std::span<const std::byte* const> segments);
// The digests of all rests, in their order.
std::vector<Digest> digests_of_rests(const Contents& contents, const BucketChecks& checks,
                                     std::span<const std::byte* const> segments);

// The first box whose digest is not its tile's leaf; nullopt: all tiles match. `values` begins with
// the digests of the tiles' boxes. `leaves` has one for each tile of the contents.
std::optional<std::size_t> wrong_tile(const BucketChecks& checks, std::span<const Digest> values,
                                      std::span<const Digest> leaves);

}  // namespace rekindle::bucket
