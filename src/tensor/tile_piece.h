#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "src/base/digest.h"
#include "src/base/result.h"
#include "src/tensor/box.h"
#include "src/tensor/chunk_tree.h"
#include "src/tensor/tile_proof.h"

// Pieces: what the holders of the parts of a tile send to one of them, so that it can compute the
// tile's leaf (docs/internals/joint-publication.md). A leaf is the BLAKE3 digest of the tile, and
// BLAKE3 is a tree over chunks of 1 KiB. A part is some runs of the tile's row-major bytes. A piece
// has for each run, in order:
//   1. the bytes up to the first border of a chunk, if the run begins inside a chunk;
//   2. 32 bytes for each largest subtree of whole chunks of the run, without the tree's top;
//   3. the bytes of the chunk that the end of the run cuts.
// The short last chunk of a tile counts as whole. A piece is much shorter than a part with long
// runs. It is longer than the part at most by 31 bytes, if the last chunk is shorter than a digest.
namespace rekindle {

// A box inside the box of a tile.
struct TilePart {
  Box box;
  Box tile;
  std::uint64_t element_bytes = 0;
};

// The length of the piece. It depends on the boxes alone.
std::uint64_t piece_bytes(const TilePart& part);

// Writes the piece to `out`, which has piece_bytes(). `array` holds `held` row-major, and `held`
// contains the part. May run inside store::guard_mapping_access: it owns nothing while it reads
// `array`.
void make_piece(const TilePart& part, std::span<const std::byte> array, const Box& held,
                std::span<char> out);

// What is known of one tile from the pieces of its parts. Thread-compatible.
class TileAssembly {
 public:
  TileAssembly(const Box& tile, std::uint64_t element_bytes);

  // kCorrupt: the piece does not have the length that the part needs. kInvalid: the part is not in
  // the tile, or overlaps an earlier one. An error changes nothing.
  Result<void> add(const Box& part, std::string_view piece);

  // The parts make up the tile.
  bool complete() const { return known_bytes_ == tile_bytes_; }
  // The memory that the pieces take here: 32 bytes for a digest, 1 KiB for a chunk.
  std::uint64_t held_bytes() const;

  // The BLAKE3 digest of the tile. Only of a complete tile.
  Digest leaf() const;
  // Equal to prove_range() of the tile, for a range that is a union of runs of the parts.
  // kNotFound: the pieces do not tell all of it. kInvalid: no range of the tile.
  Result<std::string> proof(TileRange range) const;

 private:
  struct Chunk {
    std::string bytes;
    std::uint64_t known = 0;

    bool complete() const { return known == bytes.size(); }
  };
  struct Subtree {
    std::uint64_t end = 0;
    Digest value;
  };

  // Returns the rest of the piece.
  std::string_view add_run(TileRange run, std::string_view piece);
  void add_bytes(TileRange range, std::string_view bytes);
  bool append_bytes(TileRange range, std::string& out) const;
  std::optional<Digest> value(const ChunkNode& node) const;

  Box tile_;
  std::uint64_t element_bytes_;
  std::uint64_t tile_bytes_;
  std::uint64_t known_bytes_ = 0;
  std::vector<Box> parts_;
  // Chunks whose bytes came, by index.
  std::map<std::uint64_t, Chunk> chunks_;
  // Subtrees whose values came, by their first chunk.
  std::map<std::uint64_t, Subtree> subtrees_;
};

}  // namespace rekindle
