#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "src/tensor/layout.h"
#include "src/tensor/tile.h"

// Random shapes, boxes and bytes for property tests. Every test that uses them prints its seed.
namespace rekindle::test {

using Rng = std::mt19937_64;

inline std::uint64_t below(Rng& rng, std::uint64_t limit) { return rng() % limit; }

inline Shape random_shape(Rng& rng, std::size_t max_rank, std::uint64_t max_extent) {
  Shape shape = Dims::zeros(below(rng, max_rank + 1));
  for (std::size_t i = 0; i < shape.rank(); ++i) shape[i] = 1 + below(rng, max_extent);
  return shape;
}

// A box inside the shape, never empty.
inline Box random_box(Rng& rng, const Shape& shape) {
  Box box = Box::whole(shape);
  for (std::size_t i = 0; i < shape.rank(); ++i) {
    box.offset[i] = below(rng, shape[i]);
    box.extent[i] = 1 + below(rng, shape[i] - box.offset[i]);
  }
  return box;
}

inline std::vector<std::byte> random_bytes(Rng& rng, std::size_t size) {
  std::vector<std::byte> bytes(size);
  for (std::size_t i = 0; i < size; i += 8) {
    const std::uint64_t value = rng();
    std::memcpy(bytes.data() + i, &value, std::min<std::size_t>(8, size - i));
  }
  return bytes;
}

// Calls f(coordinates) for each element of the box in row-major order.
template <typename F>
void for_each_element(const Box& box, F&& f) {
  if (box.empty()) return;
  Dims at = box.offset;
  while (true) {
    f(at);
    std::size_t i = box.rank();
    while (i > 0) {
      --i;
      if (++at[i] < box.offset[i] + box.extent[i]) break;
      at[i] = box.offset[i];
      if (i == 0) return;
    }
    if (box.rank() == 0) return;
  }
}

// Index of an element in a row-major array that holds `held`.
inline std::uint64_t index_in(const Box& held, const Dims& at) {
  std::uint64_t index = 0;
  for (std::size_t i = 0; i < held.rank(); ++i) {
    index = index * held.extent[i] + (at[i] - held.offset[i]);
  }
  return index;
}

// The bytes of `box`, packed row-major, taken from an array that holds `held`, element by element.
inline std::vector<std::byte> naive_extract(const Box& box, const Box& held,
                                            std::span<const std::byte> array,
                                            std::uint64_t element_bytes) {
  std::vector<std::byte> result;
  for_each_element(box, [&](const Dims& at) {
    const auto element = array.subspan(index_in(held, at) * element_bytes, element_bytes);
    result.insert(result.end(), element.begin(), element.end());
  });
  return result;
}

}  // namespace rekindle::test
