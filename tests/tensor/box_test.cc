#include "src/tensor/box.h"

#include <map>
#include <set>

#include <gtest/gtest.h>

#include "tests/tensor/random_tensors.h"

namespace rekindle {
namespace {

using test::index_in;
using test::Rng;

constexpr std::uint64_t kMax = ~std::uint64_t{0};

TEST(DimsTest, RankAboveTheLimitIsInvalid) {
  EXPECT_TRUE(Dims::from(std::vector<std::uint64_t>(8, 1)));
  const auto nine = Dims::from(std::vector<std::uint64_t>(9, 1));
  ASSERT_FALSE(nine);
  EXPECT_EQ(nine.error().code(), ErrorCode::kInvalid);
}

TEST(DimsTest, ScalarHasOneElement) {
  EXPECT_EQ(Shape{}.product(), 1u);
  EXPECT_EQ(Box::whole({}).elements(), 1u);
  EXPECT_EQ((Shape{4096, 128}).to_string(), "[4096, 128]");
  EXPECT_EQ((Box{{0, 128}, {512, 128}}).to_string(), "[0:512, 128:256]");
}

TEST(CheckedSizeTest, SizesUpTo63BitsPassAndLargerOnesDoNot) {
  EXPECT_EQ(checked_size_bytes({std::uint64_t{1} << 60}, 4).value(), std::uint64_t{1} << 62);
  EXPECT_EQ(checked_size_bytes({(std::uint64_t{1} << 63) - 1}, 1).value(),
            (std::uint64_t{1} << 63) - 1);
  EXPECT_FALSE(checked_size_bytes({std::uint64_t{1} << 63}, 1));
  EXPECT_FALSE(checked_size_bytes({std::uint64_t{1} << 60}, 8));
  EXPECT_FALSE(checked_size_bytes({kMax, kMax, kMax}, 8));
  EXPECT_FALSE(checked_size_bytes({std::uint64_t{1} << 32, std::uint64_t{1} << 32}, 1));
}

TEST(CheckedSizeTest, EmptyTensorsAreZeroBytesUnlessTheirStridesOverflow) {
  EXPECT_EQ(checked_size_bytes({0}, 8).value(), 0u);
  EXPECT_EQ(checked_size_bytes({5, 0, 7}, 8).value(), 0u);
  EXPECT_FALSE(checked_size_bytes({kMax, 0, kMax}, 8));
}

TEST(CheckBoxTest, BoxesThatLeaveTheShapeAreInvalidEvenWhenTheirSumWraps) {
  const Shape shape{4, 8};
  EXPECT_TRUE(check_box({{0, 0}, {4, 8}}, shape));
  EXPECT_TRUE(check_box({{4, 8}, {0, 0}}, shape));
  EXPECT_FALSE(check_box({{1, 0}, {4, 8}}, shape));
  EXPECT_FALSE(check_box({{5, 0}, {0, 8}}, shape));
  EXPECT_FALSE(check_box({{2, 0}, {kMax, 8}}, shape));
  EXPECT_FALSE(check_box({{kMax, 0}, {2, 8}}, shape));
  EXPECT_FALSE(check_box({{0}, {4}}, shape));
  EXPECT_FALSE(check_box({{0}, {4, 8}}, shape));
}

TEST(BoxTest, IntersectionAndContainmentAgreeWithElements) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  Rng rng(seed);
  for (int round = 0; round < 500; ++round) {
    const Shape shape = test::random_shape(rng, 3, 6);
    const Box a = test::random_box(rng, shape);
    const Box b = test::random_box(rng, shape);
    std::set<std::uint64_t> in_a;
    std::set<std::uint64_t> both;
    test::for_each_element(a,
                           [&](const Dims& at) { in_a.insert(index_in(Box::whole(shape), at)); });
    bool all_of_b = true;
    test::for_each_element(b, [&](const Dims& at) {
      const std::uint64_t index = index_in(Box::whole(shape), at);
      if (in_a.count(index) != 0) {
        both.insert(index);
      } else {
        all_of_b = false;
      }
    });
    const auto shared = intersect(a, b);
    EXPECT_EQ(shared.has_value(), !both.empty());
    if (shared) {
      EXPECT_EQ(shared->elements(), both.size());
    }
    EXPECT_EQ(contains(a, b), all_of_b);
  }
}

TEST(BoxTest, EmptyAndMismatchedBoxes) {
  EXPECT_TRUE(contains({{2}, {3}}, {{0}, {0}}));
  EXPECT_FALSE(contains({{2}, {3}}, {{2, 0}, {1, 1}}));
  EXPECT_FALSE(intersect({{0}, {4}}, {{4}, {4}}));
  EXPECT_FALSE(intersect({{0}, {4}}, {{2}, {0}}));
  EXPECT_TRUE(intersect(Box{}, Box{}));
}

TEST(BoxTest, SubtractionLeavesExactlyTheOtherElements) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  Rng rng(seed);
  for (int round = 0; round < 500; ++round) {
    const Shape shape = test::random_shape(rng, 4, 5);
    const Box a = test::random_box(rng, shape);
    const Box b = test::random_box(rng, shape);
    std::vector<Box> rest;
    subtract(a, b, rest);
    EXPECT_LE(rest.size(), 2 * shape.rank() + 1);
    std::map<std::uint64_t, int> covered;
    for (const Box& box : rest) {
      EXPECT_FALSE(intersect(box, b));
      EXPECT_TRUE(contains(a, box));
      test::for_each_element(box, [&](const Dims& at) { ++covered[index_in(a, at)]; });
    }
    for (const auto& [index, times] : covered) EXPECT_EQ(times, 1);
    const auto shared = intersect(a, b);
    EXPECT_EQ(covered.size(), a.elements() - (shared ? shared->elements() : 0));
  }
}

