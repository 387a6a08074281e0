#include "src/bucket/bucket_checks.h"

#include <cstring>

#include "src/base/blake3.h"

namespace rekindle::bucket {

namespace {

// The box of `count` elements that follow each other from element `first` of `box` on.
Box box_of_run(const Box& box, std::uint64_t first, std::uint64_t count) {
  Box run = box;
  std::uint64_t below = box.elements();  // elements of one index of the dimension before
  for (std::size_t i = 0; i < box.rank(); ++i) {
    const std::uint64_t row = below / box.extent[i];
    run.offset[i] = box.offset[i] + first / row;
    first %= row;
    run.extent[i] = count >= row ? count / row : 1;
    if (count >= row) {
      // All dimensions further in are whole.
      return run;
    }
    below = row;
  }
  return run;
}

// Copies of equal shape whose starts are equally far apart are planes of rows.
std::optional<BoxBytes> bytes_of(std::span<const StridedCopy> copies) {
  const StridedCopy& first = copies.front();
  BoxBytes bytes{.address = first.src_offset,
                 .run_bytes = static_cast<std::uint32_t>(first.run_bytes),
                 .rows = static_cast<std::uint32_t>(first.count),
                 .planes = static_cast<std::uint32_t>(copies.size()),
                 .row_stride = first.src_stride,
                 .plane_stride = copies.size() > 1 ? copies[1].src_offset - first.src_offset : 0};
  for (std::size_t i = 1; i < copies.size(); ++i) {
    const StridedCopy& copy = copies[i];
    const bool follows = copy.run_bytes == first.run_bytes && copy.count == first.count &&
                         copy.src_stride == first.src_stride &&
                         copy.src_offset == first.src_offset + i * bytes.plane_stride &&
                         copy.dst_offset == first.dst_offset + i * first.run_bytes * first.count;
    if (!follows) return std::nullopt;
  }
  return bytes;
}

class Checker {
 public:
  explicit Checker(const Contents& contents) : contents_(contents) {}

  void add(const Part& part) {
    if (part.bytes == 0) return;
    piece_index_ = part.piece;
    const Piece& piece = contents_.pieces()[part.piece];
    element_ = contents_.element_bytes(piece);
    at_ = part.at;
    part_ = box_of(contents_, part);
    const TileGrid& grid = contents_.tiles().grid(piece.tensor);
    const TileIndex first = contents_.tiles().first_tile(piece.tensor);
    touched_.clear();
    grid.tiles_of(part_, touched_);
    for (const std::uint64_t local : touched_) {
      const Box tile = grid.tile_box(local);
      if (contains(part_, tile)) {
        if (const auto bytes = place_of(tile)) {
          checks_.tiles.push_back({first + static_cast<TileIndex>(local), part.piece});
          tile_boxes_.push_back(*bytes);
          continue;
        }
      }
      add_rest(*intersect(part_, tile));
    }
  }

  BucketChecks take() {
    checks_.boxes = std::move(tile_boxes_);
    checks_.boxes.insert(checks_.boxes.end(), rest_boxes_.begin(), rest_boxes_.end());
    return std::move(checks_);
  }

 private:
  // Where it lies in the part; nullopt: with more strides than a box has.
  std::optional<BoxBytes> place_of(const Box& box) {
    copies_.clear();
    strided_copies(box, part_, box, element_, copies_);
    auto bytes = bytes_of(copies_);
    if (bytes) bytes->address += at_;
    return bytes;
  }

  void add_rest(const Box& box) {
    if (const auto bytes = place_of(box)) {
      checks_.rests.push_back({piece_index_, box});
      rest_boxes_.push_back(*bytes);
      return;
    }
    // Slices of the outermost dimension have a stride less.
    std::size_t outermost = 0;
    while (box.extent[outermost] == 1) ++outermost;
    Box slice = box;
    slice.extent[outermost] = 1;
    for (std::uint64_t i = 0; i < box.extent[outermost]; ++i) {
      slice.offset[outermost] = box.offset[outermost] + i;
      add_rest(slice);
    }
  }

  const Contents& contents_;
  BucketChecks checks_;
  std::vector<BoxBytes> tile_boxes_;
  std::vector<BoxBytes> rest_boxes_;
  // Of the part that is being added.
  std::uint32_t piece_index_ = 0;
  std::uint64_t element_ = 1;
  std::uint64_t at_ = 0;
  Box part_;
  std::vector<std::uint64_t> touched_;
  std::vector<StridedCopy> copies_;
};

}  // namespace

Box box_of(const Contents& contents, const Part& part) {
  const Piece& piece = contents.pieces()[part.piece];
  const std::uint64_t element = contents.element_bytes(piece);
  return box_of_run(piece.box(), part.offset_bytes / element, part.bytes / element);
}

BucketChecks checks_of(const Contents& contents, std::span<const Part> parts) {
  Checker checker(contents);
  for (const Part& part : parts) checker.add(part);
  return checker.take();
}

Digest digest_of_rest(const Contents& contents, const BucketChecks::Rest& rest,
                      std::span<const std::byte* const> segments) {
  const Piece& piece = contents.pieces()[rest.piece];
  std::vector<Contents::Gather> copies;
  contents.gather(piece, rest.box, copies);
  std::vector<std::byte> bytes(rest.box.elements() * contents.element_bytes(piece));
  for (const auto& [segment, copy] : copies) {
    const std::byte* const from = segments[segment] + copy.src_offset;
    for (std::uint64_t i = 0; i < copy.count; ++i) {
      std::memcpy(bytes.data() + copy.dst_offset + i * copy.dst_stride, from + i * copy.src_stride,
                  copy.run_bytes);
    }
  }
  return blake3(bytes);
}

std::vector<Digest> digests_of_rests(const Contents& contents, const BucketChecks& checks,
                                     std::span<const std::byte* const> segments) {
  std::vector<Digest> digests;
  digests.reserve(checks.rests.size());
  for (const auto& rest : checks.rests) digests.push_back(digest_of_rest(contents, rest, segments));
  return digests;
}

std::optional<std::size_t> wrong_tile(const BucketChecks& checks, std::span<const Digest> values,
                                      std::span<const Digest> leaves) {
  for (std::size_t i = 0; i < checks.tiles.size(); ++i) {
    if (values[i] != leaves[checks.tiles[i].tile]) return i;
  }
  return std::nullopt;
}

}  // namespace rekindle::bucket
