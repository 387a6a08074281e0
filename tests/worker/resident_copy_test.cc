#include "recovery/worker/resident_copy.h"

#include <cstring>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "src/base/blake3.h"
#include "tests/support/process.h"
#include "tests/worker/published_version.h"

namespace rekindle::worker {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr std::uint64_t kMib = 1 << 20;

// Digests that a seal might have recorded: tile i has the digest of the byte i.
std::vector<Digest> made_up(std::size_t count) {
  std::vector<Digest> digests;
  for (std::size_t i = 0; i < count; ++i) {
    const auto byte = static_cast<std::byte>(i);
    digests.push_back(blake3({&byte, 1}));
  }
  return digests;
}

// Blocks of three tiles and of one and a half.
proto::ResidentRecord record() {
  proto::ResidentRecord record;
  record.mutable_id()->set_model("m");
  record.mutable_id()->set_version(1);
  record.add_block_bytes(3 * kMib);
  record.add_block_bytes(kMib + kMib / 2);
  const auto digests = made_up(5);
  record.set_digests(std::string(digest_bytes(digests)));
  return record;
}

proto::ResidentTensor& add(proto::ResidentRecord& record, const char* name, std::uint32_t block,
                           std::uint64_t offset, std::uint64_t bytes) {
  auto& tensor = *record.add_tensors();
  tensor.set_name(name);
  tensor.set_block(block);
  tensor.set_offset(offset);
  tensor.set_bytes(bytes);
  return tensor;
}

Result<OpenResidentPtr> open(const proto::ResidentRecord& record) {
  std::vector<UniqueFd> blocks(static_cast<std::size_t>(record.block_bytes_size()));
  return OpenResident::open(record.SerializeAsString(), std::move(blocks));
}

std::vector<std::string> names(const std::vector<const proto::ResidentTensor*>& tensors) {
  std::vector<std::string> found;
  for (const auto* const tensor : tensors) found.push_back(tensor->name());
  return found;
}

TEST(ResidentCopy, TilesAreCountedOverAllBlocks) {
  const auto opened = *open(record());
  EXPECT_EQ(opened->tiles(), 5u);
  EXPECT_EQ(opened->tile(2).block, 0u);
  EXPECT_EQ(opened->tile(2).offset, 2 * kMib);
  EXPECT_EQ(opened->tile(4).block, 1u);
  EXPECT_EQ(opened->tile(4).offset, kMib);
  EXPECT_EQ(opened->tile(4).bytes, kMib / 2);
}

TEST(ResidentCopy, ATileThatDiffersIsNamedUnlessATensorThatChangesIsInIt) {
  auto sealed = record();
  add(sealed, "fixed", 0, 0, kMib + 1);
  // Its last byte is the first one of tile 4.
  add(sealed, "changes", 1, 10, kMib - 9).set_changes(true);
  const auto opened = *open(sealed);
  auto digests = made_up(5);
  EXPECT_THAT(opened->differing(0, digests), IsEmpty());
  for (Digest& digest : digests) digest = blake3({});
  EXPECT_THAT(opened->differing(0, digests), ElementsAre(0, 1, 2));
  EXPECT_THAT(opened->differing(2, std::span(digests).first(2)), ElementsAre(2));
  EXPECT_THAT(names(opened->tensors_in(1)), ElementsAre("fixed"));
  EXPECT_THAT(names(opened->tensors_in(2)), IsEmpty());
  EXPECT_THAT(names(opened->tensors_in(4)), ElementsAre("changes"));
}

TEST(ResidentCopy, ARecordWithOtherBlocksDigestsOrTensorsIsRefused) {
  EXPECT_EQ(OpenResident::open("nonsense", {}).error().code(), ErrorCode::kCorrupt);
  EXPECT_EQ(OpenResident::open(record().SerializeAsString(), {}).error().code(),
            ErrorCode::kCorrupt);
  auto fewer = record();
  fewer.mutable_digests()->resize(4 * sizeof(Digest));
  EXPECT_EQ(open(fewer).error().code(), ErrorCode::kCorrupt);
  auto outside = record();
  add(outside, "w", 1, kMib, kMib);
  EXPECT_EQ(open(outside).error().code(), ErrorCode::kCorrupt);
  auto named = record();
  add(named, std::string(5000, 'x').c_str(), 0, 0, 1);
  EXPECT_EQ(open(named).error().code(), ErrorCode::kCorrupt);
  auto nowhere = record();
  add(nowhere, "w", 2, 0, 1);
  EXPECT_EQ(open(nowhere).error().code(), ErrorCode::kCorrupt);
  auto huge = record();
  add(huge, "w", 0, 1, ~std::uint64_t{0});
  EXPECT_EQ(open(huge).error().code(), ErrorCode::kCorrupt);
}

// The version has one tensor 'w' of 1024 rows of 1024 floats. Element i is i.
class RefillTest : public ::testing::Test {
 protected:
  static constexpr std::uint64_t kRows = 1024;
  static constexpr std::uint64_t kColumns = 1024;

