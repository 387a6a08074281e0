// A committed copy of which some tiles are wrong becomes a pull that lacks only these.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tests/store/store_fixture.h"

namespace rekindle::store {
namespace {

using ::testing::HasSubstr;

class SetAsideTest : public StoreTest {
 protected:
  // The first, one that the layout holds in part where there is one, and the last.
  static std::vector<TileIndex> some_tiles(const Manifest& manifest) {
    const LayoutTiles tiles = tiles_of_layout(*manifest.checkpoint, manifest.layout);
    const auto ranges = tiles.held.ranges();
    std::set<TileIndex> chosen{ranges.front().first, ranges.back().second - 1};
    if (!tiles.partial.empty()) chosen.insert(tiles.partial.front());
    return {chosen.begin(), chosen.end()};
  }
  static std::uint64_t held_tiles(const Manifest& manifest) {
    return tiles_of_layout(*manifest.checkpoint, manifest.layout).held.count();
  }
};

TEST_F(SetAsideTest, TheRestIsKeptAndTheCopyIsMadeWholeInTheSameFiles) {
  for (const auto& boxes : {all_boxes(*checkpoint()), shard_boxes(*checkpoint())}) {
    auto copy = pull(boxes);
    const Manifest manifest = copy->manifest;
    const auto bad = some_tiles(manifest);
    const auto used = store_->used_bytes();
    std::vector<ino_t> inodes;
    for (const auto& segment : copy->segments) inodes.push_back(segment->stamp()->inode);
    const auto aside = store_->set_aside(*copy, bad);
    ASSERT_TRUE(aside) << aside.error().message();
    EXPECT_EQ(store_->find(id_, manifest.layout.digest()), nullptr);
    EXPECT_TRUE(store_->is_left_over(id_, manifest.layout.digest()));
    EXPECT_LE(store_->used_bytes(), used + 64 * 1024) << "the same files";
    copy.reset();
    auto pending = store_->begin(aside->checkpoint, aside->packed);
    ASSERT_TRUE(pending) << pending.error().message();
    EXPECT_EQ((*pending)->verified().count(), held_tiles(manifest) - bad.size());
    for (const TileIndex tile : bad) {
      EXPECT_FALSE((*pending)->verified().test(tile));
      fill_tiles(**pending, *source_, tile, tile + 1);
    }
    const auto whole = store_->commit(std::move(*pending));
    ASSERT_TRUE(whole) << whole.error().message();
    EXPECT_TRUE(verify_version(**whole, 2, nullptr));
    EXPECT_EQ((*whole)->manifest.part_digests, manifest.part_digests);
    EXPECT_EQ((*whole)->manifest.part_proofs, manifest.part_proofs);
    for (std::size_t i = 0; i < inodes.size(); ++i) {
      EXPECT_EQ((*whole)->segments[i]->stamp()->inode, inodes[i]);
    }
    ASSERT_TRUE(store_->retire(id_));
  }
}

TEST_F(SetAsideTest, IsResumedByTheNextProcess) {
  const auto copy = pull(all_boxes(*checkpoint()));
  const auto aside = store_->set_aside(*copy, std::vector<TileIndex>{0});
  ASSERT_TRUE(aside) << aside.error().message();
  reopen();
  EXPECT_TRUE(store_->versions().empty());
  const auto pending = store_->begin(aside->checkpoint, aside->packed);
  ASSERT_TRUE(pending) << pending.error().message();
  EXPECT_EQ((*pending)->verified().count(), held_tiles(copy->manifest) - 1);
}

TEST_F(SetAsideTest, FilesThatSomebodyMayWriteToAreNot) {
  const auto copy = pull(all_boxes(*checkpoint()));
  const fs::path file = copy->segments[0]->path();
  const int fd = ::open(file.c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_GE(fd, 0);
  const auto open = store_->set_aside(*copy, std::vector<TileIndex>{0});
  ASSERT_FALSE(open);
  EXPECT_EQ(open.error().code(), ErrorCode::kUnavailable);
  EXPECT_THAT(open.error().message(), HasSubstr(file.string()));
  void* const mapped = ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  ::close(fd);
  EXPECT_EQ(store_->set_aside(*copy, std::vector<TileIndex>{0}).error().code(),
            ErrorCode::kUnavailable);
  ::munmap(mapped, 4096);
  EXPECT_EQ(store_->find(id_, copy->manifest.layout.digest()), copy) << "as it was";
  EXPECT_TRUE(store_->set_aside(*copy, std::vector<TileIndex>{0}));
  EXPECT_EQ(store_->set_aside(*copy, std::vector<TileIndex>{0}).error().code(),
            ErrorCode::kNotFound);
}

TEST_F(SetAsideTest, ATruncatedFileIsNot) {
  const auto copy = pull(all_boxes(*checkpoint()));
  ASSERT_EQ(::truncate(copy->segments[0]->path().c_str(), 4096), 0);
  EXPECT_EQ(store_->set_aside(*copy, std::vector<TileIndex>{0}).error().code(),
            ErrorCode::kCorrupt);
}

TEST_F(SetAsideTest, GoesWithItsVersion) {
  auto copy = pull(all_boxes(*checkpoint()));
  const Digest layout = copy->manifest.layout.digest();
  ASSERT_TRUE(store_->set_aside(*copy, std::vector<TileIndex>{0}));
  copy.reset();
  ASSERT_TRUE(store_->retire(id_));
  EXPECT_FALSE(store_->is_left_over(id_, layout));
  EXPECT_EQ(store_->used_bytes(), 0u);
}

}  // namespace
}  // namespace rekindle::store
