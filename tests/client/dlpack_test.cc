// rk_describe_tensors with a producer of the test: the layouts, and the first failure.
#include <optional>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "src/client/rekindle.h"

namespace rekindle::client::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// As DLPack 1.3 has it.
struct DlTensor {
  void* data;
  std::int32_t device_type;
  std::int32_t device_id;
  std::int32_t dimensions;
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
  const std::int64_t* shape;
  const std::int64_t* strides;
  std::uint64_t byte_offset;
};

struct FakeObject {
  // The last word is not an address.
  std::uintptr_t head[3] = {1, 2, ~std::uintptr_t{0}};
  std::uintptr_t data = 0x1000;
  std::vector<std::int64_t> shape;
  std::optional<std::vector<std::int64_t>> strides;
  std::uint64_t byte_offset = 0;
  bool fails = false;
  bool lacks_shape = false;
};

int export_fake(void* object, void* out) {
  const auto& fake = *static_cast<const FakeObject*>(object);
  if (fake.fails) return -1;
  auto* const tensor = static_cast<DlTensor*>(out);
  *tensor = {reinterpret_cast<void*>(fake.data),
             2,
             7,
             static_cast<std::int32_t>(fake.shape.size()),
             4,
             16,
             1,
             fake.lacks_shape ? nullptr : fake.shape.data(),
             fake.strides ? fake.strides->data() : nullptr,
             fake.byte_offset};
  return 0;
}

struct Described {
  std::int32_t code = 0;
  std::string message;
  // One for each object that was described.
  std::vector<rk_tensor_layout> layouts;
  std::vector<std::int64_t> shapes;
  std::vector<std::int64_t> strides;
};

Described describe(std::vector<FakeObject> fakes, std::size_t capacity = 64) {
  std::vector<void*> objects;
  for (FakeObject& fake : fakes) objects.push_back(&fake);
  Described found;
  found.layouts.resize(fakes.size());
  found.shapes.resize(capacity);
  found.strides.resize(capacity);
  std::size_t count = 99;
  rk_error error{};
  found.code =
      rk_describe_tensors(export_fake, objects.data(), objects.size(), found.layouts.data(),
                          found.shapes.data(), found.strides.data(), capacity, &count, &error);
  found.message = error.message;
  found.layouts.resize(count);
  const std::size_t used =
      count == 0 ? 0 : found.layouts.back().first_dimension + found.layouts.back().dimensions;
  found.shapes.resize(used);
  found.strides.resize(used);
  return found;
}

FakeObject tensor(std::vector<std::int64_t> shape,
                  std::optional<std::vector<std::int64_t>> strides = std::nullopt) {
  FakeObject fake;
  fake.shape = std::move(shape);
  fake.strides = std::move(strides);
  return fake;
}

TEST(Dlpack, EveryTensorIsWrittenDown) {
  FakeObject inside = tensor({4, 5}, {{1, 4}});
  inside.byte_offset = 24;
  const Described found = describe({tensor({2, 3}, {{3, 1}}), tensor({}), inside});
  ASSERT_EQ(found.code, RK_OK) << found.message;
  EXPECT_THAT(found.shapes, ElementsAre(2, 3, 4, 5));
  EXPECT_THAT(found.strides, ElementsAre(3, 1, 1, 4));
  ASSERT_EQ(found.layouts.size(), 3u);
  const rk_tensor_layout& last = found.layouts[2];
  EXPECT_EQ(last.data, 0x1018u);
  EXPECT_EQ(last.device_type, 2);
  EXPECT_EQ(last.device_id, 7);
  EXPECT_EQ(last.dtype_code, 4u);
  EXPECT_EQ(last.dtype_bits, 16u);
  EXPECT_EQ(last.dtype_lanes, 1u);
  EXPECT_EQ(last.dimensions, 2u);
  EXPECT_EQ(last.first_dimension, 2u);
  EXPECT_EQ(last.contiguous, 0u);
  EXPECT_EQ(last.reserved, 0u);
  EXPECT_EQ(found.layouts[1].dimensions, 0u);
  EXPECT_EQ(found.layouts[1].contiguous, 1u);
}

