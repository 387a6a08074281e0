#include "src/tensor/tile_piece.h"

#include <algorithm>

#include <gtest/gtest.h>

#include "src/base/blake3.h"
#include "tests/tensor/random_tensors.h"

namespace rekindle {
namespace {

using test::below;
using test::Rng;

// A tile at some place of a tensor, its bytes, and a cut of it into parts.
struct CutTile {
  Box tile;
  std::uint64_t element_bytes = 0;
  std::vector<std::byte> bytes;
  std::vector<Box> parts;

  TilePart part(const Box& box) const { return {box, tile, element_bytes}; }
};

Box cut_off(Box& box, std::size_t axis, std::uint64_t extent) {
  Box first = box;
  first.extent[axis] = extent;
  box.offset[axis] += extent;
  box.extent[axis] -= extent;
  return first;
}

// Cuts one of the boxes in two, at a random place.
void cut_one(Rng& rng, std::vector<Box>& boxes) {
  Box& box = boxes[below(rng, boxes.size())];
  if (box.rank() == 0) return;
  const std::size_t axis = below(rng, box.rank());
  if (box.extent[axis] < 2) return;
  const Box first = cut_off(box, axis, 1 + below(rng, box.extent[axis] - 1));
  boxes.push_back(first);
}

void cut_in_grid(Rng& rng, std::vector<Box>& boxes) {
  for (std::size_t axis = 0; axis < boxes[0].rank(); ++axis) {
    const std::uint64_t step = 1 + below(rng, boxes[0].extent[axis]);
    std::vector<Box> cut;
    for (Box box : boxes) {
      while (box.extent[axis] > step) cut.push_back(cut_off(box, axis, step));
      cut.push_back(box);
    }
    if (cut.size() > 200) return;
    boxes = cut;
  }
}

// The elements [begin, end) of the tile in row-major order, as boxes.
void flat_range(const Box& tile, std::uint64_t begin, std::uint64_t end, std::vector<Box>& out) {
  if (begin >= end) return;
  if (tile.rank() == 0 || (begin == 0 && end == tile.elements())) return out.push_back(tile);
  std::size_t axis = 0;
  while (tile.extent[axis] == 1) ++axis;
  const std::uint64_t row = tile.elements() / tile.extent[axis];
  Box rows = tile;
  const auto slice = [&](std::uint64_t first, std::uint64_t count) {
    rows.offset[axis] = tile.offset[axis] + first;
    rows.extent[axis] = count;
    return rows;
  };
  const std::uint64_t first = begin / row;
  const std::uint64_t last = end / row;
  if (first == last) return flat_range(slice(first, 1), begin % row, end % row, out);
  const std::uint64_t whole = begin % row == 0 ? first : first + 1;
  if (whole != first) flat_range(slice(first, 1), begin % row, row, out);
  if (whole < last) out.push_back(slice(whole, last - whole));
  if (end % row != 0) flat_range(slice(last, 1), 0, end % row, out);
}

void cut_flat(Rng& rng, std::vector<Box>& boxes) {
  const Box tile = boxes[0];
  const std::uint64_t shard = 1 + below(rng, tile.elements());
  if (tile.elements() / shard > 50) return;
  boxes.clear();
  for (std::uint64_t begin = 0; begin < tile.elements(); begin += shard) {
    flat_range(tile, begin, std::min(begin + shard, tile.elements()), boxes);
  }
}

CutTile random_cut_tile(Rng& rng) {
  CutTile cut;
  constexpr std::uint64_t kSizes[] = {1, 2, 4, 8};
  constexpr std::uint64_t kExtents[] = {60'000, 400, 40, 14};
  cut.element_bytes = kSizes[below(rng, 4)];
  const std::size_t rank = 1 + below(rng, 4);
  cut.tile = Box::whole(Dims::zeros(rank));
  for (std::size_t i = 0; i < rank; ++i) {
    cut.tile.offset[i] = below(rng, 5);
    cut.tile.extent[i] = 1 + below(rng, below(rng, 4) == 0 ? 3 : kExtents[rank - 1]);
  }
  cut.bytes = test::random_bytes(rng, cut.tile.elements() * cut.element_bytes);
  cut.parts = {cut.tile};
  switch (below(rng, 4)) {
    case 0:
      cut_in_grid(rng, cut.parts);
      break;
    case 1:
      cut_flat(rng, cut.parts);
      break;
    default:
      for (std::uint64_t left = 1 + below(rng, 12); left > 0; --left) cut_one(rng, cut.parts);
  }
  std::shuffle(cut.parts.begin(), cut.parts.end(), rng);
  return cut;
}

// The piece of a part, made by a holder of a random larger box.
std::string piece_of(Rng& rng, const CutTile& cut, const Box& part) {
  Box held = part;
  for (std::size_t i = 0; i < held.rank(); ++i) {
    if (below(rng, 2) == 0) continue;  // the border of the part
    const std::uint64_t before = below(rng, std::min<std::uint64_t>(4, held.offset[i] + 1));
    held.offset[i] -= before;
    held.extent[i] += before + below(rng, 4);
  }
  std::vector<std::byte> array(held.elements() * cut.element_bytes, std::byte{0xee});
  copy_box(part, cut.bytes, cut.tile, array, held, cut.element_bytes);
  std::string piece(piece_bytes(cut.part(part)), '\0');
  make_piece(cut.part(part), array, held, piece);
  return piece;
}

TEST(TilePieceTest, ThePiecesOfEveryCutGiveTheLeaf) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  Rng rng(seed);
  for (int round = 0; round < 400; ++round) {
    const CutTile cut = random_cut_tile(rng);
    TileAssembly assembly(cut.tile, cut.element_bytes);
    for (const Box& part : cut.parts) {
      EXPECT_FALSE(assembly.complete());
      const std::string piece = piece_of(rng, cut, part);
      // A last chunk may be shorter than its digest.
      EXPECT_LT(piece.size(), part.elements() * cut.element_bytes + sizeof(Digest));
      const auto added = assembly.add(part, piece);
      ASSERT_TRUE(added) << added.error().message();
    }
    ASSERT_TRUE(assembly.complete());
    EXPECT_EQ(assembly.leaf(), blake3(cut.bytes))
        << cut.tile.to_string() << " of " << cut.element_bytes << " bytes, " << cut.parts.size()
        << " parts";
    EXPECT_LT(assembly.held_bytes(), cut.bytes.size() + sizeof(Digest));
  }
}

TEST(TilePieceTest, ACompleteTileProvesEveryUnionOfRuns) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  Rng rng(seed);
  int proved = 0;
  for (int round = 0; round < 300; ++round) {
    const CutTile cut = random_cut_tile(rng);
    TileAssembly assembly(cut.tile, cut.element_bytes);
    std::vector<std::uint64_t> borders;
    for (const Box& part : cut.parts) {
      ASSERT_TRUE(assembly.add(part, piece_of(rng, cut, part)));
      if (!is_one_run(part, cut.tile)) continue;
      const TileRange range = range_in_tile(part, cut.tile, cut.element_bytes);
      borders.insert(borders.end(), {range.begin, range.end});
      if (!assembly.complete()) continue;
      EXPECT_EQ(*assembly.proof(range), prove_range(cut.bytes, range));
    }
    std::sort(borders.begin(), borders.end());
    for (std::size_t i = 1; i < borders.size(); ++i) {
      const TileRange range{borders[below(rng, i)], borders[i]};
      if (range.begin == range.end) continue;
      const auto proof = assembly.proof(range);
      ASSERT_TRUE(proof) << proof.error().message();
      EXPECT_EQ(*proof, prove_range(cut.bytes, range));
      ++proved;
    }
  }
  EXPECT_GT(proved, 100);
}

CutTile tile_in_rows(Rng& rng, std::initializer_list<std::uint64_t> rows, std::uint64_t width) {
  CutTile cut{Box::whole({0, width}), 1, {}, {}};
  for (const std::uint64_t count : rows) {
    cut.parts.push_back({{cut.tile.extent[0], 0}, {count, width}});
    cut.tile.extent[0] += count;
  }
  cut.bytes = test::random_bytes(rng, cut.tile.elements());
  return cut;
}

TEST(TilePieceTest, APieceHasDigestsForWholeSubtreesAndBytesForChunksThatABorderCuts) {
  Rng rng(3);
  // 8 chunks; the border is 512 bytes behind the start of chunk 5.
  const CutTile cut = tile_in_rows(rng, {11, 5}, 512);
  const std::string first = piece_of(rng, cut, cut.parts[0]);
  const auto all = std::span<const std::byte>(cut.bytes);
  EXPECT_EQ(first.size(), 2 * 32u + 512u) << "chunks 0 to 3, chunk 4, half of chunk 5";
  EXPECT_EQ(first.substr(0, 32), blake3_subtree(all.first(4096), 0).to_bytes());
  EXPECT_EQ(first.substr(32, 32), blake3_subtree(all.subspan(4096, 1024), 4).to_bytes());
  const std::string second = piece_of(rng, cut, cut.parts[1]);
  EXPECT_EQ(second.size(), 512u + 32u) << "half of chunk 5, chunks 6 and 7";
  EXPECT_EQ(second.substr(512), blake3_subtree(all.subspan(6144, 2048), 6).to_bytes());
}

TEST(TilePieceTest, ATileOfOneChunkIsSentAsBytes) {
  Rng rng(4);
  const CutTile cut = tile_in_rows(rng, {3, 5}, 128);
  EXPECT_EQ(piece_of(rng, cut, cut.parts[0]).size(), 384u);
  EXPECT_EQ(piece_of(rng, cut, cut.parts[1]).size(), 640u);
  EXPECT_EQ(piece_of(rng, cut, cut.tile).size(), 1024u);
}

TEST(TilePieceTest, AWholeTileIsAPieceOfItsTwoSubtrees) {
  Rng rng(5);
  const CutTile cut = tile_in_rows(rng, {20}, 512);
  const std::string piece = piece_of(rng, cut, cut.tile);
  EXPECT_EQ(piece.size(), 64u);
  TileAssembly assembly(cut.tile, 1);
  ASSERT_TRUE(assembly.add(cut.tile, piece));
  EXPECT_EQ(assembly.leaf(), blake3(cut.bytes));
  EXPECT_EQ(assembly.held_bytes(), 64u);
}

// S1: an agent may send any bytes as its piece.
TEST(TilePieceTest, S1WrongPiecesAreRefusedOrGiveAnotherLeaf) {
  Rng rng(6);
  const CutTile cut = tile_in_rows(rng, {11, 5}, 512);
  const std::string first = piece_of(rng, cut, cut.parts[0]);
  const std::string second = piece_of(rng, cut, cut.parts[1]);
  TileAssembly assembly(cut.tile, 1);
  for (std::size_t size = 0; size < first.size(); ++size) {
    const auto added = assembly.add(cut.parts[0], first.substr(0, size));
    ASSERT_FALSE(added) << size;
    EXPECT_EQ(added.error().code(), ErrorCode::kCorrupt);
  }
  EXPECT_FALSE(assembly.add(cut.parts[0], first + "x"));
  EXPECT_EQ(assembly.held_bytes(), 0u) << "refused pieces leave nothing behind";
  for (std::size_t i = 0; i < second.size(); i += 7) {
    std::string changed = second;
    changed[i] = static_cast<char>(changed[i] ^ 0x40);
    TileAssembly wrong(cut.tile, 1);
    ASSERT_TRUE(wrong.add(cut.parts[0], first));
    ASSERT_TRUE(wrong.add(cut.parts[1], changed));
    EXPECT_NE(wrong.leaf(), blake3(cut.bytes)) << "byte " << i;
  }
}

TEST(TilePieceTest, PartsThatOverlapOrLeaveTheTileAreRefused) {
  Rng rng(7);
  const CutTile cut = tile_in_rows(rng, {11, 5}, 512);
  const std::string first = piece_of(rng, cut, cut.parts[0]);
  TileAssembly assembly(cut.tile, 1);
  ASSERT_TRUE(assembly.add(cut.parts[0], first));
  EXPECT_FALSE(assembly.complete());
  const Box wrong[] = {
      cut.parts[0], {{10, 0}, {6, 512}}, {{15, 0}, {2, 512}}, {{11}, {5}}, {{11, 0}, {0, 512}}};
  for (const Box& part : wrong) {
    const auto added = assembly.add(part, first);
    ASSERT_FALSE(added) << part.to_string();
    EXPECT_EQ(added.error().code(), ErrorCode::kInvalid);
  }
}

TEST(TilePieceTest, ProofsThatThePiecesDoNotGiveAreNotFound) {
  Rng rng(8);
  const CutTile cut = tile_in_rows(rng, {11, 5}, 512);
  TileAssembly assembly(cut.tile, 1);
  ASSERT_TRUE(assembly.add(cut.parts[0], piece_of(rng, cut, cut.parts[0])));
  const TileRange first{0, 11 * 512};
  EXPECT_EQ(assembly.proof(first).error().code(), ErrorCode::kNotFound);
  ASSERT_TRUE(assembly.add(cut.parts[1], piece_of(rng, cut, cut.parts[1])));
  EXPECT_EQ(*assembly.proof(first), prove_range(cut.bytes, first));
  EXPECT_EQ(assembly.proof({512, 11 * 512}).error().code(), ErrorCode::kNotFound);
  EXPECT_EQ(assembly.proof({0, 17 * 512}).error().code(), ErrorCode::kInvalid);
  EXPECT_EQ(assembly.proof({512, 512}).error().code(), ErrorCode::kInvalid);
}

}  // namespace
}  // namespace rekindle
