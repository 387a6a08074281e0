#include "src/tensor/safetensors.h"

#include <gmock/gmock.h>

namespace rekindle::safetensors {
namespace {

using ::testing::HasSubstr;

// A file prefix with this JSON; the length is that of the JSON unless given.
std::string with_length(const std::string& json, std::uint64_t length) {
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &length, 8);
  return bytes + json;
}
Result<Header> parse(const std::string& json, std::uint64_t data_bytes) {
  const std::string bytes = with_length(json, json.size());
  return parse_header(as_bytes(bytes), bytes.size() + data_bytes);
}

std::string entry(const std::string& name, const std::string& shape, std::uint64_t begin,
                  std::uint64_t end, const std::string& dtype = "U8") {
  return fmt::format(R"("{}":{{"dtype":"{}","shape":{},"data_offsets":[{},{}]}})", name, dtype,
                     shape, begin, end);
}

TEST(SafetensorsHeaderTest, ReadsTensorsInTheOrderOfTheirOffsets) {
  const auto header =
      parse("{\"__metadata__\":{\"format\":\"pt\"}," + entry("b", "[2,2]", 4, 20, "F32") + "," +
                entry("a", "[4]", 0, 4) + "," + entry("none", "[0,9]", 4, 4) + "," +
                entry("scalar", "[]", 20, 28, "I64") + "}   ",
            28);
  ASSERT_TRUE(header) << header.error().message();
  ASSERT_EQ(header->entries.size(), 4u);
  EXPECT_EQ(header->entries[0].info, (TensorInfo{"a", DType::kU8, {4}}));
  EXPECT_EQ(header->entries[1].info, (TensorInfo{"none", DType::kU8, {0, 9}}));
  EXPECT_EQ(header->entries[2].info, (TensorInfo{"b", DType::kF32, {2, 2}}));
  EXPECT_EQ(header->entries[2].offset_bytes, header->data_offset_bytes + 4);
  EXPECT_EQ(header->entries[3].info, (TensorInfo{"scalar", DType::kI64, {}}));
  EXPECT_EQ(header->metadata.at("format"), "pt");
}

TEST(SafetensorsHeaderTest, AFileWithoutTensorsIsValid) {
  EXPECT_TRUE(parse("{}", 0));
  EXPECT_TRUE(parse(R"({"__metadata__":{}})", 0));
}

TEST(SafetensorsHeaderTest, NamesMayBeUnicodeEscapedAndLong) {
  const std::string long_name(4096, 'n');
  const auto header =
      parse("{" + entry("вес", "[1]", 0, 1) + "," + entry(R"(\u0041\n\"\\)", "[1]", 1, 2) + "," +
                entry(long_name, "[1]", 2, 3) + "}",
            3);
  ASSERT_TRUE(header) << header.error().message();
  EXPECT_EQ(header->entries[0].info.name, "вес");
  EXPECT_EQ(header->entries[1].info.name, "A\n\"\\");
  EXPECT_EQ(header->entries[2].info.name, long_name);
}

struct BadHeader {
  const char* name;
  std::string json;
  std::uint64_t data_bytes;
  const char* message;
  friend void PrintTo(const BadHeader& what, std::ostream* out) { *out << what.name; }
};

class BadHeaderTest : public ::testing::TestWithParam<BadHeader> {};

TEST_P(BadHeaderTest, IsInvalidAndSaysWhy) {
  const auto header = parse(GetParam().json, GetParam().data_bytes);
  ASSERT_FALSE(header);
  EXPECT_EQ(header.error().code(), ErrorCode::kInvalid);
  EXPECT_THAT(header.error().message(), HasSubstr(GetParam().message));
  EXPECT_EQ(header.error().message().find('\n'), std::string::npos);
}

std::string deep(int depth) { return std::string(static_cast<std::size_t>(depth), '['); }

INSTANTIATE_TEST_SUITE_P(
    Seeds, BadHeaderTest,
    ::testing::Values(
        BadHeader{"NotJson", "{nope}", 0, "not JSON"},
        BadHeader{"CutJson", "{" + entry("a", "[1]", 0, 1), 1, "not JSON"},
        BadHeader{"Empty", "", 0, "does not start with"},
        BadHeader{"LeadingSpace", " {}", 0, "does not start with"},
        BadHeader{"ByteOrderMark", "\xef\xbb\xbf{}", 0, "does not start with"},
        BadHeader{"TopLevelArray", "[]", 0, "does not start with"},
        BadHeader{"TailAfterObject", "{}{}", 0, "not JSON"},
        BadHeader{"NulHidesATail", std::string("{}\0{}", 5), 0, "NUL byte"},
        BadHeader{"Overlap", "{" + entry("a", "[4]", 0, 4) + "," + entry("b", "[4]", 3, 7) + "}", 7,
                  "'b' overlaps"},
        BadHeader{"SameRange", "{" + entry("a", "[4]", 0, 4) + "," + entry("b", "[4]", 0, 4) + "}",
                  4, "overlaps"},
        BadHeader{"Hole", "{" + entry("a", "[4]", 0, 4) + "," + entry("b", "[4]", 5, 9) + "}", 9,
                  "'b' leaves a hole from 4 to 5"},
        BadHeader{"HoleAtStart", "{" + entry("a", "[4]", 1, 5) + "}", 5, "hole from 0 to 1"},
        BadHeader{"Tail", "{" + entry("a", "[4]", 0, 4) + "}", 5, "1 bytes after the last"},
        BadHeader{"Truncated", "{" + entry("a", "[4]", 0, 4) + "}", 3, "truncated"},
        BadHeader{"EndsBeforeItStarts", "{" + entry("a", "[4]", 4, 0) + "}", 4, "before it starts"},
        BadHeader{"ShapeNotBytes", "{" + entry("a", "[5]", 0, 4) + "}", 4,
                  "'a' has 4 bytes of data, its shape [5] of U8 needs 5"},
        BadHeader{"DtypeNotBytes", "{" + entry("a", "[4]", 0, 4, "F32") + "}", 4, "needs 16"},
        BadHeader{"ShapeOverflows",
                  "{" + entry("a", "[4294967296,4294967296,4294967296]", 0, 0) + "}", 0, "63 bits"},
        BadHeader{"ShapeTimesDtypeOverflows",
                  "{" + entry("a", "[2305843009213693952]", 0, 0, "F64") + "}", 0, "63 bits"},
        BadHeader{"EmptyShapeWithHugeExtents",
                  "{" + entry("a", "[0,18446744073709551615,18446744073709551615]", 0, 0) + "}", 0,
                  "63 bits"},
        BadHeader{"OffsetsAtTheEndOfTheWorld",
                  "{" + entry("a", "[1]", ~std::uint64_t{0} - 1, ~std::uint64_t{0}) + "}", 1,
                  "hole"},
        BadHeader{"DuplicateTensor",
                  "{" + entry("a", "[4]", 0, 4) + "," + entry("a", "[4]", 4, 8) + "}", 8,
                  "'a' appears twice"},
        BadHeader{"DuplicateByEscape",
                  "{" + entry("a", "[4]", 0, 4) + "," + entry(R"(\u0061)", "[4]", 4, 8) + "}", 8,
                  "'a' appears twice"},
        BadHeader{"DuplicateField",
                  R"({"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1,
                  "'dtype' twice"},
        BadHeader{"DuplicateMetadata", R"({"__metadata__":{},"__metadata__":{}})", 0,
                  "'__metadata__' appears twice"},
        BadHeader{"DuplicateMetadataKey", R"({"__metadata__":{"k":"1","k":"2"}})", 0, "'k' twice"},
        BadHeader{"MetadataOfNumbers", R"({"__metadata__":{"k":1}})", 0, "a number"},
        BadHeader{"MetadataOfObjects", R"({"__metadata__":{"k":{}}})", 0, "an object"},
        BadHeader{"MetadataString", R"({"__metadata__":"x"})", 0, "a string"},
        BadHeader{"TooDeep", R"({"a":{"shape":)" + deep(100000) + "}", 0, "an array"},
        BadHeader{"TooDeepObjects", R"({"a":{"shape":{"a":{"a":{}}}}})", 0, "an object"},
        BadHeader{"UnknownKey",
                  R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"stride":[1]}})", 1,
                  "unknown key 'stride'"},
        BadHeader{"MissingShape", R"({"a":{"dtype":"U8","data_offsets":[0,1]}})", 1,
                  "needs exactly"},
        BadHeader{"NegativeExtent", "{" + entry("a", "[-1]", 0, 1) + "}", 1, "a negative number"},
        BadHeader{"FractionExtent", "{" + entry("a", "[1.0]", 0, 1) + "}", 1, "a fraction"},
        BadHeader{"HugeExtent", "{" + entry("a", "[18446744073709551616]", 0, 1) + "}", 1,
                  "beyond 64 bits"},
        BadHeader{"NotANumberExtent", "{" + entry("a", "[NaN]", 0, 1) + "}", 1, "not JSON"},
        BadHeader{"StringExtent", "{" + entry("a", "[\"1\"]", 0, 1) + "}", 1, "a string"},
        BadHeader{"NullShape", "{" + entry("a", "null", 0, 1) + "}", 1, "null"},
        BadHeader{"BooleanShape", "{" + entry("a", "[true]", 0, 1) + "}", 1, "a boolean"},
        BadHeader{"NumberAsTensor", R"({"a":1})", 0, "a number"},
        BadHeader{"TooManyDimensions", "{" + entry("a", "[1,1,1,1,1,1,1,1,1]", 0, 1) + "}", 1,
                  "more than 8 dimensions"},
        BadHeader{"ThreeOffsets", R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1,2]}})", 1,
                  "more than two"},
        BadHeader{"OneOffset", R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0]}})", 1,
                  "needs two"},
        BadHeader{"UnknownDtype", "{" + entry("a", "[1]", 0, 1, "U9") + "}", 1,
                  "'U9' is not a safetensors dtype"},
        BadHeader{"SubByteDtype", "{" + entry("a", "[2]", 0, 1, "F4") + "}", 1,
                  "smaller than a byte"},
        BadHeader{"EmptyName", "{" + entry("", "[1]", 0, 1) + "}", 1, "empty name"},
        BadHeader{"NameTooLong", "{" + entry(std::string(4097, 'x'), "[1]", 0, 1) + "}", 1,
                  "above 4096"},
        BadHeader{"NameNotUtf8", "{" + entry("\xff\xfe", "[1]", 0, 1) + "}", 1, "not JSON"},
        BadHeader{"NameWithLoneSurrogate", "{" + entry(R"(\ud800)", "[1]", 0, 1) + "}", 1,
                  "not JSON"},
        BadHeader{"NameWithRawNewline", "{" + entry("a\nb", "[1]", 0, 1) + "}", 1, "not JSON"}),
    [](const auto& param_info) { return std::string(param_info.param.name); });

