#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "src/base/digest.h"
#include "src/base/unique_fd.h"
#include "src/bucket/contents.h"

// Checkpoints for the tests of buckets: their layouts, and segments with random bytes.
namespace rekindle::bucket::testing {

struct Sample {
  TensorSet tensors;
  Layout layout;
  std::vector<std::uint64_t> segment_bytes;
  std::vector<std::string> segments;  // their bytes

  Contents contents(const std::vector<NamedBox>& wanted = {}) const;
  // The row-major bytes of a piece, as they must arrive.
  std::string bytes_of(const Contents& contents, const Piece& piece) const;
  // Of all tiles, as a publisher makes them.
  std::vector<Digest> leaves() const;
  std::vector<UniqueFd> files() const;  // each segment as a file, open for reading and writing
};

// Whole tensors, packed as a pull packs them.
Sample sample_of(std::vector<TensorInfo> tensors, std::uint64_t seed,
                 std::uint64_t most_segment_bytes = std::uint64_t{1} << 30);
// A few tensors of all kinds: odd sizes, every rank up to 4, empty ones, a scalar.
Sample random_sample(std::mt19937_64& random);
std::vector<NamedBox> random_boxes(std::mt19937_64& random, const TensorSet& tensors);

}  // namespace rekindle::bucket::testing
