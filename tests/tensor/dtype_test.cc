#include "src/tensor/dtype.h"

#include <gtest/gtest.h>

namespace rekindle {
namespace {

TEST(DTypeTest, NamesAndSizesAreThoseOfSafetensors) {
  const std::pair<const char*, std::uint64_t> known[] = {
      {"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"F8_E8M0", 1},
      {"I16", 2},  {"U16", 2}, {"F16", 2}, {"BF16", 2},    {"I32", 4},     {"U32", 4},
      {"F32", 4},  {"I64", 8}, {"U64", 8}, {"F64", 8}};
  for (const auto& [name, size] : known) {
    const auto dtype = parse_dtype(name);
    ASSERT_TRUE(dtype) << name;
    EXPECT_EQ(dtype_name(*dtype), name);
    EXPECT_EQ(dtype_size_bytes(*dtype), size) << name;
    EXPECT_EQ(dtype_from_wire(static_cast<std::uint32_t>(*dtype)).value(), *dtype);
  }
}

TEST(DTypeTest, WireNumbersNeverChange) {
  EXPECT_EQ(static_cast<int>(DType::kBool), 1);
  EXPECT_EQ(static_cast<int>(DType::kF8E4M3), 4);
  EXPECT_EQ(static_cast<int>(DType::kBF16), 10);
  EXPECT_EQ(static_cast<int>(DType::kF64), 16);
}

TEST(DTypeTest, SubByteTypesAreRefusedWithTheirOwnText) {
  for (const char* name : {"F4", "F6_E2M3", "F6_E3M2"}) {
    const auto dtype = parse_dtype(name);
    ASSERT_FALSE(dtype);
    EXPECT_EQ(dtype.error().code(), ErrorCode::kInvalid);
    EXPECT_NE(dtype.error().message().find("smaller than a byte"), std::string::npos);
  }
}

TEST(DTypeTest, ComplexNumbersAreRefusedWithAWayOut) {
  const auto dtype = parse_dtype("C64");
  ASSERT_FALSE(dtype);
  EXPECT_EQ(dtype.error().code(), ErrorCode::kInvalid);
  EXPECT_NE(dtype.error().message().find("as F32"), std::string::npos) << dtype.error().message();
}

TEST(DTypeTest, UnknownNamesAndNumbersAreRefused) {
  for (const char* name : {"", "bf16", "F128", "BF16 "}) EXPECT_FALSE(parse_dtype(name)) << name;
  EXPECT_EQ(parse_dtype("a\nb").error().message().find('\n'), std::string::npos);
  for (const std::uint32_t number : {0u, 17u, 256u + 1u}) EXPECT_FALSE(dtype_from_wire(number));
}

}  // namespace
}  // namespace rekindle
