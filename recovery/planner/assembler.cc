#include "recovery/planner/assembler.h"

#include <algorithm>
#include <optional>

namespace rekindle::planner {

namespace {

constexpr std::size_t kMaxOpenSlices = 32;

}  // namespace

std::optional<Box> joined(const Box& a, const Box& b) {
  std::optional<std::size_t> along;
  for (std::size_t i = 0; i < a.rank(); ++i) {
    if (a.offset[i] == b.offset[i] && a.extent[i] == b.extent[i]) continue;
    if (along || a.offset[i] + a.extent[i] != b.offset[i]) return std::nullopt;
    along = i;
  }
  if (!along) return std::nullopt;
  Box both = a;
  both.extent[*along] += b.extent[*along];
  return both;
}

void cut_box(const Box& box, std::uint64_t element_bytes, std::uint64_t max_bytes,
             std::vector<Box>& out) {
  const std::uint64_t bytes = box.elements() * element_bytes;
  if (bytes <= max_bytes) {
    out.push_back(box);
    return;
  }
  std::size_t axis = 0;
  while (box.extent[axis] == 1) ++axis;
  const std::uint64_t parts =
      std::min(box.extent[axis], bytes / max_bytes + (bytes % max_bytes != 0));
  std::uint64_t done = 0;
  for (std::uint64_t part = 0; part < parts; ++part) {
    const std::uint64_t step = box.extent[axis] / parts + (part < box.extent[axis] % parts);
    Box piece = box;
    piece.offset[axis] += done;
    piece.extent[axis] = step;
    done += step;
    // After rounding up, or with one index that is too large by itself, the rest may be too large.
    cut_box(piece, element_bytes, max_bytes, out);
  }
}

void Assembler::make_room(std::uint64_t bytes) {
  if (bucket_used_ > 0 && bucket_used_ + bytes > bucket_bytes_) close_bucket();
  bucket_used_ += bytes;
}

void Assembler::add(SliceKind kind, SourceMask sources, std::span<const Piece> pieces,
                    std::uint64_t bytes) {
  make_room(bytes);
  const std::size_t oldest = slices_.size() > kMaxOpenSlices ? slices_.size() - kMaxOpenSlices : 0;
  Open* target = nullptr;
  for (std::size_t i = slices_.size(); i-- > oldest;) {
    Open& open = slices_[i];
    if (open.full || open.kind != kind || open.sources != sources) continue;
    if (bytes > slice_bytes_ - std::min(open.bytes, slice_bytes_)) {
      open.full = true;
      continue;
    }
    target = &open;
    break;
  }
  if (target == nullptr) {
    target = &slices_.emplace_back(Open{kind, sources, 0, {}, -1, false});
  }
  target->bytes += bytes;
  for (const Piece& piece : pieces) {
    if (!target->pieces.empty()) {
      Piece& last = target->pieces.back();
      if (last.tensor == piece.tensor && last.entry == piece.entry) {
        if (const auto both = joined(last.region, piece.region)) {
          last.region = *both;
          continue;
        }
      }
    }
    target->pieces.push_back(piece);
  }
}

void Assembler::add_group(SliceKind kind, std::span<const Part> parts, std::vector<Piece> blocks,
                          std::uint64_t element_bytes) {
  std::uint64_t total = 0;
  for (const Part& part : parts) total += part.piece.region.elements() * element_bytes;
  make_room(total);
  if (total > slice_bytes_) {
    return add_large_group(kind, parts, std::move(blocks), element_bytes);
  }
  std::vector<SourceMask> masks;
  for (const Part& part : parts) masks.push_back(part.sources);
  std::sort(masks.begin(), masks.end());
  masks.erase(std::unique(masks.begin(), masks.end()), masks.end());

  OpenGroup& group = open_group(kind, std::move(masks), total);
  group.bytes += total;
  for (const Part& part : parts) {
    const auto at = std::lower_bound(group.sources.begin(), group.sources.end(), part.sources);
    Open& slice = slices_[group.first_slice + static_cast<std::size_t>(at - group.sources.begin())];
    slice.bytes += part.piece.region.elements() * element_bytes;
    slice.pieces.push_back(part.piece);
  }
  std::vector<Piece>& all = groups_[group.group].blocks;
  all.insert(all.end(), blocks.begin(), blocks.end());
}

// An open slice with room for `bytes` more, or a new one.
Assembler::OpenGroup& Assembler::open_group(SliceKind kind, std::vector<SourceMask> sources,
                                            std::uint64_t bytes) {
  const std::size_t oldest =
      open_groups_.size() > kMaxOpenSlices ? open_groups_.size() - kMaxOpenSlices : 0;
  for (std::size_t i = open_groups_.size(); i-- > oldest;) {
    OpenGroup& group = open_groups_[i];
    if (group.kind == kind && bytes <= slice_bytes_ - group.bytes && group.sources == sources) {
      return group;
    }
  }
  const auto number = static_cast<std::int64_t>(groups_.size());
  OpenGroup group{kind, std::move(sources), 0, groups_.size(), slices_.size()};
  groups_.emplace_back();
  for (const SourceMask& mask : group.sources) {
    slices_.push_back(Open{kind, mask, 0, {}, number, true});
  }
  return open_groups_.emplace_back(std::move(group));
}

void Assembler::add_large_group(SliceKind kind, std::span<const Part> parts,
                                std::vector<Piece> blocks, std::uint64_t element_bytes) {
  const auto number = static_cast<std::int64_t>(groups_.size());
  groups_.push_back(Group{0, 0, std::move(blocks)});
  const std::size_t begin = slices_.size();
  std::vector<Box> cuts;
  for (const Part& part : parts) {
    cuts.clear();
    cut_box(part.piece.region, element_bytes, slice_bytes_, cuts);
    for (const Box& cut : cuts) {
      const std::uint64_t bytes = cut.elements() * element_bytes;
      if (slices_.size() == begin || slices_.back().sources != part.sources ||
          slices_.back().bytes + bytes > slice_bytes_) {
        slices_.push_back(Open{kind, part.sources, 0, {}, number, true});
      }
      slices_.back().bytes += bytes;
      slices_.back().pieces.push_back({cut, part.piece.tensor, part.piece.entry});
    }
  }
}

void Assembler::close_bucket() {
  if (slices_.empty()) return;
  const auto first_group = static_cast<std::uint32_t>(plan_.groups.size());
  std::size_t count = 0;
  for (const Open& open : slices_) count += open.pieces.size();
  std::vector<Piece>& pieces = plan_.pieces.emplace_back();
  pieces.reserve(count);
  for (Open& open : slices_) {
    Slice slice;
    slice.bytes = open.bytes;
    slice.sources = open.sources;
    slice.first_piece = static_cast<std::uint32_t>(pieces.size());
    slice.piece_count = static_cast<std::uint32_t>(open.pieces.size());
    slice.bucket = plan_.buckets;
    slice.kind = open.kind;
    if (open.group >= 0) {
      slice.group = first_group + static_cast<std::uint32_t>(open.group);
      Group& group = groups_[static_cast<std::size_t>(open.group)];
      if (group.count++ == 0) group.first = static_cast<SliceIndex>(plan_.slices.size());
    }
    plan_.total_wire_bytes += open.bytes;
    pieces.insert(pieces.end(), open.pieces.begin(), open.pieces.end());
    plan_.slices.push_back(slice);
  }
  for (Group& group : groups_) {
    group.blocks.shrink_to_fit();
    plan_.groups.push_back(std::move(group));
  }
  ++plan_.buckets;
  slices_.clear();
  groups_.clear();
  open_groups_.clear();
  bucket_used_ = 0;
}

}  // namespace rekindle::planner
