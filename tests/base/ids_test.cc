#include "src/base/ids.h"

#include <gtest/gtest.h>

namespace rekindle {
namespace {

TEST(IdTest, RandomIdsDifferAndSurviveBytes) {
  const auto a = Incarnation::random();
  EXPECT_NE(a, Incarnation::random());
  EXPECT_FALSE(a.is_nil());
  EXPECT_TRUE(Incarnation{}.is_nil());
  EXPECT_EQ(Incarnation::from_bytes(a.to_bytes()).value(), a);
  EXPECT_EQ(a.hex().size(), 32u);
  EXPECT_FALSE(Incarnation::from_bytes(""));
  EXPECT_FALSE(Incarnation::from_bytes(std::string(17, 'x')));
}

TEST(ModelRefTest, VersionIsOptional) {
  const auto full = ModelRef::parse("org/qwen3-8b@41");
  ASSERT_TRUE(full);
  EXPECT_EQ(full->model, "org/qwen3-8b");
  EXPECT_EQ(full->version, 41u);
  EXPECT_EQ(full->to_string(), "org/qwen3-8b@41");
  EXPECT_EQ(ModelRef::parse("qwen3")->version, std::nullopt);
  EXPECT_EQ(ModelRef::parse("m@18446744073709551615")->version, ~std::uint64_t{0});
}

TEST(ModelRefTest, BadNamesAndVersionsAreInvalid) {
  for (const char* bad :
       {"", "@1", "m@", "m@x", "m@-1", "m@1.5", "m@18446744073709551616", "m@1 ", "/m", "m/",
        "../m", "a/../b", "a//b", ".m", "m n", "m%2F", "m\n", "m@1@2"}) {
    const auto ref = ModelRef::parse(bad);
    ASSERT_FALSE(ref) << bad;
    EXPECT_EQ(ref.error().code(), ErrorCode::kInvalid);
  }
  EXPECT_TRUE(check_model_name(std::string(200, 'm')));
  EXPECT_FALSE(check_model_name(std::string(201, 'm')));
}

}  // namespace
}  // namespace rekindle
