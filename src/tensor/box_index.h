#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "src/tensor/box.h"

// Boxes of one tensor, found by their place, and cells where they overlap. Private to src/tensor.
namespace rekindle {

// Finds boxes near a box, without a look at all others if they are cut along one dimension. The
// boxes outlive the index.
class BoxIndex {
 public:
  struct Entry {
    const Box* box = nullptr;
    std::uint32_t owner = 0;  // of the user's choice
  };

  BoxIndex() = default;
  // None of the boxes is empty.
  explicit BoxIndex(std::vector<Entry> entries);

  // All, in the order of the index.
  std::span<const Entry> entries() const { return entries_; }
  // All entries that share an element with the box are among these.
  std::span<const Entry> near(const Box& box) const;
  // Two entries that share an element.
  std::optional<std::pair<Entry, Entry>> find_overlap() const;

 private:
  std::size_t axis_ = 0;  // the dimension with the most offsets
  // Sorted by offset in that dimension, then by box and owner.
  std::vector<Entry> entries_;
  // Per entry: the largest end in that dimension up to it.
  std::vector<std::uint64_t> max_end_;
};

// A box, and the owners of all boxes that contain it, ascending.
struct OwnedCell {
  Box box;
  std::vector<std::uint32_t> owners;
};
// Cuts the boxes at each other's borders, so that every cell lies in a box or beside it. Sorted by
// box. Stops when there are more than `max_cells`.
std::vector<OwnedCell> cut_into_cells(std::span<const BoxIndex::Entry> boxes,
                                      std::size_t max_cells);

}  // namespace rekindle
