#include "src/tensor/tensor_set.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace rekindle {
namespace {

using ::testing::HasSubstr;

TensorSet make_set(std::vector<TensorInfo> tensors) {
  auto set = TensorSet::create(std::move(tensors));
  EXPECT_TRUE(set) << set.error().message();
  return *set;
}

TEST(TensorSetTest, IsSortedAndFindsByName) {
  const TensorSet set =
      make_set({{"b", DType::kF32, {2, 3}}, {"a", DType::kBF16, {}}, {"c", DType::kU8, {0}}});
  EXPECT_EQ(set[0].name, "a");
  EXPECT_EQ(set.find("b"), TensorIndex{1});
  EXPECT_EQ(set.find("bb"), std::nullopt);
  EXPECT_EQ(set.total_bytes(), 2u + 24u);
}

TEST(TensorSetTest, CopiesOutliveTheirOriginal) {
  auto original =
      std::make_unique<TensorSet>(make_set({{"a", DType::kU8, {1}}, {"b", DType::kU8, {1}}}));
  const TensorSet copy = *original;
  original.reset();
  EXPECT_EQ(copy.find("b"), TensorIndex{1});
}

TEST(TensorSetTest, DigestDependsOnContentNotOnOrder) {
  const TensorInfo a{"a", DType::kF32, {2}};
  const TensorInfo b{"b", DType::kF32, {2}};
  EXPECT_EQ(make_set({a, b}).digest(), make_set({b, a}).digest());
  EXPECT_NE(make_set({a, b}).digest(), make_set({a, {"b", DType::kI32, {2}}}).digest());
  EXPECT_NE(make_set({a, b}).digest(), make_set({a, {"b", DType::kF32, {2, 1}}}).digest());
}

TEST(TensorSetTest, CanonicalBytesAreKnown) {
  // One tensor "w", BF16, [2, 3]: this is the format in docs/reference/formats.md, byte for byte.
  const TensorSet set = make_set({{"w", DType::kBF16, {2, 3}}});
  const std::string expected = std::string("RKTSET01") + std::string("\1\0\0\0\0\0\0\0", 8) +
                               std::string("\1\0\0\0", 4) + "w" + std::string("\x0a\x02", 2) +
                               std::string("\2\0\0\0\0\0\0\0", 8) +
                               std::string("\3\0\0\0\0\0\0\0", 8);
  EXPECT_EQ(set.serialize(), expected);
}

TEST(TensorSetTest, SurvivesSerialization) {
  const TensorSet set = make_set({{"ключ", DType::kF8E4M3, {7, 1, 2}},
                                  {std::string(kMaxTensorNameBytes, 'n'), DType::kF64, {}},
                                  {"__rekindle_file__/1_Pooling/config.json", DType::kU8, {190}}});
  const auto parsed = TensorSet::parse(set.serialize());
  ASSERT_TRUE(parsed) << parsed.error().message();
  EXPECT_EQ(parsed->digest(), set.digest());
  EXPECT_TRUE(std::equal(set.tensors().begin(), set.tensors().end(), parsed->tensors().begin(),
                         parsed->tensors().end()));
}

TEST(TensorSetTest, BadTensorsAreInvalid) {
  const std::vector<std::pair<TensorInfo, const char*>> bad = {
      {{"", DType::kU8, {1}}, "empty name"},
      {{std::string(4097, 'n'), DType::kU8, {1}}, "longer than 4096"},
      {{"__metadata__", DType::kU8, {1}}, "reserves"},
      {{"\xff", DType::kU8, {1}}, "not UTF-8"},
      {{"\xed\xa0\x80", DType::kU8, {1}}, "not UTF-8"},  // a surrogate
      {{"\xc0\xaf", DType::kU8, {1}}, "not UTF-8"},      // an overlong '/'
      {{"big", DType::kF64, {std::uint64_t{1} << 60}}, "63 bits"},
      {{"__rekindle_file__/../etc/passwd", DType::kU8, {1}},
       "of a kind that checkpoints do not have"},
      {{"__rekindle_file__//etc/passwd", DType::kU8, {1}},
       "of a kind that checkpoints do not have"},
      {{"__rekindle_file__/a/b/c", DType::kU8, {1}}, "of a kind that checkpoints do not have"},
      {{"__rekindle_file__/", DType::kU8, {1}}, "of a kind that checkpoints do not have"},
      {{std::string("__rekindle_file__/a\0b", 21), DType::kU8, {1}},
       "of a kind that checkpoints do not have"},
      {{"__rekindle_file__/.bashrc", DType::kU8, {1}}, "of a kind that checkpoints do not have"},
      {{"__rekindle_file__/.ssh/authorized_keys.txt", DType::kU8, {1}},
       "of a kind that checkpoints do not have"},
      {{"__rekindle_file__/a/.hidden.py", DType::kU8, {1}},
       "of a kind that checkpoints do not have"},
      {{"__rekindle_file__/run.sh", DType::kU8, {1}}, "of a kind that checkpoints do not have"},
      {{"__rekindle_file__/model.safetensors.index.json", DType::kU8, {1}},
       "of a kind that checkpoints do not have"},
      {{"__rekindle_file__/a.json", DType::kF32, {1}}, "must be U8"},
  };
  for (const auto& [tensor, why] : bad) {
    const auto set = TensorSet::create({tensor});
    ASSERT_FALSE(set) << why;
    EXPECT_EQ(set.error().code(), ErrorCode::kInvalid);
    EXPECT_THAT(set.error().message(), HasSubstr(why));
  }
  const auto twice = TensorSet::create({{"a", DType::kU8, {1}}, {"a", DType::kU8, {2}}});
  ASSERT_FALSE(twice);
  EXPECT_THAT(twice.error().message(), HasSubstr("'a' appears twice"));
  const std::uint64_t half = std::uint64_t{1} << 62;
  EXPECT_FALSE(TensorSet::create({{"a", DType::kU8, {half}}, {"b", DType::kU8, {half}}}));
}

TEST(TensorSetTest, EveryDamagedByteIsRefusedOrChangesTheDigest) {
  const TensorSet set = make_set({{"a", DType::kF32, {3}}, {"b.weight", DType::kI64, {2, 2}}});
  const std::string bytes = set.serialize();
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    EXPECT_FALSE(TensorSet::parse(bytes.substr(0, i)));
    for (const int flip : {0x01, 0x80}) {
      std::string damaged = bytes;
      damaged[i] = static_cast<char>(damaged[i] ^ flip);
      const auto parsed = TensorSet::parse(damaged);
      if (parsed) {
        EXPECT_NE(parsed->digest(), set.digest()) << "byte " << i;
      }
    }
  }
  EXPECT_FALSE(TensorSet::parse(bytes + '\0'));
}

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