TEST(Dlpack, ContiguousIsWhatTorchCallsSo) {
  struct Case {
    std::vector<std::int64_t> shape, strides;
    bool contiguous;
  };
  for (const auto& [shape, strides, contiguous] :
       std::vector<Case>{{{2, 3}, {3, 1}, true},
                         {{2, 3}, {1, 2}, false},
                         {{2, 3}, {4, 1}, false},  // gaps
                         {{2, 3}, {0, 1}, false},  // expanded
                         {{1, 3}, {77, 1}, true},  // a size of 1 steps nowhere
                         {{3, 1, 2}, {2, 5, 1}, true},
                         {{3, 1}, {1, 9}, true},
                         {{0, 3}, {1, 50}, true},  // no elements
                         {{3, 0, 2}, {9, 9, 9}, true},
                         {{1}, {5}, true},
                         {{2}, {2}, false}}) {
    const Described found = describe({tensor(shape, strides)});
    ASSERT_EQ(found.layouts.size(), 1u);
    EXPECT_EQ(found.layouts[0].contiguous, contiguous ? 1u : 0u)
        << ::testing::PrintToString(shape) << ::testing::PrintToString(strides);
  }
}

TEST(Dlpack, WithoutStridesItIsRowMajor) {
  const Described found = describe({tensor({2, 3, 4})});
  ASSERT_EQ(found.code, RK_OK);
  EXPECT_THAT(found.strides, ElementsAre(12, 4, 1));
  EXPECT_EQ(found.layouts[0].contiguous, 1u);
}

TEST(Dlpack, NoDataStaysNoData) {
  FakeObject none = tensor({0});
  none.data = 0;
  none.byte_offset = 16;
  EXPECT_EQ(describe({none}).layouts.at(0).data, 0u);
}

TEST(Dlpack, StopsAtTheFirstThatFails) {
  FakeObject bad = tensor({1});
  bad.fails = true;
  const Described found = describe({tensor({2}), tensor({3}), bad, tensor({4})});
  EXPECT_EQ(found.code, RK_INVALID);
  EXPECT_THAT(found.message, HasSubstr("object 2 of 4"));
  EXPECT_EQ(found.layouts.size(), 2u);
  EXPECT_THAT(found.shapes, ElementsAre(2, 3));
  FakeObject shapeless = tensor({1});
  shapeless.lacks_shape = true;
  const Described other = describe({shapeless});
  EXPECT_EQ(other.code, RK_INVALID);
  EXPECT_THAT(other.layouts, IsEmpty());
}

TEST(Dlpack, StopsWhereTheRoomEnds) {
  const Described found = describe({tensor({2, 3}), tensor({}), tensor({4, 5})}, 3);
  EXPECT_EQ(found.code, RK_EXHAUSTED);
  EXPECT_THAT(found.message, HasSubstr("give more room"));
  EXPECT_EQ(found.layouts.size(), 2u);
  EXPECT_EQ(describe({tensor({2, 3}), tensor({}), tensor({4, 5})}, 4).code, RK_OK);
}

TEST(Dlpack, ManyTensorsAreAllDescribed) {
  const Described found = describe(std::vector<FakeObject>(1000, tensor({3})), 1000);
  ASSERT_EQ(found.code, RK_OK);
  ASSERT_EQ(found.layouts.size(), 1000u);
  EXPECT_EQ(found.layouts[999].first_dimension, 999u);
}

TEST(Dlpack, ArgumentsAreChecked) {
  FakeObject fake = tensor({2});
  void* const objects[] = {&fake, nullptr};
  rk_tensor_layout layouts[2];
  std::int64_t dims[4];
  std::size_t count = 99;
  const auto call = [&](rk_dlpack_exporter exporter, void* const* from, std::size_t many,
                        rk_tensor_layout* to, std::int64_t* shapes, std::size_t* described) {
    return rk_describe_tensors(exporter, from, many, to, shapes, dims, 4, described, nullptr);
  };
  EXPECT_EQ(call(nullptr, objects, 1, layouts, dims, &count), RK_INVALID);
  EXPECT_EQ(count, 0u);
  EXPECT_EQ(call(export_fake, nullptr, 1, layouts, dims, &count), RK_INVALID);
  EXPECT_EQ(call(export_fake, objects, 1, nullptr, dims, &count), RK_INVALID);
  EXPECT_EQ(call(export_fake, objects, 1, layouts, nullptr, &count), RK_INVALID);
  EXPECT_EQ(call(export_fake, objects, 1, layouts, dims, nullptr), RK_INVALID);
  EXPECT_EQ(call(export_fake, objects, 2, layouts, dims, &count), RK_INVALID) << "a null object";
  EXPECT_EQ(count, 1u);
  EXPECT_EQ(call(export_fake, nullptr, 0, nullptr, dims, &count), RK_OK);
}

}  // namespace
}  // namespace rekindle::client::testing