  void SetUp() override {
    publish_rows(*store_, dir_ / "made", {"m", 1}, kRows);
    stored_ = store_->find({"m", 1}).at(0);
    std::vector<float> values(kRows * kColumns);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
    const LayoutEntry& entry = stored_->manifest.layout.entries().front();
    std::fstream file(stored_->segments.at(entry.segment)->path(),
                      std::ios::binary | std::ios::in | std::ios::out);
    file.seekp(static_cast<std::streamoff>(entry.offset_bytes));
    file.write(reinterpret_cast<const char*>(values.data()),
               static_cast<std::streamsize>(values.size() * sizeof(float)));
    ASSERT_TRUE(file.flush());
  }
  static float element(const std::vector<std::byte>& bytes, std::uint64_t at) {
    float value = 0;
    std::memcpy(&value, bytes.data() + at, sizeof value);
    return value;
  }

  testing::TempDir dir_{true};
  std::unique_ptr<store::SegmentStore> store_ = std::move(*store::SegmentStore::open(
      {.directory = dir_ / "store", .evidence = store::Evidence::kStamps}));
  std::shared_ptr<const store::StoredVersion> stored_;
  std::vector<std::byte> tile_ = std::vector<std::byte>(kMib, std::byte{0xff});
};

TEST_F(RefillTest, ATileGetsTheBytesOfABoxThatBeginsInAnotherTile) {
  auto sealed = record();
  // Columns 512 to 1023, half a tile behind the begin of the block: tile 1 has its elements from
  // half a MiB on.
  auto& tensor = add(sealed, "mine", 0, kMib / 2, 2 * kMib);
  tensor.mutable_source()->set_tensor("w");
  for (const std::uint64_t value : {std::uint64_t{0}, std::uint64_t{512}}) {
    tensor.mutable_source()->add_offset(value);
  }
  for (const std::uint64_t value : {kRows, std::uint64_t{512}}) {
    tensor.mutable_source()->add_extent(value);
  }
  ASSERT_TRUE(refill(**open(sealed), 1, *stored_, tile_));
  for (std::uint64_t i = 0; i < kMib / sizeof(float); i += 7) {
    const std::uint64_t own = kMib / 2 / sizeof(float) + i;
    ASSERT_EQ(element(tile_, i * sizeof(float)),
              static_cast<float>(own / 512 * kColumns + 512 + own % 512));
  }
}

TEST_F(RefillTest, BytesWithoutASourceOrWithAWrongOneStay) {
  auto sealed = record();
  add(sealed, "no source", 0, 0, 4);
  add(sealed, "of another size", 0, 4, 4).mutable_source()->set_tensor("w");
  add(sealed, "unknown", 0, 8, 4).mutable_source()->set_tensor("v");
  auto& outside = add(sealed, "outside", 0, 12, 4);
  outside.mutable_source()->set_tensor("w");
  for (const std::uint64_t value : {kRows, std::uint64_t{0}}) {
    outside.mutable_source()->add_offset(value);
  }
  for (int i = 0; i < 2; ++i) outside.mutable_source()->add_extent(1);
  ASSERT_TRUE(refill(**open(sealed), 0, *stored_, tile_));
  EXPECT_EQ(tile_, std::vector<std::byte>(kMib, std::byte{0xff}));
}

}  // namespace
}  // namespace rekindle::worker
