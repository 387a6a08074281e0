#include "src/tensor/box.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include <fmt/format.h>

namespace rekindle {

Dims::Dims(std::initializer_list<std::uint64_t> values) {
  if (values.size() > kMaxRank) throw std::length_error("rank above kMaxRank");
  std::copy(values.begin(), values.end(), values_.begin());
  rank_ = static_cast<std::uint8_t>(values.size());
}

Result<Dims> Dims::from(std::span<const std::uint64_t> values) {
  if (values.size() > kMaxRank) {
    return fail(ErrorCode::kInvalid, "{} dimensions, the most supported is {}", values.size(),
                kMaxRank);
  }
  Dims dims;
  std::copy(values.begin(), values.end(), dims.values_.begin());
  dims.rank_ = static_cast<std::uint8_t>(values.size());
  return dims;
}

Dims Dims::zeros(std::size_t rank) {
  if (rank > kMaxRank) throw std::length_error("rank above kMaxRank");
  Dims dims;
  dims.rank_ = static_cast<std::uint8_t>(rank);
  return dims;
}

std::string Dims::to_string() const {
  return fmt::format("[{}]", fmt::join(values_.begin(), values_.begin() + rank_, ", "));
}

Result<std::uint64_t> checked_size_bytes(const Shape& shape, std::uint64_t element_bytes) {
  constexpr std::uint64_t kLimit = std::uint64_t{1} << 63;
  // An empty tensor may have any other extents in safetensors, but not ones whose product without
  // the zeros overflows: strides are made of them.
  std::uint64_t bytes = element_bytes;
  bool empty = element_bytes == 0;
  for (const std::uint64_t extent : shape.span()) {
    if (extent == 0) {
      empty = true;
      continue;
    }
    std::uint64_t more = 0;
    if (__builtin_mul_overflow(bytes, extent, &more) || more >= kLimit) {
      return fail(ErrorCode::kInvalid, "shape {} of {}-byte elements does not fit in 63 bits",
                  shape.to_string(), element_bytes);
    }
    bytes = more;
  }
  return empty ? 0 : bytes;
}

std::string Box::to_string() const {
  std::string text = "[";
  for (std::size_t i = 0; i < rank(); ++i) {
    text += fmt::format("{}{}:{}", i == 0 ? "" : ", ", offset[i], offset[i] + extent[i]);
  }
  return text + "]";
}

bool is_whole(const Box& box, const Shape& shape) {
  if (box.offset.rank() != shape.rank() || box.extent.rank() != shape.rank()) return false;
  for (std::size_t i = 0; i < shape.rank(); ++i) {
    if (box.offset[i] != 0 || box.extent[i] != shape[i]) return false;
  }
  return true;
}

Result<void> check_box(const Box& box, const Shape& shape) {
  if (box.offset.rank() != shape.rank() || box.extent.rank() != shape.rank()) {
    return fail(ErrorCode::kInvalid, "a box of rank {}:{} does not fit shape {}", box.offset.rank(),
                box.extent.rank(), shape.to_string());
  }
  for (std::size_t i = 0; i < shape.rank(); ++i) {
    if (box.offset[i] > shape[i] || box.extent[i] > shape[i] - box.offset[i]) {
      return fail(ErrorCode::kInvalid,
                  "box with offset {} and extent {} leaves shape {} in dimension {}",
                  box.offset.to_string(), box.extent.to_string(), shape.to_string(), i);
    }
  }
  return {};
}

bool contains(const Box& outer, const Box& inner) {
  if (outer.rank() != inner.rank()) return false;
  if (inner.empty()) return true;
  for (std::size_t i = 0; i < outer.rank(); ++i) {
    if (inner.offset[i] < outer.offset[i] ||
        inner.offset[i] + inner.extent[i] > outer.offset[i] + outer.extent[i]) {
      return false;
    }
  }
  return true;
}

std::optional<Box> intersect(const Box& a, const Box& b) {
  if (a.rank() != b.rank() || shared_elements(a, b) == 0) return std::nullopt;
  Box shared = Box::whole(a.extent);
  for (std::size_t i = 0; i < a.rank(); ++i) {
    shared.offset[i] = std::max(a.offset[i], b.offset[i]);
    shared.extent[i] =
        std::min(a.offset[i] + a.extent[i], b.offset[i] + b.extent[i]) - shared.offset[i];
  }
  return shared;
}

std::uint64_t shared_elements(const Box& a, const Box& b) {
  if (a.rank() != b.rank()) return 0;
  std::uint64_t elements = 1;
  for (std::size_t i = 0; i < a.rank(); ++i) {
    const std::uint64_t begin = std::max(a.offset[i], b.offset[i]);
    const std::uint64_t end = std::min(a.offset[i] + a.extent[i], b.offset[i] + b.extent[i]);
    if (begin >= end) return 0;
    elements *= end - begin;
  }
  return elements;
}

void subtract(const Box& minuend, const Box& subtrahend, std::vector<Box>& out) {
  if (minuend.empty()) return;
  const auto shared = intersect(minuend, subtrahend);
  if (!shared) {
    out.push_back(minuend);
    return;
  }
  Box rest = minuend;  // the part between the slabs that are cut off
  for (std::size_t i = 0; i < rest.rank(); ++i) {
    const std::uint64_t begin = rest.offset[i];
    const std::uint64_t end = begin + rest.extent[i];
    const std::uint64_t shared_end = shared->offset[i] + shared->extent[i];
    if (shared->offset[i] > begin) {
      out.push_back(rest);
      out.back().extent[i] = shared->offset[i] - begin;
    }
    if (shared_end < end) {
      out.push_back(rest);
      out.back().offset[i] = shared_end;
      out.back().extent[i] = end - shared_end;
    }
    rest.offset[i] = shared->offset[i];
    rest.extent[i] = shared->extent[i];
  }
}

namespace {

// One loop of a copy: `count` steps of these many bytes in each array.
struct Loop {
  std::uint64_t count;
  std::uint64_t src_stride;
  std::uint64_t dst_stride;
};

}  // namespace

void strided_copies(const Box& region, const Box& src, const Box& dst, std::uint64_t element_bytes,
                    std::vector<StridedCopy>& out) {
  if (region.empty()) return;
  // Loops from the innermost outward; a loop that continues the one inside it is folded into it.
  std::array<Loop, kMaxRank + 1> loops;
  std::size_t depth = 1;
  loops[0] = {element_bytes, 1, 1};
  std::uint64_t src_stride = element_bytes;
  std::uint64_t dst_stride = element_bytes;
  std::uint64_t src_offset = 0;
  std::uint64_t dst_offset = 0;
  for (std::size_t i = region.rank(); i-- > 0;) {
    src_offset += (region.offset[i] - src.offset[i]) * src_stride;
    dst_offset += (region.offset[i] - dst.offset[i]) * dst_stride;
    Loop& inner = loops[depth - 1];
    if (region.extent[i] > 1) {
      if (src_stride == inner.count * inner.src_stride &&
          dst_stride == inner.count * inner.dst_stride) {
        inner.count *= region.extent[i];
      } else {
        loops[depth++] = {region.extent[i], src_stride, dst_stride};
      }
    }
    src_stride *= src.extent[i];
    dst_stride *= dst.extent[i];
  }

  StridedCopy copy{src_offset, dst_offset, loops[0].count, 1, 0, 0};
  if (depth > 1) {
    copy.count = loops[1].count;
    copy.src_stride = loops[1].src_stride;
    copy.dst_stride = loops[1].dst_stride;
  }
  std::array<std::uint64_t, kMaxRank + 1> step{};
  while (true) {
    out.push_back(copy);
    std::size_t level = 2;
    for (; level < depth; ++level) {
      const Loop& loop = loops[level];
      copy.src_offset += loop.src_stride;
      copy.dst_offset += loop.dst_stride;
      if (++step[level] < loop.count) break;
      copy.src_offset -= loop.count * loop.src_stride;
      copy.dst_offset -= loop.count * loop.dst_stride;
      step[level] = 0;
    }
    if (level >= depth) return;
  }
}

void copy_box(const Box& region, std::span<const std::byte> from, const Box& src,
              std::span<std::byte> to, const Box& dst, std::uint64_t element_bytes) {
  thread_local std::vector<StridedCopy> copies;
  copies.clear();
  strided_copies(region, src, dst, element_bytes, copies);
  for (const StridedCopy& copy : copies) {
    for (std::uint64_t i = 0; i < copy.count; ++i) {
      std::memcpy(to.data() + copy.dst_offset + i * copy.dst_stride,
                  from.data() + copy.src_offset + i * copy.src_stride, copy.run_bytes);
    }
  }
}

}  // namespace rekindle
