#include "src/tensor/joint_declaration.h"

#include <algorithm>
#include <cstring>

#include <gtest/gtest.h>

#include "tests/tensor/random_tensors.h"

namespace rekindle {
namespace {

// In canonical order.
JointHost example() {
  const Shape shape{8, 4};
  const TensorInfo w{"w", DType::kBF16, shape};
  return {"node-a",
          {{3,
            {{{"__rekindle_file__/config.json", DType::kU8, {7}}, {Box::whole({7})}},
             {{"empty", DType::kF32, {0, 2}}, {}},
             {w, {{{0, 0}, {2, 4}}, {{2, 0}, {1, 2}}}}}},
           {4, {{{"scalar", DType::kF64, {}}, {Box::whole({})}}, {w, {Box::whole(shape)}}}},
           {9, {}}}};
}

TEST(JointDeclarationTest, DeclarationsComeBackInCanonicalOrder) {
  const JointHost host = example();
  JointHost mixed = host;
  std::ranges::reverse(mixed.ranks);
  for (Declaration& rank : mixed.ranks) {
    std::ranges::reverse(rank.tensors);
    for (DeclaredTensor& tensor : rank.tensors) std::ranges::reverse(tensor.boxes);
  }
  const std::string bytes = serialize_declarations(mixed);
  EXPECT_EQ(bytes, serialize_declarations(host));
  const auto parsed = parse_declarations(bytes);
  ASSERT_TRUE(parsed) << parsed.error().message();
  EXPECT_EQ(*parsed, host);
}

TEST(JointDeclarationTest, EveryTruncationAndEveryTailIsRefused) {
  const std::string bytes = serialize_declarations(example());
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    const auto parsed = parse_declarations(bytes.substr(0, size));
    ASSERT_FALSE(parsed) << size;
    EXPECT_EQ(parsed.error().code(), ErrorCode::kInvalid);
  }
  EXPECT_FALSE(parse_declarations(bytes + '\0'));
}

// S1: a peer may send any bytes. Whatever is taken is canonical.
TEST(JointDeclarationTest, S1ChangedBytesAreRefusedOrCanonical) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  test::Rng rng(seed);
  const std::string bytes = serialize_declarations(example());
  for (int round = 0; round < 20'000; ++round) {
    std::string changed = bytes;
    for (std::uint64_t left = 1 + test::below(rng, 3); left > 0; --left) {
      changed[test::below(rng, changed.size())] = static_cast<char>(rng() % 4 == 0 ? 0xff : rng());
    }
    const auto parsed = parse_declarations(changed);
    if (parsed) {
      EXPECT_EQ(serialize_declarations(*parsed), changed);
    }
  }
}

TEST(JointDeclarationTest, WrongDeclarationsAreRefused) {
  const auto refused = [](const auto& change) {
    JointHost host = example();
    change(host);
    return !parse_declarations(serialize_declarations(host));
  };
  EXPECT_FALSE(refused([](JointHost&) {}));
  EXPECT_TRUE(refused([](JointHost& host) { host.name.clear(); }));
  EXPECT_TRUE(refused([](JointHost& host) { host.name.assign(256, 'x'); }));
  EXPECT_TRUE(refused([](JointHost& host) { host.ranks[1].rank = 3; })) << "a rank twice";
  EXPECT_TRUE(refused([](JointHost& host) { host.ranks[1].tensors[0].info.name = "w"; }));
  EXPECT_TRUE(refused([](JointHost& host) { host.ranks[1].tensors[0].info.name = ""; }));
  EXPECT_TRUE(refused(
      [](JointHost& host) { host.ranks[0].tensors[0].info.name = "__rekindle_file__/../secret"; }));
  EXPECT_TRUE(refused([](JointHost& host) { host.ranks[0].tensors[2].boxes[0].extent[0] = 9; }))
      << "a box outside of its tensor";
  EXPECT_TRUE(refused(
      [](JointHost& host) { host.ranks[0].tensors[2].boxes[0].offset[1] = ~std::uint64_t{0}; }));
  EXPECT_TRUE(refused([](JointHost& host) {
    host.ranks[0].tensors[2].boxes[1] = host.ranks[0].tensors[2].boxes[0];
  })) << "a box twice";
}

TEST(JointDeclarationTest, MoreBoxesThanTheLimitAreRefused) {
  // The count of boxes is at the end; as many bytes follow.
  constexpr std::uint32_t kBoxes = kMaxJointBoxes + 1;
  std::string bytes =
      serialize_declarations({"a", {{0, {{{"w", DType::kU8, Shape{kBoxes}}, {}}}}}});
  std::memcpy(bytes.data() + bytes.size() - sizeof kBoxes, &kBoxes, sizeof kBoxes);
  bytes.append(kBoxes, '\0');
  const auto parsed = parse_declarations(bytes);
  ASSERT_FALSE(parsed);
  EXPECT_EQ(parsed.error().message(), "declarations: more than 4000000 boxes, which is the limit");
}

}  // namespace
}  // namespace rekindle
