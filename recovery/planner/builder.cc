#include "recovery/planner/builder.h"

#include <algorithm>

#include "src/tensor/tile_proof.h"

namespace rekindle::planner {

namespace {

// Only the index of the last dimension varies, so a run of the box is contiguous in its tensor.
bool is_one_row(const Box& box) {
  for (std::size_t i = 0; i + 1 < box.rank(); ++i) {
    if (box.extent[i] > 1) return false;
  }
  return true;
}

// `next` continues `block` along the last dimension.
bool continues(const Box& block, const Box& next) {
  if (block.rank() == 0) return false;
  const std::size_t last = block.rank() - 1;
  for (std::size_t i = 0; i < last; ++i) {
    if (block.offset[i] != next.offset[i]) return false;
  }
  return block.offset[last] + block.extent[last] == next.offset[last];
}

}  // namespace

Builder::Builder(const PlanRequest& request, PlanTable& plan)
    : request_(request),
      plan_(plan),
      options_(plan.options),
      holders_(request.sources),
      assembler_(plan, options_.slice_bytes, options_.bucket_bytes) {}

void Builder::run() {
  const auto count = static_cast<TensorIndex>(request_.checkpoint->tensors.size());
  for (TensorIndex tensor = 0; tensor < count; ++tensor) plan_tensor(tensor);
  assembler_.finish();
  coalesce(plan_.missing_boxes);
}

const Box& Builder::entry_box(std::uint32_t entry) const {
  return request_.destination->entries()[entry].box;
}

void Builder::collect_touches(std::uint32_t first_entry, std::uint32_t last_entry) {
  touches_.clear();
  const TileIndex base = request_.checkpoint->tiles.first_tile(tensor_);
  for (std::uint32_t entry = first_entry; entry < last_entry; ++entry) {
    const Box& box = entry_box(entry);
    if (box.empty()) continue;
    scratch_tiles_.clear();
    grid_->tiles_of(box, scratch_tiles_);
    for (const std::uint64_t tile : scratch_tiles_) {
      if (request_.have != nullptr && request_.have->test(base + static_cast<TileIndex>(tile))) {
        continue;
      }
      Touch& touch = touches_.emplace_back();
      touch.tile = tile;
      touch.entry = entry;
      touch.box = grid_->tile_box(tile);
      touch.whole = contains(box, touch.box);
    }
  }
  if (last_entry - first_entry > 1) {
    std::sort(touches_.begin(), touches_.end(), [](const Touch& a, const Touch& b) {
      return a.tile != b.tile ? a.tile < b.tile : a.entry < b.entry;
    });
  }
}

// True when whole tiles would more than double the bytes of this tensor. Adds up the wanted bytes.
bool Builder::reads_parts_alone() const {
  std::uint64_t fetched = 0;
  std::uint64_t wanted = 0;
  std::uint64_t previous = grid_->tile_count();
  for (const Touch& touch : touches_) {
    const std::uint64_t tile_elements = touch.box.elements();
    if (touch.tile != previous) fetched += tile_elements;
    previous = touch.tile;
    wanted +=
        touch.whole ? tile_elements : intersect(touch.box, entry_box(touch.entry))->elements();
  }
  plan_.total_wanted_bytes += wanted * element_bytes_;
  if (is_small()) return false;
  return static_cast<double>(fetched) > options_.max_partial_overhead * static_cast<double>(wanted);
}

bool Builder::is_small() const {
  return grid_->tile_extent().product() * element_bytes_ <= options_.small_tile_bytes;
}

SliceKind Builder::kind_of(std::span<const Touch> touches_of_one_tile, bool parts_alone) const {
  if (touches_of_one_tile.front().whole) return SliceKind::kDirect;
  const auto provable = [this](const Touch& touch) {
    return is_one_run(*intersect(touch.box, entry_box(touch.entry)), touch.box);
  };
  return parts_alone && std::ranges::all_of(touches_of_one_tile, provable) ? SliceKind::kRange
                                                                           : SliceKind::kStaged;
}

void Builder::plan_tensor(TensorIndex tensor) {
  const std::span<const LayoutEntry> wanted = request_.destination->entries_of(tensor);
  if (wanted.empty()) return;
  const TileMap& map = request_.checkpoint->tiles;
  tensor_ = tensor;
  grid_ = &map.grid(tensor);
  element_bytes_ = dtype_size_bytes(request_.checkpoint->tensors[tensor].dtype);
  const auto first =
      static_cast<std::uint32_t>(&wanted.front() - request_.destination->entries().data());
  collect_touches(first, first + static_cast<std::uint32_t>(wanted.size()));
  if (touches_.empty()) return;
  holders_.select(tensor, map.first_tile(tensor), map.first_tile(tensor + 1), element_bytes_);

  const bool parts_alone = reads_parts_alone();
  const auto end_of_tile = [&](std::size_t at) {
    std::size_t end = at + 1;
    while (end < touches_.size() && touches_[end].tile == touches_[at].tile) ++end;
    return end;
  };
  const auto kind_at = [&](std::size_t begin, std::size_t end) {
    return kind_of(std::span(touches_).subspan(begin, end - begin), parts_alone);
  };
  for (std::size_t i = 0; i < touches_.size();) {
    std::size_t end = end_of_tile(i);
    Run run{kind_at(i, end), touches_[i].tile, touches_[i].tile + 1, touches_[i].box, {}, false};
    run.shared = end - i > 1;
    while (!run.shared && end < touches_.size()) {
      const Touch& next = touches_[end];
      const std::size_t next_end = end_of_tile(end);
      if (next_end - end > 1 || next.tile != run.last || next.entry != touches_[i].entry ||
          kind_at(end, next_end) != run.kind || !continues(run.block, next.box)) {
        break;
      }
      run.block.extent[run.block.rank() - 1] += next.box.extent[run.block.rank() - 1];
      ++run.last;
      ++end;
    }
    run.touches = std::span(touches_).subspan(i, end - i);
    plan_run(run);
    i = end;
  }
}

Builder::Run Builder::sub_run(const Run& run, std::uint64_t first, std::uint64_t last) const {
  if (run.shared) return run;
  Run part = run;
  part.first = first;
  part.last = last;
  part.touches = run.touches.subspan(first - run.first, last - first);
  part.block = part.touches.front().box;
  for (const Touch& touch : part.touches.subspan(1)) {
    part.block.extent[part.block.rank() - 1] += touch.box.extent[part.block.rank() - 1];
  }
  return part;
}

void Builder::regions_of(const Run& run, std::vector<Piece>& out) const {
  out.clear();
  if (run.kind != SliceKind::kRange) {
    out.push_back({run.block, tensor_, run.touches.front().entry});
    return;
  }
  if (!run.shared) {
    const std::uint32_t entry = run.touches.front().entry;
    out.push_back({*intersect(run.block, entry_box(entry)), tensor_, entry});
    return;
  }
  for (const Touch& touch : run.touches) {
    out.push_back({*intersect(run.block, entry_box(touch.entry)), tensor_, touch.entry});
  }
}

SourceMask Builder::sources_of(const Run& run, bool& uniform) {
  if (run.kind != SliceKind::kRange) {
    return holders_.covering(run.block, run.first, run.last, uniform);
  }
  std::optional<SourceMask> all;
  for (const Touch& touch : run.touches) {
    const Box part = *intersect(touch.box, entry_box(touch.entry));
    const SourceMask sources = holders_.proving(part, {touch.tile, touch.box}, uniform);
    if (all && sources != *all) uniform = false;
    all = all ? *all & sources : sources;
  }
  return *all;
}

void Builder::plan_run(const Run& run) {
  if (!holders_.any_overlap(run.block)) return add_missing(run.block);
  const bool one_tile = run.last - run.first == 1;
  bool uniform = true;
  const SourceMask sources = sources_of(run, uniform);
  if (!sources.empty() && (one_tile || uniform)) {
    plan_covered(run, sources);
  } else if (one_tile) {
    plan_assembled(run);
  } else {
    plan_each_tile(run);
  }
}

// Splits the run where the set of sources changes.
void Builder::plan_each_tile(const Run& run) {
  std::uint64_t begin = run.first;
  std::optional<SourceMask> sources;
  const auto emit = [&](std::uint64_t end) {
    const Run part = sub_run(run, begin, end);
    if (!sources->empty()) {
      plan_covered(part, *sources);
    } else {
      plan_assembled(part);
    }
    begin = end;
  };
  for (std::uint64_t tile = run.first; tile < run.last; ++tile) {
    bool uniform = true;
    const SourceMask of_tile = sources_of(sub_run(run, tile, tile + 1), uniform);
    if (sources && of_tile != *sources) emit(tile);
    sources = of_tile;
  }
  emit(run.last);
}

void Builder::plan_covered(const Run& run, SourceMask sources) {
  regions_of(run, scratch_pieces_);
  std::uint64_t bytes = 0;
  for (const Piece& piece : scratch_pieces_) bytes += piece.region.elements() * element_bytes_;
  if (bytes <= options_.slice_bytes) {
    assembler_.add(run.kind, sources, scratch_pieces_, bytes);
  } else if (run.kind != SliceKind::kDirect || is_one_row(run.block)) {
    plan_chunks(run, sources, options_.slice_bytes);
  } else if (bytes > options_.bucket_bytes) {
    plan_chunks(run, sources, options_.bucket_bytes);
  } else {
    // A row of tiles wider than a slice: bands of rows stay contiguous, columns of tiles would not.
    const Piece block = scratch_pieces_.front();
    const Assembler::Part part{block, sources};
    assembler_.add_group(run.kind, std::span(&part, 1), {block}, element_bytes_);
  }
}

// As many tiles at a time as fit in `chunk_bytes`; a single tile always does.
void Builder::plan_chunks(const Run& run, SourceMask sources, std::uint64_t chunk_bytes) {
  std::uint64_t begin = run.first;
  std::uint64_t used = 0;
  for (std::uint64_t tile = run.first; tile < run.last; ++tile) {
    regions_of(sub_run(run, tile, tile + 1), scratch_regions_);
    const std::uint64_t tile_bytes = scratch_regions_.front().region.elements() * element_bytes_;
    if (used + tile_bytes > chunk_bytes) {
      plan_covered(sub_run(run, begin, tile), sources);
      begin = tile;
      used = 0;
    }
    used += tile_bytes;
  }
  plan_covered(sub_run(run, begin, run.last), sources);
}

// The wanted parts of one tile, cut by the sources that can prove them. False: nobody can prove
// some of that.
bool Builder::find_provable_parts(const Run& tile, std::vector<ProvablePart>& parts) const {
  parts.clear();
  std::vector<Holders::Cell> cells;
  for (const Touch& touch : tile.touches) {
    const Box part = *intersect(touch.box, entry_box(touch.entry));
    if (!is_one_run(part, touch.box)) return false;
    cells.clear();
    if (!holders_.decompose_provable(part, {touch.tile, touch.box}, cells)) return false;
    for (const Holders::Cell& cell : cells) parts.push_back({touch.entry, cell});
  }
  return true;
}

// False: nobody can prove the parts of the first tile, and nothing was planned.
bool Builder::plan_provable_parts(const Run& run) {
  std::vector<ProvablePart> parts;
  if (!find_provable_parts(sub_run(run, run.first, run.first + 1), parts)) return false;
  if (run.last - run.first > 1) {
    for (std::uint64_t tile = run.first; tile < run.last; ++tile) {
      plan_assembled(sub_run(run, tile, tile + 1));
    }
    return true;
  }
  for (const auto& [entry, cell] : parts) {
    const Piece piece{cell.box, tensor_, entry};
    assembler_.add(SliceKind::kRange, cell.sources, std::span(&piece, 1),
                   cell.box.elements() * element_bytes_);
  }
  return true;
}

// No single source will do. Parts that sources can prove are read alone. Otherwise the run is put
// together from several sources, in slices of one group, and parts are staged with the rest of
// their tiles.
void Builder::plan_assembled(const Run& run) {
  const bool small = is_small();
  if (run.kind != SliceKind::kDirect && !small && plan_provable_parts(run)) return;
  if (run.kind == SliceKind::kRange) {
    Run staged = run;
    staged.kind = SliceKind::kStaged;
    return plan_assembled(staged);
  }
  if (run.kind == SliceKind::kStaged && run.last - run.first > 1 &&
      run.block.elements() * element_bytes_ > options_.slice_bytes) {
    // A group has one staging memory. Keep it small.
    const std::uint64_t middle = run.first + (run.last - run.first) / 2;
    plan_assembled(sub_run(run, run.first, middle));
    plan_assembled(sub_run(run, middle, run.last));
    return;
  }
  const Piece block{run.block, tensor_, run.touches.front().entry};
  std::vector<Assembler::Part> parts;
  std::vector<Box> leftover;
  std::vector<Holders::Cell> cells;
  holders_.decompose(block.region, run.first, run.last, cells, leftover);
  for (const Holders::Cell& cell : cells) {
    parts.push_back({{cell.box, tensor_, block.entry}, cell.sources});
  }
  if (leftover.empty()) {
    assembler_.add_group(run.kind, parts, {block}, element_bytes_);
  } else if (run.last - run.first > 1) {
    for (std::uint64_t tile = run.first; tile < run.last; ++tile) {
      plan_assembled(sub_run(run, tile, tile + 1));
    }
  } else if (run.kind == SliceKind::kDirect || !small || !plan_provable_parts(run)) {
    for (const Box& box : leftover) add_missing(box);
  }
}

void Builder::add_missing(const Box& box) { plan_.missing_boxes.push_back({tensor_, box}); }

}  // namespace rekindle::planner