TEST(StridedCopiesTest, MoveExactlyTheRegion) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  Rng rng(seed);
  for (int round = 0; round < 500; ++round) {
    const std::uint64_t element_bytes = std::uint64_t{1} << test::below(rng, 4);
    const Shape shape = test::random_shape(rng, 5, 5);
    const Box src = test::random_box(rng, shape);
    const Box dst = test::random_box(rng, shape);
    const auto region = intersect(src, dst);
    if (!region) continue;
    const auto from = test::random_bytes(rng, src.elements() * element_bytes);
    std::vector<std::byte> to(dst.elements() * element_bytes);
    std::vector<std::byte> expected = to;
    test::for_each_element(*region, [&](const Dims& at) {
      std::memcpy(expected.data() + index_in(dst, at) * element_bytes,
                  from.data() + index_in(src, at) * element_bytes, element_bytes);
    });
    std::vector<StridedCopy> copies;
    strided_copies(*region, src, dst, element_bytes, copies);
    std::uint64_t moved = 0;
    for (const StridedCopy& copy : copies) {
      moved += copy.total_bytes();
      for (std::uint64_t i = 0; i < copy.count; ++i) {
        const std::uint64_t read = copy.src_offset + i * copy.src_stride;
        const std::uint64_t write = copy.dst_offset + i * copy.dst_stride;
        ASSERT_LE(read + copy.run_bytes, from.size());
        ASSERT_LE(write + copy.run_bytes, to.size());
        std::memcpy(to.data() + write, from.data() + read, copy.run_bytes);
      }
    }
    EXPECT_EQ(moved, region->elements() * element_bytes);
    EXPECT_EQ(to, expected);
  }
}

TEST(StridedCopiesTest, ContiguousDimensionsAreFolded) {
  std::vector<StridedCopy> copies;
  const Box whole = Box::whole({8, 4, 16});
  strided_copies(whole, whole, whole, 2, copies);
  EXPECT_EQ(copies, (std::vector<StridedCopy>{{0, 0, 8 * 4 * 16 * 2, 1, 0, 0}}));

  copies.clear();  // rows of a column shard: one strided copy
  strided_copies({{0, 4}, {8, 4}}, Box::whole({8, 16}), {{0, 4}, {8, 4}}, 2, copies);
  EXPECT_EQ(copies, (std::vector<StridedCopy>{{8, 0, 8, 8, 32, 8}}));

  copies.clear();  // the outer two dimensions step evenly in both arrays: still one
  strided_copies({{0, 0, 4}, {2, 3, 4}}, Box::whole({2, 3, 16}), {{0, 0, 4}, {2, 3, 4}}, 1, copies);
  EXPECT_EQ(copies, (std::vector<StridedCopy>{{4, 0, 4, 6, 16, 4}}));

  copies.clear();
  strided_copies({{3}, {0}}, Box::whole({8}), Box::whole({8}), 4, copies);
  EXPECT_TRUE(copies.empty());
  strided_copies(Box{}, Box{}, Box{}, 8, copies);
  EXPECT_EQ(copies, (std::vector<StridedCopy>{{0, 0, 8, 1, 0, 0}}));
}

}  // namespace
}  // namespace rekindle
