#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "src/base/result.h"

// Boxes: hyper-rectangles of tensors, in elements, row-major. Pure arithmetic. Sizes entering here
// were checked by Shape::check, so products of extents and element sizes cannot overflow 63 bits.
namespace rekindle {

inline constexpr std::size_t kMaxRank = 8;

// Extents or offsets of one tensor; rank 0 is a scalar (one element).
class Dims {
 public:
  Dims() = default;
  Dims(std::initializer_list<std::uint64_t> values);
  // Rank above kMaxRank is kInvalid.
  static Result<Dims> from(std::span<const std::uint64_t> values);
  static Dims zeros(std::size_t rank);

  std::size_t rank() const { return rank_; }
  std::uint64_t operator[](std::size_t i) const { return values_[i]; }
  std::uint64_t& operator[](std::size_t i) { return values_[i]; }
  std::span<const std::uint64_t> span() const { return {values_.data(), rank_}; }
  std::uint64_t product() const {  // 1 for rank 0
    std::uint64_t result = 1;
    for (const std::uint64_t value : span()) result *= value;
    return result;
  }
  std::string to_string() const;  // "[4096, 128]"
  auto operator<=>(const Dims&) const = default;

 private:
  std::array<std::uint64_t, kMaxRank> values_{};
  std::uint8_t rank_ = 0;
};

using Shape = Dims;

// Bytes of a tensor of this shape, or kInvalid when that does not fit in 63 bits.
Result<std::uint64_t> checked_size_bytes(const Shape& shape, std::uint64_t element_bytes);

struct Box {
  Dims offset;
  Dims extent;

  static Box whole(const Shape& shape) { return {Dims::zeros(shape.rank()), shape}; }
  std::size_t rank() const { return extent.rank(); }
  std::uint64_t elements() const { return extent.product(); }
  bool empty() const { return elements() == 0; }
  std::string to_string() const;  // "[0:512, 128:256]"
  auto operator<=>(const Box&) const = default;
};

// Whether a box is Box::whole(shape).
bool is_whole(const Box& box, const Shape& shape);
// Same rank, inside the shape, overflow-safe. For boxes that come from the wire or a file.
Result<void> check_box(const Box& box, const Shape& shape);
bool contains(const Box& outer, const Box& inner);         // an empty inner box is contained
std::optional<Box> intersect(const Box& a, const Box& b);  // nullopt when no element is shared
// The number of elements of intersect(a, b), without the box: much quicker.
std::uint64_t shared_elements(const Box& a, const Box& b);
// minuend without subtrahend, as at most 2 × rank disjoint boxes, in a fixed order.
void subtract(const Box& minuend, const Box& subtrahend, std::vector<Box>& out);

// `count` runs of `run_bytes`, `src_stride` and `dst_stride` bytes apart.
struct StridedCopy {
  std::uint64_t src_offset = 0;
  std::uint64_t dst_offset = 0;
  std::uint64_t run_bytes = 0;
  std::uint64_t count = 1;
  std::uint64_t src_stride = 0;  // 0 when count == 1
  std::uint64_t dst_stride = 0;

  std::uint64_t total_bytes() const { return run_bytes * count; }
  bool operator==(const StridedCopy&) const = default;
};

// How to move `region` from a row-major array that holds `src` to one that holds `dst` (both
// contain `region`; offsets are in bytes from each array's first element). Appends the fewest
// strided copies: contiguous dimensions are folded into the run, the innermost remaining one
// becomes the stride.
void strided_copies(const Box& region, const Box& src, const Box& dst, std::uint64_t element_bytes,
                    std::vector<StridedCopy>& out);

// Copies `region` from the array that holds the box `src` row-major to the one that holds `dst`.
// May run inside store::guard_mapping_access: it owns nothing while it copies.
void copy_box(const Box& region, std::span<const std::byte> from, const Box& src,
              std::span<std::byte> to, const Box& dst, std::uint64_t element_bytes);

}  // namespace rekindle
