#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "recovery/joint/tile_finisher.h"
#include "src/base/blake3.h"
#include "src/base/ids.h"
#include "src/base/result.h"
#include "src/tensor/joint_plan.h"
#include "src/tensor/tile_piece.h"
#include "tests/support/must.h"
#include "tests/tensor/random_tensors.h"

namespace rekindle::joint::test {

using rekindle::test::below;
using rekindle::test::Rng;

inline const ModelVersion kId{"m", 7};

// nullopt: no error.
template <typename T>
std::optional<ErrorCode> code_of(const Result<T>& result) {
  return result ? std::nullopt : std::optional(result.error().code());
}

// A tensor with its bytes.
struct WholeTensor {
  TensorInfo info;
  std::vector<std::byte> bytes;

  std::uint64_t element_bytes() const { return dtype_size_bytes(info.dtype); }
  std::vector<std::byte> extract(const Box& box) const {
    return rekindle::test::naive_extract(box, Box::whole(info.shape), bytes, element_bytes());
  }
  Digest leaf(const Box& tile) const { return blake3(extract(tile)); }
  // The piece of a part of a tile, from an array that holds nothing else.
  std::string piece(const Box& part, const Box& tile) const {
    const TilePart cell{part, tile, element_bytes()};
    std::string out(piece_bytes(cell), '\0');
    make_piece(cell, extract(part), part, out);
    return out;
  }
};

inline WholeTensor random_tensor(Rng& rng, std::string name, DType dtype, const Shape& shape) {
  TensorInfo info{std::move(name), dtype, shape};
  auto bytes = rekindle::test::random_bytes(rng, info.size_bytes());
  return {std::move(info), std::move(bytes)};
}

// The pieces of a host's cells of a tile, as an honest agent sends them. Not all holders need to
// have the same bytes.
inline std::string pieces_of(const JointPlan& plan, std::uint32_t host, TileIndex tile,
                             const WholeTensor& tensor) {
  std::string pieces;
  for (const JointPlan::Cell& cell : plan.cells(tile)) {
    if (std::ranges::find(cell.hosts, host) == cell.hosts.end()) continue;
    pieces += tensor.piece(cell.box, plan.tiles().tile_box(tile));
  }
  return pieces;
}

// The leaves of the tiles that were gathered since the last call, ascending.
inline std::vector<std::pair<TileIndex, Digest>> take_leaves(TileFinisher& finisher) {
  std::vector<std::pair<TileIndex, Digest>> leaves;
  for (const TileFinisher::Gathered& gathered : finisher.take_gathered()) {
    leaves.emplace_back(gathered.tile, must(finisher.leaf(gathered)));
    finisher.digested(gathered);
  }
  std::ranges::sort(leaves);
  return leaves;
}

// Host i has the boxes `boxes[i]` of one tensor, all at its rank 10 i. The hosts are a, b, …
inline std::shared_ptr<const JointPlan> plan_of(const TensorInfo& info,
                                                const std::vector<std::vector<Box>>& boxes) {
  std::vector<JointHost> hosts;
  for (std::uint32_t i = 0; i < boxes.size(); ++i) {
    hosts.push_back(
        {std::string(1, static_cast<char>('a' + i)), {{10 * i, {DeclaredTensor{info, boxes[i]}}}}});
  }
  return std::make_shared<const JointPlan>(must(JointPlan::create(std::move(hosts))));
}

inline Box rows(std::uint64_t begin, std::uint64_t end, std::uint64_t width) {
  return {{begin, 0}, {end - begin, width}};
}
inline Box columns(std::uint64_t begin, std::uint64_t end, std::uint64_t height) {
  return {{0, begin}, {height, end - begin}};
}

}  // namespace rekindle::joint::test