TEST(SafetensorsHeaderTest, LengthsThatDoNotFitAreInvalid) {
  const auto check = [](const std::string& bytes, std::uint64_t file_bytes, const char* why) {
    const auto header = parse_header(as_bytes(bytes), file_bytes);
    ASSERT_FALSE(header);
    EXPECT_EQ(header.error().code(), ErrorCode::kInvalid);
    EXPECT_THAT(header.error().message(), HasSubstr(why));
  };
  check("", 0, "too few");
  check("1234567", 7, "too few");
  check(with_length("{}", 3), 10, "header of 3 bytes in a file of 10");
  check(with_length("{}", ~std::uint64_t{0}), 10, "most allowed");
  check(with_length("{}", kMaxHeaderBytes + 1), ~std::uint64_t{0}, "most allowed");
  check(with_length("{}", kMaxHeaderBytes), 10, "in a file of 10");
  check(with_length("{}", 100), 1000, "only 10 were given");
}

TEST(SafetensorsHeaderTest, WhatIsWrittenReadsBack) {
  const std::vector<TensorInfo> tensors = {{"b\"\\\n", DType::kF64, {3}},
                                           {"a", DType::kU8, {5}},
                                           {"e", DType::kF16, {0}},
                                           {"s", DType::kBool, {}}};
  for (const std::uint64_t align : {std::uint64_t{8}, std::uint64_t{4096}}) {
    const auto bytes = make_header(tensors, {{"format", "pt"}, {"k\t", "v"}}, align);
    ASSERT_TRUE(bytes);
    EXPECT_EQ(bytes->size() % align, 0u);
    const auto header = parse_header(as_bytes(*bytes), bytes->size() + 24 + 5 + 1);
    ASSERT_TRUE(header) << header.error().message();
    EXPECT_EQ(header->data_offset_bytes, bytes->size());
    EXPECT_EQ(header->metadata.at("k\t"), "v");
    ASSERT_EQ(header->entries.size(), 4u);
    EXPECT_EQ(header->entries[0].info, tensors[0]);
    EXPECT_EQ(header->entries[1].info, tensors[1]);
  }
  EXPECT_FALSE(
      make_header(std::vector<TensorInfo>{{"a", DType::kU8, {1}}, {"a", DType::kU8, {1}}}, {}, 8));
}

}  // namespace
}  // namespace rekindle::safetensors
