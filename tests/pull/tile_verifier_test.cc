// Tiles of a copy that a device has written, against a real store.
#include "recovery/pull/tile_verifier.h"

#include <cstring>

#include <gtest/gtest.h>

#include "tests/store/store_fixture.h"

namespace rekindle::pull {
namespace {

constexpr std::uint64_t kVerifiedRows = 768;
constexpr std::uint64_t kVerifiedColumns = 3072;

class TileVerifierTest : public ::testing::Test {
 protected:
  void SetUp() override {
    store::write_safetensors(directory_.path() / "in" / "model.safetensors",
                             {{"w", DType::kBF16, {kVerifiedRows, kVerifiedColumns}}}, 5);
    whole_store_ = store::open_store(directory_.path() / "whole");
    auto whole = store::publish(*whole_store_, {"m", 1}, directory_.path() / "in");
    ASSERT_TRUE(whole) << whole.error().message();
    whole_ = *whole;
    store_ = store::open_store(directory_.path() / "store");
  }
  const Checkpoint& checkpoint() const { return *whole_->manifest.checkpoint; }
  TileIndex tiles() const { return checkpoint().tiles.tile_count(); }
  // Begins an empty copy of these rows.
  std::unique_ptr<store::PendingVersion> begin(std::uint64_t first, std::uint64_t rows) {
    const TensorBox boxes[] = {{0, {{first, 0}, {rows, kVerifiedColumns}}}};
    auto copy = store_->begin(whole_->manifest.checkpoint,
                              *pack_layout(checkpoint().tensors, boxes, 1 << 30));
    if (!copy) throw std::runtime_error(copy.error().message());
    return std::move(*copy);
  }
  // Writes the right rows to the copy, like a device.
  void write(store::PendingVersion& copy, std::uint64_t first) const {
    const LayoutEntry& entry = copy.manifest().layout.entries()[0];
    const auto from = whole_->array(whole_->manifest.layout.entries()[0]);
    const std::uint64_t row_bytes = kVerifiedColumns * 2;
    std::memcpy(copy.segment(entry.segment).data() + entry.offset_bytes,
                from.data() + first * row_bytes, entry.box.extent[0] * row_bytes);
  }
  std::size_t verify(store::PendingVersion& copy) {
    std::vector<TileIndex> all;
    for (TileIndex tile = 0; tile < tiles(); ++tile) all.push_back(tile);
    const std::shared_ptr<store::PendingVersion> borrowed(std::shared_ptr<void>(), &copy);
    return TileVerifier(borrowed, verified_).verify_in_place(all, pool_);
  }

  store::TempDirectory directory_;
  std::unique_ptr<store::SegmentStore> whole_store_;
  std::unique_ptr<store::SegmentStore> store_;
  std::shared_ptr<const store::StoredVersion> whole_;
  const std::shared_ptr<VerifiedTiles> verified_ =
      std::make_shared<VerifiedTiles>(TileSet(1 << 10));
  WorkerPool pool_{"t-digest", 2, 64};
};

TEST_F(TileVerifierTest, TilesThatAreRightAreMarked) {
  const auto copy = begin(0, kVerifiedRows);
  ASSERT_GT(tiles(), 2u);
  write(*copy, 0);
  EXPECT_EQ(verify(*copy), tiles());
  EXPECT_EQ(verified_->count(), tiles());
}

TEST_F(TileVerifierTest, AWrongTileIsLeftToBeFetched) {
  auto copy = begin(0, kVerifiedRows);
  write(*copy, 0);
  const LayoutEntry& entry = copy->manifest().layout.entries()[0];
  copy->segment(entry.segment)[entry.offset_bytes + 7] ^= std::byte{1};
  EXPECT_EQ(verify(*copy), tiles() - 1);
  EXPECT_FALSE(verified_->test(0));
  EXPECT_TRUE(verified_->test_range(1, tiles()));
  const auto committed = store_->commit(std::move(copy));
  EXPECT_FALSE(committed) << "a tile is missing";
}

TEST_F(TileVerifierTest, AnEmptyCopyHasNoRightTile) {
  const auto copy = begin(0, kVerifiedRows);
  EXPECT_EQ(verify(*copy), 0u);
  EXPECT_EQ(verified_->count(), 0u);
}

TEST_F(TileVerifierTest, PartsOfTilesAreLeftToBeFetched) {
  const auto copy = begin(100, 300);
  write(*copy, 100);
  EXPECT_EQ(verify(*copy), 0u) << "every tile is cut by these rows";
}

}  // namespace
}  // namespace rekindle::pull
