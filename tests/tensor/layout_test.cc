#include "src/tensor/layout.h"

#include <gmock/gmock.h>

#include "src/tensor/safetensors.h"
#include "tests/tensor/random_tensors.h"

namespace rekindle {
namespace {

using test::Rng;
using ::testing::HasSubstr;

TensorSet small_set() {
  return *TensorSet::create({{"a", DType::kF32, {4, 8}},  // 128 bytes
                             {"b", DType::kBF16, {10}},   // 20 bytes
                             {"empty", DType::kI64, {0, 3}},
                             {"scalar", DType::kF64, {}}});  // 8 bytes
}

std::vector<TensorBox> whole_boxes(const TensorSet& set) {
  std::vector<TensorBox> boxes;
  for (TensorIndex i = 0; i < set.size(); ++i) boxes.push_back({i, Box::whole(set[i].shape)});
  return boxes;
}

TEST(LayoutTest, EntriesAreSortedAndFoundByTensor) {
  const TensorSet set = small_set();
  const auto layout = Layout::create(
      set, {{"m.safetensors", 1000}},
      {{1, {{0}, {10}}, 0, 500}, {0, {{2, 0}, {2, 8}}, 0, 100}, {0, {{0, 0}, {2, 8}}, 0, 200}});
  ASSERT_TRUE(layout) << layout.error().message();
  ASSERT_EQ(layout->entries_of(0).size(), 2u);
  EXPECT_EQ(layout->entries_of(0)[0].offset_bytes, 200u);
  EXPECT_EQ(layout->entries_of(1).size(), 1u);
  EXPECT_TRUE(layout->entries_of(2).empty());
  EXPECT_TRUE(layout->entries_of(3).empty());
  EXPECT_EQ(layout->payload_bytes(), 148u);
  EXPECT_EQ(layout->segment_bytes(), 1000u);
  EXPECT_EQ(layout->boxes().size(), 3u);
}

TEST(LayoutTest, EntriesThatBreakARuleAreInvalid) {
  const TensorSet set = small_set();
  const std::vector<SegmentSpec> one = {{"m.safetensors", 1000}};
  const Box a = Box::whole({4, 8});
  const std::vector<std::pair<std::vector<LayoutEntry>, const char*>> bad = {
      {{{9, a, 0, 0}}, "tensor 9 of 4"},
      {{{0, {{1, 0}, {4, 8}}, 0, 0}}, "leaves shape"},
      {{{0, a, 1, 0}}, "segment 1 of 1"},
      {{{0, a, 0, 873}}, "leave segment"},
      {{{0, a, 0, ~std::uint64_t{0}}}, "leave segment"},
      {{{0, a, 0, 0}, {0, {{3, 0}, {1, 8}}, 0, 500}}, "overlap"},
      {{{0, a, 0, 0}, {0, a, 0, 500}}, "overlap"},
      {{{0, {{0, 0}, {4, 5}}, 0, 0}, {0, {{0, 4}, {4, 4}}, 0, 500}}, "overlap"},
      {{{2, Box::whole({0, 3}), 0, 0}, {2, Box::whole({0, 3}), 0, 8}}, "overlap"},
      {{{0, a, 0, 0}, {1, Box::whole({10}), 0, 127}}, "overlap in segment"},
  };
  for (const auto& [entries, why] : bad) {
    const auto layout = Layout::create(set, one, entries);
    ASSERT_FALSE(layout) << why;
    EXPECT_EQ(layout.error().code(), ErrorCode::kInvalid);
    EXPECT_THAT(layout.error().message(), HasSubstr(why));
  }
}

TEST(LayoutTest, SegmentNamesThatAreNoPlainFileNamesAreInvalid) {
  const TensorSet set = small_set();
  for (const char* name : {"", "x", "../x.safetensors", "a/x.safetensors", ".x.safetensors",
                           "x.safetensors.partial", "x\n.safetensors", "\xff.safetensors"}) {
    EXPECT_FALSE(Layout::create(set, {{name, 10}}, {})) << name;
  }
  EXPECT_FALSE(Layout::create(set, {{"x.safetensors", 10}, {"x.safetensors", 10}}, {}));
  EXPECT_FALSE(Layout::create(set, {{"x.safetensors", ~std::uint64_t{0}}}, {}));
}

TEST(LayoutTest, TouchingRangesAndEmptyEntriesAreFine) {
  const TensorSet set = small_set();
  EXPECT_TRUE(Layout::create(set, {{"m.safetensors", 148}},
                             {{0, Box::whole({4, 8}), 0, 0},
                              {1, Box::whole({10}), 0, 128},
                              {2, Box::whole({0, 3}), 0, 128}}));
}

TEST(LayoutTest, SurvivesSerializationAndIsNamedByItsContent) {
  const TensorSet set = small_set();
  const auto packed = pack_layout(set, whole_boxes(set), 1 << 30);
  ASSERT_TRUE(packed) << packed.error().message();
  const auto parsed = Layout::parse(set, packed->layout.serialize());
  ASSERT_TRUE(parsed) << parsed.error().message();
  EXPECT_EQ(parsed->digest(), packed->layout.digest());
  EXPECT_TRUE(std::equal(parsed->entries().begin(), parsed->entries().end(),
                         packed->layout.entries().begin(), packed->layout.entries().end()));
  const auto shard = pack_layout(set, std::vector<TensorBox>{{0, {{0, 0}, {4, 4}}}}, 1 << 30);
  EXPECT_NE(shard->layout.digest(), parsed->digest());
  EXPECT_EQ(Layout::parse(set, shard->layout.serialize())->digest(), shard->layout.digest());
}

TEST(LayoutTest, TheNumberOfEntriesIsReadWithoutThem) {
  const TensorSet set = small_set();
  const std::string bytes = pack_layout(set, whole_boxes(set), 1 << 30)->layout.serialize();
  EXPECT_EQ(*Layout::count_entries(bytes), set.size());
  EXPECT_FALSE(Layout::count_entries(bytes.substr(0, 40)));
  EXPECT_FALSE(Layout::count_entries("nonsense"));
}

TEST(LayoutTest, EntriesInAnotherOrderOrFormAreRefused) {
  const TensorSet set = small_set();
  const auto refused = [&](const std::string& bytes) {
    const auto parsed = Layout::parse(set, bytes);
    return !parsed && parsed.error().message().find("canonical form") != std::string::npos;
  };
  const std::string bytes = pack_layout(set, whole_boxes(set), 1 << 30)->layout.serialize();
  // The last two are whole: a tensor, a segment, an offset and the byte 1.
  constexpr std::ptrdiff_t kEntryBytes = 4 + 4 + 8 + 1;
  std::string swapped = bytes;
  std::swap_ranges(swapped.end() - kEntryBytes, swapped.end(), swapped.end() - 2 * kEntryBytes);
  EXPECT_TRUE(refused(swapped));
  // The last one is a scalar, whose box has no numbers.
  std::string spelled_out = bytes;
  spelled_out.back() = 0;
  EXPECT_TRUE(refused(spelled_out));
  const auto shard = pack_layout(set, std::vector<TensorBox>{{0, {{0, 0}, {4, 4}}}}, 1 << 30);
  std::string unknown = shard->layout.serialize();
  unknown[unknown.size() - 4 * 8 - 1] = 2;
  EXPECT_TRUE(refused(unknown));
}

TEST(LayoutTest, DamagedAndNonCanonicalBytesAreRefused) {
  const TensorSet set = small_set();
  const Layout layout = pack_layout(set, whole_boxes(set), 1 << 30)->layout;
  const std::string bytes = layout.serialize();
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    EXPECT_FALSE(Layout::parse(set, bytes.substr(0, i)));
    std::string damaged = bytes;
    damaged[i] = static_cast<char>(damaged[i] ^ 1);
    const auto parsed = Layout::parse(set, damaged);
    if (parsed) {
      EXPECT_NE(parsed->digest(), layout.digest()) << "byte " << i;
    }
  }
  EXPECT_FALSE(Layout::parse(set, bytes + '\0'));
  const auto other = TensorSet::create({{"a", DType::kF32, {4, 8}}});
  EXPECT_THAT(Layout::parse(*other, bytes).error().message(), HasSubstr("another tensor set"));
}

// Every header that pack_layout writes must parse to exactly the layout's entries.
void expect_headers_match(const TensorSet& set, const PackedLayout& packed) {
  ASSERT_EQ(packed.headers.size(), packed.layout.segments().size());
  std::size_t found = 0;
  for (std::uint32_t s = 0; s < packed.headers.size(); ++s) {
    const auto header = safetensors::parse_header(as_bytes(packed.headers[s]),
                                                  packed.layout.segments()[s].size_bytes);
    ASSERT_TRUE(header) << header.error().message();
    EXPECT_EQ(header->data_offset_bytes % 4096, 0u);
    for (const LayoutEntry& entry : packed.layout.entries()) {
      if (entry.segment != s) continue;
      const TensorInfo& tensor = set[entry.tensor];
      const std::string name = box_entry_name(tensor, entry.box);
      const auto at = std::find_if(header->entries.begin(), header->entries.end(),
                                   [&](const auto& e) { return e.info.name == name; });
      ASSERT_NE(at, header->entries.end()) << name;
      EXPECT_EQ(at->offset_bytes, entry.offset_bytes);
      EXPECT_EQ(at->info.shape, entry.box.extent);
      EXPECT_EQ(at->offset_bytes % dtype_size_bytes(tensor.dtype), 0u) << name;
      EXPECT_EQ(header->metadata.count(name), entry.box == Box::whole(tensor.shape) ? 0u : 1u);
      ++found;
    }
  }
  EXPECT_EQ(found, packed.layout.entries().size());
}

TEST(PackLayoutTest, WritesValidAlignedSafetensorsHeaders) {
  const TensorSet set = small_set();
  const auto packed = pack_layout(set, whole_boxes(set), 1 << 30);
  ASSERT_EQ(packed->layout.segments().size(), 1u);
  EXPECT_EQ(packed->layout.segments()[0].name, "model.safetensors");
  expect_headers_match(set, *packed);
}

TEST(PackLayoutTest, PartsOfTensorsCarryTheirTensorShapeAndOffset) {
  const TensorSet set = small_set();
  const auto packed = pack_layout(
      set, std::vector<TensorBox>{{0, {{2, 0}, {2, 8}}}, {0, {{0, 4}, {2, 4}}}}, 1 << 30);
  ASSERT_TRUE(packed) << packed.error().message();
  expect_headers_match(set, *packed);
  const auto header = safetensors::parse_header(as_bytes(packed->headers[0]),
                                                packed->layout.segments()[0].size_bytes);
  EXPECT_EQ(header->metadata.at("a@2:4,0:8"), R"({"tensor":"a","shape":[4,8],"offset":[2,0]})");
  EXPECT_EQ(header->metadata.at("format"), "pt");
}

TEST(PackLayoutTest, FilesGetASegmentOfTheirOwn) {
  const auto set = TensorSet::create(
      {{"__rekindle_file__/config.json", DType::kU8, {17}}, {"w", DType::kF32, {4}}});
  const auto packed = pack_layout(*set, whole_boxes(*set), 1 << 30);
  ASSERT_EQ(packed->layout.segments().size(), 2u);
  EXPECT_EQ(packed->layout.segments()[0].name, "model.safetensors");
  EXPECT_EQ(packed->layout.segments()[1].name, "rekindle-files.safetensors");
  expect_headers_match(*set, *packed);
}

TEST(PackLayoutTest, FilesStayBelowTheLimitAndTensorsAreNotSplit) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  Rng rng(seed);
  for (int round = 0; round < 30; ++round) {
    std::vector<TensorInfo> infos;
    for (std::uint64_t i = 0; i < 1 + test::below(rng, 40); ++i) {
      infos.push_back({fmt::format("layer.{}.\"weight\"", i),
                       static_cast<DType>(1 + test::below(rng, 16)),
                       test::random_shape(rng, 4, 12)});
    }
    const TensorSet set = *TensorSet::create(infos);
    std::vector<TensorBox> boxes;
    for (TensorIndex i = 0; i < set.size(); ++i) {
      if (test::below(rng, 2) == 0) {
        boxes.push_back({i, Box::whole(set[i].shape)});
      } else {
        boxes.push_back({i, test::random_box(rng, set[i].shape)});
        subtract(
            Box::whole(set[i].shape), boxes.back().box, *[&] {
              static std::vector<Box> rest;
              rest.clear();
              return &rest;
            }());
      }
    }
    const std::uint64_t limit = 40 << 10;
    const auto packed = pack_layout(set, boxes, limit);
    ASSERT_TRUE(packed) << packed.error().message();
    expect_headers_match(set, *packed);
    std::vector<std::size_t> count(packed->layout.segments().size());
    for (const LayoutEntry& entry : packed->layout.entries()) ++count[entry.segment];
    for (std::size_t s = 0; s < count.size(); ++s) {
      EXPECT_TRUE(packed->layout.segments()[s].size_bytes <= limit || count[s] == 1);
    }
  }
}

TEST(PackLayoutTest, BadBoxesAreInvalid) {
  const TensorSet set = small_set();
  EXPECT_FALSE(pack_layout(set, std::vector<TensorBox>{{7, {}}}, 1 << 30));
  EXPECT_FALSE(pack_layout(set, std::vector<TensorBox>{{0, {{0, 0}, {5, 8}}}}, 1 << 30));
  EXPECT_FALSE(pack_layout(
      set, std::vector<TensorBox>{{0, {{0, 0}, {4, 8}}}, {0, {{0, 0}, {1, 1}}}}, 1 << 30));
  const auto clash = TensorSet::create({{"w", DType::kU8, {4}}, {"w@0:2", DType::kU8, {2}}});
  EXPECT_FALSE(
      pack_layout(*clash, std::vector<TensorBox>{{0, {{0}, {2}}}, {1, {{0}, {2}}}}, 1 << 30));
}

}  // namespace
}  // namespace rekindle
