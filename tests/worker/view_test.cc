// The part of a layout that holds the wanted boxes.
#include <gtest/gtest.h>

#include "recovery/pull/wanted.h"

namespace rekindle::pull {
namespace {

class ViewTest : public ::testing::Test {
 protected:
  static TensorSet tensors() {
    return *TensorSet::create({{"a", DType::kF32, {8, 16}}, {"b", DType::kU8, {100}}});
  }
  const TensorSet tensors_ = tensors();
  const PackedLayout packed_ = *pack_layout(
      tensors_, std::vector<TensorBox>{{0, Box::whole({8, 16})}, {1, Box::whole({100})}}, 1 << 20);
  std::optional<Layout> view(std::vector<TensorBox> boxes) {
    auto seen = view_of(tensors_, packed_.layout, std::move(boxes));
    EXPECT_TRUE(seen) << seen.error().message();
    return seen ? *seen : std::nullopt;
  }
};

TEST_F(ViewTest, RowsOfATensorLieInOnePiece) {
  const auto rows = view({{0, {{2, 0}, {3, 16}}}});
  ASSERT_TRUE(rows);
  ASSERT_EQ(rows->entries().size(), 1u);
  EXPECT_EQ(rows->entries()[0].offset_bytes,
            packed_.layout.entries_of(0)[0].offset_bytes + 2 * 16 * 4);
  EXPECT_EQ(rows->payload_bytes(), 3u * 16 * 4);
}

TEST_F(ViewTest, ColumnsDoNotUnlessThereIsOneRow) {
  EXPECT_FALSE(view({{0, {{0, 4}, {8, 4}}}}));
  EXPECT_TRUE(view({{0, {{3, 4}, {1, 4}}}}));
}

TEST_F(ViewTest, EverythingIsTheLayoutItself) {
  const auto all = view(packed_.layout.boxes());
  ASSERT_TRUE(all);
  EXPECT_EQ(all->digest(), packed_.layout.digest());
}

TEST_F(ViewTest, WhatTheLayoutDoesNotHoldIsNotSeen) {
  const auto part = *pack_layout(tensors_, std::vector<TensorBox>{{0, {{0, 0}, {4, 16}}}}, 1 << 20);
  const auto over = view_of(tensors_, part.layout, {{0, {{2, 0}, {4, 16}}}});
  ASSERT_TRUE(over);
  EXPECT_FALSE(*over);
}

TEST_F(ViewTest, BoxesThatOverlapAreRefused) {
  const auto twice = view_of(tensors_, packed_.layout, {{1, {{0}, {10}}}, {1, {{5}, {10}}}});
  ASSERT_FALSE(twice);
  EXPECT_EQ(twice.error().code(), ErrorCode::kInvalid);
}

}  // namespace
}  // namespace rekindle::pull
