// What an agent serves of a copy before it has all of it, and what stays when it is committed.
#include "recovery/agent/served_versions.h"

#include <algorithm>
#include <vector>

#include "recovery/rpc/convert.h"
#include "tests/store/store_fixture.h"

namespace rekindle::agent {
namespace {

// Changes the file, and not one byte of it.
void touch(const std::filesystem::path& path) { ASSERT_EQ(::chmod(path.c_str(), 0640), 0); }

class ServedVersionsTest : public store::StoreTest {
 protected:
  std::unique_ptr<store::PendingVersion> begin_pull() {
    auto pending = begin(store::all_boxes(*checkpoint()));
    held_ = std::make_shared<swarm::HeldTiles>(pending->verified());
    served_.add_pending(*pending, held_);
    key_ = key_of(pending->manifest());
    return pending;
  }
  void fill(store::PendingVersion& pending, TileIndex first, TileIndex last) {
    store::fill_tiles(pending, *source_, first, last);
    for (TileIndex tile = first; tile < last; ++tile) held_->set(tile);
  }
  const Served* find() const { return served_.find(key_); }
  TileIndex tiles() const { return checkpoint()->tiles.tile_count(); }

  transport::SegmentRegistry registry_;
  ServedVersions served_{registry_};
  std::shared_ptr<swarm::HeldTiles> held_;
  CopyKey key_;
};

TEST_F(ServedVersionsTest, ACopyThatIsBeingFilledIsFoundWithItsMetadataButIsNoNewestVersion) {
  const auto pending = begin_pull();
  const Served* served = find();
  ASSERT_NE(served, nullptr);
  EXPECT_FALSE(served->complete());
  EXPECT_EQ(served->regions.size(), pending->manifest().layout.segments().size());
  EXPECT_EQ(served_.layout_bytes(key_.layout), pending->manifest().layout.serialize());
  EXPECT_EQ(served_.tensor_set_bytes(checkpoint()->tensors.digest()),
            checkpoint()->tensors.serialize());
  ASSERT_NE(served_.checkpoint(checkpoint()->root), nullptr);
  EXPECT_EQ(served_.checkpoint(checkpoint()->root)->tile_digests, checkpoint()->tile_digests);
  EXPECT_FALSE(served_.newest_version(id_.model)) << "nobody may resolve `latest` to it";
}

TEST_F(ServedVersionsTest, OnlyWhatHasVerifiedIsAnnounced) {
  const auto pending = begin_pull();
  fill(*pending, 2, 5);
  const proto::Holding holding = make_holding(*find());
  EXPECT_FALSE(holding.complete());
  EXPECT_TRUE(holding.whole());
  const auto runs = rpc::from_proto(holding.held(), tiles());
  ASSERT_TRUE(runs);
  EXPECT_EQ(*runs, (rpc::TileRuns{{2, 5}}));
  EXPECT_TRUE(find()->holds(4));
  EXPECT_FALSE(find()->holds(5));
}

TEST_F(ServedVersionsTest, ReadersOfACopyGoOnWhenItIsCommitted) {
  auto pending = begin_pull();
  fill(*pending, 0, tiles() / 2);
  const auto regions = find()->regions;
  const auto before = registry_.lookup(regions[0]);
  ASSERT_TRUE(before);
  fill(*pending, tiles() / 2, tiles());
  const auto stored = store_->commit(std::move(pending));
  ASSERT_TRUE(stored) << stored.error().message();
  served_.add(*stored);
  ASSERT_NE(find(), nullptr);
  EXPECT_TRUE(find()->complete());
  EXPECT_EQ(find()->regions, regions) << "sessions name these";
  const auto after = registry_.lookup(regions[0]);
  ASSERT_TRUE(after);
  EXPECT_EQ((*after)->bytes.data(), (*before)->bytes.data());
  EXPECT_EQ((*stored)->segments[0]->bytes().data(), (*before)->bytes.data());
  EXPECT_EQ(served_.newest_version(id_.model), 1u);
  EXPECT_TRUE(make_holding(*find()).complete());
  EXPECT_FALSE(make_holding(*find()).has_held());
  EXPECT_TRUE(store::verify_version(**stored, 1, nullptr));
}

TEST_F(ServedVersionsTest, B6WhatNobodyHasVerifiedIsAnnouncedAsSuch) {
  auto pending = begin_pull();
  fill(*pending, 0, tiles());
  EXPECT_FALSE(make_holding(*find()).verified()) << "it is not complete yet";
  auto stored = *store_->commit(std::move(pending));
  served_.add(stored);
  EXPECT_TRUE(make_holding(*find()).verified());
  served_.remove(id_);
  stored.reset();
  reopen();
  stored = store_->versions().at(0);
  served_.add(stored);
  EXPECT_TRUE(make_holding(*find()).complete());
  EXPECT_FALSE(make_holding(*find()).verified());
  ASSERT_TRUE(stored->verification->record(*stored->verification->stamp()));
  EXPECT_TRUE(make_holding(*find()).verified());
  ::usleep(20'000);
  touch(stored->segments[0]->path());
  EXPECT_FALSE(make_holding(*find()).verified());
}

TEST_F(ServedVersionsTest, ACopyThatTheStoreHasReplacedIsServedAnew) {
  const auto first = pull(store::all_boxes(*checkpoint()));
  served_.add(first);
  key_ = key_of(first->manifest);
  const auto regions = find()->regions;
  ASSERT_TRUE(store_->retire(id_));
  const auto second = pull(store::all_boxes(*checkpoint()));
  served_.add(second);
  ASSERT_NE(find(), nullptr);
  EXPECT_EQ(find()->stored, second);
  EXPECT_EQ(find()->segments[0], second->segments[0]);
  EXPECT_FALSE(registry_.lookup(regions[0])) << "its readers must come back";
}

TEST_F(ServedVersionsTest, AnAbandonedCopyIsFoundByNobodyAndItsRegionsGoWhenTheReadersHaveGone) {
  auto pending = begin_pull();
  fill(*pending, 0, 3);
  const auto regions = find()->regions;
  const auto reader = registry_.lookup(regions[0]);
  ASSERT_TRUE(reader);
  EXPECT_EQ(served_.withdraw_pending(key_), regions);
  EXPECT_EQ(find(), nullptr);
  EXPECT_EQ(served_.checkpoint(checkpoint()->root), nullptr);
  EXPECT_TRUE(registry_.lookup(regions[0])) << "sessions end first";
  for (const auto& region : regions) registry_.remove(region);
  const auto bytes = (*reader)->bytes;
  const std::vector<std::byte> before(bytes.begin(), bytes.end());
  store_->discard(std::move(pending));
  // Whoever still reads has the mapping, though the files are gone.
  EXPECT_TRUE(std::equal(bytes.begin(), bytes.end(), before.begin(), before.end()));
  EXPECT_FALSE(registry_.lookup(regions[0]));
}

TEST_F(ServedVersionsTest, ACommittedCopyIsNotWithdrawn) {
  served_.add(source_);
  const CopyKey key = key_of(source_->manifest);
  EXPECT_TRUE(served_.withdraw_pending(key).empty());
  EXPECT_NE(served_.find(key), nullptr);
}

TEST_F(ServedVersionsTest, TheSameBytesAsTwoVersionsAreTwoCopies) {
  const auto twin = store::publish(*source_store_, {id_.model, 2}, source_path());
  ASSERT_TRUE(twin) << twin.error().message();
  ASSERT_EQ((*twin)->manifest.checkpoint->tile_digests, checkpoint()->tile_digests);
  served_.add(source_);
  served_.add(*twin);
  EXPECT_EQ(served_.all().size(), 2u) << "the coordinator has to hear of both";
  EXPECT_EQ(served_.newest_version(id_.model), 2u);
  const auto regions = served_.find(key_of((*twin)->manifest))->regions;
  EXPECT_NE(regions, served_.find(key_of(source_->manifest))->regions);
  served_.remove(id_);
  EXPECT_EQ(served_.find(key_of(source_->manifest)), nullptr);
  ASSERT_NE(served_.find(key_of((*twin)->manifest)), nullptr);
  EXPECT_TRUE(registry_.lookup(regions[0])) << "its readers go on";
}

TEST_F(ServedVersionsTest, Row6RetiringAVersionTakesTheCopyThatIsBeingFilledAlong) {
  const auto pending = begin_pull();
  const auto regions = find()->regions;
  served_.remove(id_);
  EXPECT_EQ(find(), nullptr);
  EXPECT_FALSE(registry_.lookup(regions[0]));
}

}  // namespace
}  // namespace rekindle::agent
