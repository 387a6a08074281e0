#include "src/bucket/contents.h"

#include <algorithm>
#include <cstring>

namespace rekindle::bucket {

namespace {

Failure broken(Error error) {
  return fail(ErrorCode::kInternal, "the agent's answer does not fit together: {}",
              error.message());
}

Result<Box> box_of(const NamedBox& wanted, const TensorInfo& tensor) {
  if (wanted.offset.empty() && wanted.extent.empty()) return Box::whole(tensor.shape);
  TRY(const Dims offset, Dims::from(wanted.offset));
  TRY(const Dims extent, Dims::from(wanted.extent));
  const Box box{offset, extent};
  TRY_VOID(check_box(box, tensor.shape));
  return box;
}

}  // namespace

Result<Contents> Contents::create(std::string_view tensor_set, std::string_view layout,
                                  std::span<const NamedBox> wanted,
                                  std::span<const std::uint64_t> segment_bytes) {
  auto tensors = TensorSet::parse(tensor_set);
  if (!tensors) return broken(std::move(tensors).error());
  auto parsed = Layout::parse(*tensors, layout);
  if (!parsed) return broken(std::move(parsed).error());
  auto tiles = TileMap::create(*tensors);
  if (!tiles) return broken(std::move(tiles).error());
  const auto segments = parsed->segments();
  if (segments.size() != segment_bytes.size()) {
    return fail(ErrorCode::kInternal, "the agent sent {} segments for a layout with {}",
                segment_bytes.size(), segments.size());
  }
  for (std::size_t i = 0; i < segments.size(); ++i) {
    if (segments[i].size_bytes <= segment_bytes[i]) continue;
    return fail(ErrorCode::kInternal, "segment {} has {} bytes in the layout, the agent sent {}",
                segments[i].name, segments[i].size_bytes, segment_bytes[i]);
  }
  Contents contents(std::move(*tensors), std::move(*parsed), std::move(*tiles));
  contents.pieces_.reserve(wanted.empty() ? contents.layout_.entries().size() : wanted.size());
  for (const NamedBox& box : wanted) TRY_VOID(contents.add_wanted(box));
  if (wanted.empty()) {
    for (const LayoutEntry& entry : contents.layout_.entries()) contents.add_entry(entry);
  }
  contents.finish();
  return contents;
}

Result<void> Contents::add_wanted(const NamedBox& wanted) {
  const auto tensor = tensors_.find(wanted.tensor);
  if (!tensor) {
    return fail(ErrorCode::kInternal, "the agent names a tensor '{}' that its set does not have",
                wanted.tensor);
  }
  const TensorInfo& info = tensors_[*tensor];
  auto named = box_of(wanted, info);
  if (!named) return broken(std::move(named).error().with_context(wanted.tensor));
  const Box& box = wanted_.emplace_back(std::move(*named));
  const std::uint64_t element = dtype_size_bytes(info.dtype);
  Piece piece(info, *tensor, box);
  // Entries of one tensor do not overlap.
  std::uint64_t found = 0;
  std::vector<StridedCopy> copies;
  for (const LayoutEntry& entry : layout_.entries_of(*tensor)) {
    const auto common = intersect(box, entry.box);
    if (!common) continue;
    found += common->elements();
    if (*common != box) continue;
    std::uint64_t inside = 0;
    if (entry.box != box) {
      copies.clear();
      strided_copies(box, entry.box, box, element, copies);
      if (copies.size() != 1 || copies.front().count != 1) continue;
      inside = copies.front().src_offset;
    }
    piece.in_place = true;
    piece.segment = entry.segment;
    piece.offset_bytes = entry.offset_bytes + inside;
  }
  if (found != box.elements()) {
    return fail(ErrorCode::kInternal,
                "the agent's layout holds {} of the {} elements of '{}' {} that it promised", found,
                box.elements(), info.name, box.to_string());
  }
  add(piece);
  return {};
}

void Contents::add_entry(const LayoutEntry& entry) {
  Piece piece(tensors_[entry.tensor], entry.tensor, entry.box);
  piece.in_place = piece.bytes > 0;
  piece.segment = entry.segment;
  piece.offset_bytes = entry.offset_bytes;
  add(piece);
}

void Contents::add(Piece piece) {
  const TileGrid& grid = tiles_.grid(piece.tensor);
  if (piece.whole) {
    piece.tiles_missing = grid.tile_count();
  } else if (!piece.box().empty()) {
    std::vector<std::uint64_t> touched;
    grid.tiles_of(piece.box(), touched);
    piece.tiles_missing = touched.size();
  }
  pieces_.push_back(piece);
}

void Contents::finish() {
  const auto before = [](const Piece& a, const Piece& b) { return a.tensor < b.tensor; };
  if (!std::is_sorted(pieces_.begin(), pieces_.end(), before)) {
    std::stable_sort(pieces_.begin(), pieces_.end(), before);
  }
  first_piece_.assign(tensors_.size() + 1, 0);
  for (const Piece& piece : pieces_) {
    ++first_piece_[piece.tensor + 1];
    total_bytes_ += piece.bytes;
  }
  for (std::size_t i = 1; i < first_piece_.size(); ++i) first_piece_[i] += first_piece_[i - 1];
  ready_ = TileSet(tiles_.tile_count());
}

void Contents::complete_piece(std::size_t index, std::vector<std::size_t>& complete) {
  ready_bytes_ += pieces_[index].bytes;
  complete.push_back(index);
}

void Contents::take_empty(std::vector<std::size_t>& complete) {
  for (std::size_t i = 0; i < pieces_.size(); ++i) {
    if (pieces_[i].tiles_missing == 0) complete_piece(i, complete);
  }
}

void Contents::mark_tile(TileIndex tile, TensorIndex tensor, std::vector<std::size_t>& complete) {
  if (ready_.test(tile)) return;
  ready_.set(tile);
  for (std::size_t i = first_piece_[tensor]; i < first_piece_[tensor + 1]; ++i) {
    Piece& piece = pieces_[i];
    // An empty piece.
    if (piece.tiles_missing == 0) continue;
    if (!piece.whole && !intersect(tiles_.tile_box(tile), piece.box())) continue;
    if (--piece.tiles_missing == 0) complete_piece(i, complete);
  }
}

Result<void> Contents::mark_ready(const TileRuns& runs, std::vector<std::size_t>& complete) {
  for (const auto& [begin, end] : runs) {
    if (begin >= end || end > tiles_.tile_count()) {
      return fail(ErrorCode::kInternal, "the agent says that tiles {} to {} are here, of {}", begin,
                  end, tiles_.tile_count());
    }
  }
  for (const auto& [begin, end] : runs) {
    TensorIndex tensor = tiles_.tensor_of(begin);
    for (TileIndex tile = begin; tile < end; ++tile) {
      while (tile >= tiles_.first_tile(tensor + 1)) ++tensor;
      mark_tile(tile, tensor, complete);
    }
  }
  return {};
}

void Contents::mark_all_ready(std::vector<std::size_t>& complete) {
  for (std::size_t i = 0; i < pieces_.size(); ++i) {
    if (pieces_[i].tiles_missing == 0) continue;
    pieces_[i].tiles_missing = 0;
    complete_piece(i, complete);
  }
}

void Contents::gather(const Piece& piece, const Box& part, std::vector<Gather>& out) const {
  std::vector<StridedCopy> copies;
  for (const LayoutEntry& entry : layout_.entries_of(piece.tensor)) {
    const auto common = intersect(part, entry.box);
    if (!common) continue;
    copies.clear();
    strided_copies(*common, entry.box, part, element_bytes(piece), copies);
    for (StridedCopy copy : copies) {
      copy.src_offset += entry.offset_bytes;
      out.push_back({entry.segment, copy});
    }
  }
}

void Contents::gather(const Piece& piece, std::span<const std::byte* const> segments,
                      std::byte* out) const {
  std::vector<Gather> all;
  gather(piece, piece.box(), all);
  for (const auto& [segment, copy] : all) {
    const std::byte* const from = segments[segment] + copy.src_offset;
    for (std::uint64_t i = 0; i < copy.count; ++i) {
      std::memcpy(out + copy.dst_offset + i * copy.dst_stride, from + i * copy.src_stride,
                  copy.run_bytes);
    }
  }
}

}  // namespace rekindle::bucket
