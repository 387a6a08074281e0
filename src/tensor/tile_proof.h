#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>

#include "src/base/digest.h"
#include "src/base/result.h"
#include "src/tensor/box.h"

// Proofs that a part of a tile belongs to the tile's leaf, for pullers that read a part without the
// rest. A leaf is the BLAKE3 digest of its tile, and BLAKE3 is a tree over chunks of 1 KiB: the
// nodes beside the path from the part's chunks to the top of that tree are enough to compute the
// leaf again, so the puller need not trust the source. A part can be proved if its bytes are one
// run of the tile's row-major bytes. The checkpoint's root is computed from all leaves:
// tile_digest.h.
namespace rekindle {

// The run of bytes that `part` is in the row-major bytes of `tile`, which contains it.
struct TileRange {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;  // past it
};
// False: the part is not one run, or empty.
bool is_one_run(const Box& part, const Box& tile);
// Of a part that is one run.
TileRange range_in_tile(const Box& part, const Box& tile, std::uint64_t element_bytes);

// The proof that a source sends for a range of a tile: the bytes of the range's first and last
// chunk that lie outside of the range, then 32 bytes for each node beside the path, in the order of
// the tree. At most 2 KiB + 640 bytes.
std::string prove_range(std::span<const std::byte> tile, TileRange range);
// The length of that proof. It depends on the lengths alone.
std::uint64_t proof_bytes(TileRange range, std::uint64_t tile_bytes);

// The leaf of the tile that has `part` at `range`, as the proof tells. kCorrupt: the proof does not
// have the length that the range needs. A leaf that differs from the expected one means that the
// part, the proof, or both are wrong.
Result<Digest> leaf_by_proof(std::span<const std::byte> part, TileRange range,
                             std::uint64_t tile_bytes, std::string_view proof);

// The same for a holder that has only a part of the tile, at `held`, and the proof of that part:
// the proof of a `range` inside of it. kCorrupt: the proof does not have the length that the part
// needs. kInvalid: the range is not in the part.
Result<std::string> prove_smaller_range(std::span<const std::byte> part, TileRange held,
                                        std::uint64_t tile_bytes, std::string_view proof,
                                        TileRange range);

// Puts into `proof`, which has the length for `range`, all that the proof of a smaller range
// `within` it tells. It is complete when this was done for ranges that make up `range`. `smaller`
// has the length for `within`.
void add_to_proof(std::span<char> proof, TileRange range, std::uint64_t tile_bytes,
                  std::string_view smaller, TileRange within);

}  // namespace rekindle
