#include "recovery/joint/tile_finisher.h"

#include <algorithm>

#include "src/base/units.h"

namespace rekindle::joint {

namespace {

// Of pieces of tiles without a leaf.
constexpr std::uint64_t kMemory = 256 * kMiB;

}  // namespace

TileFinisher::TileFinisher(ModelVersion id, std::shared_ptr<const JointPlan> plan,
                           std::vector<TileIndex> tiles)
    : id_(std::move(id)), plan_(std::move(plan)), tiles_(std::move(tiles)) {
  for (const TileIndex tile : tiles_) open_.emplace_hint(open_.end(), tile, Tile());
}

bool TileFinisher::has_room_for(TileIndex tile) const {
  return bytes_ < kMemory || open_.empty() || tile <= open_.begin()->first;
}

TileFinisher::Tile& TileFinisher::begin(TileIndex tile, Tile& state) const {
  if (!state.cells.empty()) return state;
  for (JointPlan::Cell& cell : plan_->cells(tile)) {
    for (const std::uint32_t host : cell.hosts) {
      if (std::ranges::find(state.missing, host) == state.missing.end()) {
        state.missing.push_back(host);
      }
    }
    state.cells.push_back({std::move(cell.box), std::move(cell.hosts), {}, 0});
  }
  return state;
}

Result<void> TileFinisher::add(std::uint32_t host, TileIndex tile, std::string_view pieces) {
  const auto found = open_.find(tile);
  if (found == open_.end()) {
    if (std::ranges::binary_search(tiles_, tile)) return {};  // a repeated call
    return fail(ErrorCode::kInvalid, "{}: a piece of tile {}, which is finished elsewhere",
                id_.to_string(), tile);
  }
  Tile& state = begin(tile, found->second);
  const auto missing = std::ranges::find(state.missing, host);
  if (missing == state.missing.end()) {
    const auto has = [&](const Cell& cell) { return std::ranges::binary_search(cell.hosts, host); };
    if (std::ranges::any_of(state.cells, has)) return {};  // a repeated call
    return fail(ErrorCode::kInvalid, "{}: a piece of tile {} from host {}, which has no part of it",
                id_.to_string(), tile, host);
  }
  const TensorIndex tensor = plan_->tiles().tensor_of(tile);
  const TensorInfo& info = plan_->tensors()[tensor];
  const Box whole = plan_->tiles().tile_box(tile);
  for (Cell& cell : state.cells) {
    if (!std::ranges::binary_search(cell.hosts, host)) continue;
    const std::uint64_t bytes = piece_bytes({cell.box, whole, dtype_size_bytes(info.dtype)});
    if (pieces.size() < bytes) {
      return fail(ErrorCode::kCorrupt, "{}: the pieces of {} for '{}' {} are too short",
                  id_.to_string(), plan_->host_name(host), info.name, whole.to_string());
    }
    const std::string_view piece = pieces.substr(0, bytes);
    pieces.remove_prefix(bytes);
    if (cell.piece.empty()) {
      cell.piece = piece;
      cell.from = host;
      state.bytes += bytes;
      bytes_ += bytes;
    } else if (cell.piece != piece) {
      return fail(ErrorCode::kInvalid,
                  "{}: '{}' {} differs between {} and {} ({}): ranks that have the same elements "
                  "must publish the same bytes",
                  id_.to_string(), info.name, cell.box.to_string(), plan_->host_name(cell.from),
                  plan_->host_name(host), name_ranks(plan_->ranks_with(tensor, cell.box)));
    }
  }
  if (!pieces.empty()) {
    return fail(ErrorCode::kCorrupt, "{}: the pieces of {} for '{}' {} are too long",
                id_.to_string(), plan_->host_name(host), info.name, whole.to_string());
  }
  state.missing.erase(missing);
  if (!state.missing.empty()) return {};
  Gathered& gathered = gathered_.emplace_back(Gathered{tile, {}, state.bytes});
  for (Cell& cell : state.cells) {
    gathered.cells.emplace_back(std::move(cell.box), std::move(cell.piece));
  }
  ++undigested_;
  open_.erase(found);
  return {};
}

std::vector<TileFinisher::Gathered> TileFinisher::take_gathered() {
  return std::exchange(gathered_, {});
}

Result<Digest> TileFinisher::leaf(const Gathered& gathered) const {
  const TensorInfo& info = plan_->tensors()[plan_->tiles().tensor_of(gathered.tile)];
  TileAssembly assembly(plan_->tiles().tile_box(gathered.tile), dtype_size_bytes(info.dtype));
  for (const auto& [box, piece] : gathered.cells) TRY_VOID(assembly.add(box, piece));
  if (!assembly.complete()) {
    return fail(ErrorCode::kInternal, "{}: the cells of tile {} of '{}' leave a hole",
                id_.to_string(), gathered.tile, info.name);
  }
  return assembly.leaf();
}

void TileFinisher::digested(const Gathered& gathered) {
  --undigested_;
  bytes_ -= gathered.bytes;
}

}  // namespace rekindle::joint
