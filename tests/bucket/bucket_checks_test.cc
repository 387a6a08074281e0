// Which boxes of a bucket are compared, against a walk over every element.
#include "src/bucket/bucket_checks.h"

#include <algorithm>
#include <cstring>

#include <gtest/gtest.h>

#include "src/base/blake3.h"
#include "src/bucket/device.h"
#include "tests/bucket/sample.h"

namespace rekindle::bucket {
namespace {

using testing::random_boxes;
using testing::random_sample;
using testing::Sample;
using testing::sample_of;

// The row-major bytes of `box`, out of those of `held`, element by element.
std::string bytes_of_box(const std::string& held_bytes, const Box& held, const Box& box,
                         std::uint64_t element) {
  std::string out;
  for (std::uint64_t e = 0; e < box.elements(); ++e) {
    std::uint64_t rest = e;
    std::uint64_t index = 0;
    std::uint64_t stride = 1;
    for (std::size_t d = box.rank(); d-- > 0;) {
      const std::uint64_t at = box.offset[d] + rest % box.extent[d];
      rest /= box.extent[d];
      index += (at - held.offset[d]) * stride;
      stride *= held.extent[d];
    }
    out += held_bytes.substr(index * element, element);
  }
  return out;
}

// The bytes of a box, and how often each byte of the bucket is in one.
std::string read_box(const std::string& bucket, const BoxBytes& box, std::vector<int>& seen) {
  std::string out;
  for (std::uint32_t plane = 0; plane < box.planes; ++plane) {
    for (std::uint32_t row = 0; row < box.rows; ++row) {
      const std::uint64_t from = box.address + plane * box.plane_stride + row * box.row_stride;
      out += bucket.substr(from, box.run_bytes);
      for (std::uint32_t i = 0; i < box.run_bytes; ++i) ++seen[from + i];
    }
  }
  return out;
}

// Counts of what was compared.
struct Compared {
  std::size_t tiles = 0;
  std::size_t rests = 0;
};
Compared compare(const Sample& sample, const Contents& contents, const Plan& plan) {
  Compared compared;
  std::vector<const std::byte*> segments;
  for (const auto& segment : sample.segments) {
    segments.push_back(reinterpret_cast<const std::byte*>(segment.data()));
  }
  std::vector<std::string> pieces;
  for (const Piece& piece : contents.pieces()) pieces.push_back(sample.bytes_of(contents, piece));
  for (std::size_t bucket = 0; bucket < plan.size(); ++bucket) {
    std::string memory(plan.bytes(bucket), '\0');
    std::vector<int> wanted(memory.size());
    for (const Part& part : plan.parts(bucket)) {
      memory.replace(part.at, part.bytes, pieces[part.piece], part.offset_bytes, part.bytes);
      std::fill_n(wanted.begin() + static_cast<std::ptrdiff_t>(part.at), part.bytes, 1);
    }
    const BucketChecks checks = checks_of(contents, plan.parts(bucket));
    EXPECT_EQ(checks.boxes.size(), checks.tiles.size() + checks.rests.size());
    std::vector<int> seen(memory.size());
    for (std::size_t i = 0; i < checks.boxes.size(); ++i) {
      const Piece& piece = contents.pieces()[checks.piece_of(i)];
      const bool is_tile = i < checks.tiles.size();
      const Box box = is_tile ? contents.tiles().tile_box(checks.tiles[i].tile)
                              : checks.rests[i - checks.tiles.size()].box;
      const std::string expected =
          bytes_of_box(pieces[checks.piece_of(i)], piece.box(), box, contents.element_bytes(piece));
      EXPECT_LE(expected.size(), kMostDigestedBytes);
      EXPECT_EQ(read_box(memory, checks.boxes[i], seen), expected) << piece.name();
      if (is_tile) continue;
      EXPECT_EQ(digest_of_rest(contents, checks.rests[i - checks.tiles.size()], segments),
                blake3(as_bytes(expected)));
    }
    EXPECT_EQ(seen, wanted) << "each byte of the parts is compared once";
    compared.tiles += checks.tiles.size();
    compared.rests += checks.rests.size();
  }
  return compared;
}

TEST(BucketChecks, B7EveryByteOfEveryPartIsComparedOnce) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  Compared all;
  for (int turn = 0; turn < 16; ++turn) {
    const Sample sample = random_sample(random);
    const Contents contents = sample.contents(turn % 2 == 0 ? std::vector<NamedBox>()
                                                            : random_boxes(random, sample.tensors));
    const auto plan = Plan::create(contents, kPartAlignment + random() % 400'000);
    ASSERT_TRUE(plan);
    const Compared compared = compare(sample, contents, *plan);
    all.tiles += compared.tiles;
    all.rests += compared.rests;
  }
  EXPECT_GT(all.tiles, 0u);
  EXPECT_GT(all.rests, 0u);
}

TEST(BucketChecks, B7PartsOfTilesOfFourDimensionsAreCompared) {
  const Sample sample = sample_of({{"w", DType::kF32, {4, 5, 3, 512}}}, 3);
  const Contents contents = sample.contents({{"w", {1, 1, 1, 8}, {3, 3, 2, 480}}});
  const auto plan = Plan::create(contents, 1 << 20);
  ASSERT_TRUE(plan);
  EXPECT_GT(compare(sample, contents, *plan).rests, 0u);
}

TEST(BucketChecks, B7ALargeTensorIsCutBetweenItsTiles) {
  const Sample sample = sample_of({{"w", DType::kU8, {700, 65'536}}}, 4);
  const Contents contents = sample.contents();
  // A bucket has room for 2.05 rows of tiles.
  const std::uint64_t rows = contents.tiles().grid(0).tile_extent()[0];
  ASSERT_LT(2 * rows, 700u);
  const auto plan = Plan::create(contents, (2 * rows + rows / 20) * 65'536);
  ASSERT_TRUE(plan);
  for (std::size_t bucket = 0; bucket < plan->size(); ++bucket) {
    EXPECT_TRUE(checks_of(contents, plan->parts(bucket)).rests.empty());
  }
}

}  // namespace
}  // namespace rekindle::bucket
