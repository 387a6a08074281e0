#include <sys/mount.h>

#include "tests/store/store_fixture.h"

namespace rekindle::store {
namespace {

using ::testing::HasSubstr;

class PullTest : public StoreTest {};

TileIndex partial_tile(const Manifest& manifest) {
  return tiles_of_layout(*manifest.checkpoint, manifest.layout).partial.at(0);
}

TEST_F(PullTest, AFullPullHasTheSameRootAndValidFiles) {
  const auto version = pull(all_boxes(*checkpoint()));
  EXPECT_TRUE(verify_version(*version, 2, nullptr));
  EXPECT_EQ(version->manifest.checkpoint->root, source_->manifest.checkpoint->root);
  EXPECT_TRUE(version->manifest.part_digests.empty());
  for (const SegmentSpec& segment : version->manifest.layout.segments()) {
    EXPECT_TRUE(safetensors::read_header(version->directory / segment.name)) << segment.name;
  }
  EXPECT_FALSE(fs::exists(version->directory / "rekindle.resume"));
  reopen();
  ASSERT_EQ(store_->versions().size(), 1u);
  EXPECT_TRUE(verify_version(*store_->versions()[0], 2, nullptr));
  EXPECT_NE(store_->find(id_, version->manifest.layout.digest()), nullptr);
}

TEST_F(PullTest, AShardVerifiesWithItsPartsAfterRestart) {
  const auto version = pull(shard_boxes(*checkpoint()));
  EXPECT_FALSE(version->manifest.part_digests.empty());
  EXPECT_TRUE(verify_version(*version, 2, nullptr));
  reopen();
  const auto again = store_->versions().at(0);
  EXPECT_EQ(again->manifest.part_digests, version->manifest.part_digests);
  EXPECT_TRUE(verify_version(*again, 2, nullptr));
}

TEST_F(PullTest, AShardKeepsTheProofsOfItsParts) {
  const auto version = pull(shard_boxes(*checkpoint()));
  std::size_t kept = 0;
  for (const PartDigest& part : version->manifest.part_digests) {
    for (const KeptProof& proof : kept_proofs(*checkpoint(), version->manifest.layout, part.tile)) {
      ++kept;
      EXPECT_EQ(version->manifest.part_proofs.substr(part.proofs_begin + proof.offset, proof.bytes),
                proof_of(*source_, part.tile, proof.part));
    }
  }
  EXPECT_EQ(kept, 16u) << "tiles of embed.weight";
  reopen();
  const Manifest& again = store_->versions().at(0)->manifest;
  EXPECT_EQ(again.part_proofs, version->manifest.part_proofs);
  EXPECT_EQ(again.part_digests, version->manifest.part_digests);
}

// A copy that says it can prove its parts can prove all of them.
TEST_F(PullTest, AShardThatLacksAProofKeepsNone) {
  auto pending = begin(shard_boxes(*checkpoint()));
  fill_all(*pending, *source_);
  const TileIndex tile =
      checkpoint()->tiles.first_tile(*checkpoint()->tensors.find("embed.weight"));
  const auto kept = kept_proofs(*checkpoint(), pending->manifest().layout, tile);
  ASSERT_EQ(kept.size(), 1u);
  pending->keep_proof(tile, kept[0].part, std::string(kept[0].bytes, '\0'));
  const auto version = store_->commit(std::move(pending));
  ASSERT_TRUE(version) << version.error().message();
  EXPECT_TRUE((*version)->manifest.part_proofs.empty());
  EXPECT_TRUE(verify_version(**version, 2, nullptr));
}

TEST_F(PullTest, TheBytesOfAShardAreThoseOfItsBoxes) {
  const auto version = pull(shard_boxes(*checkpoint()));
  for (const LayoutEntry& entry : version->manifest.layout.entries()) {
    const TensorInfo& tensor = checkpoint()->tensors[entry.tensor];
    const auto expected =
        test::naive_extract(entry.box, Box::whole(tensor.shape),
                            source_->array(source_->manifest.layout.entries_of(entry.tensor)[0]),
                            dtype_size_bytes(tensor.dtype));
    const auto actual = version->array(entry);
    EXPECT_TRUE(std::equal(actual.begin(), actual.end(), expected.begin(), expected.end()))
        << tensor.name;
  }
}

TEST_F(PullTest, WhatWasVerifiedIsNotLostWithTheProcess) {
  const TileIndex half = checkpoint()->tiles.tile_count() / 2;
  for (const auto& boxes : {all_boxes(*checkpoint()), shard_boxes(*checkpoint())}) {
    auto pending = begin(boxes);
    EXPECT_EQ(pending->verified().count(), 0u);
    fill_tiles(*pending, *source_, 0, half);
    const LayoutTiles tiles = tiles_of_layout(*checkpoint(), pending->manifest().layout);
    pending.reset();
    reopen();
    EXPECT_TRUE(store_->versions().empty());
    EXPECT_GT(store_->used_bytes(), 0u);
    pending = begin(boxes);
    for (TileIndex tile = 0; tile < checkpoint()->tiles.tile_count(); ++tile) {
      EXPECT_EQ(pending->verified().test(tile), tile < half && tiles.held.test(tile)) << tile;
    }
    fill_tiles(*pending, *source_, half, checkpoint()->tiles.tile_count());
    const auto version = store_->commit(std::move(pending));
    ASSERT_TRUE(version) << version.error().message();
    EXPECT_TRUE(verify_version(**version, 2, nullptr));
    ASSERT_TRUE(store_->retire(id_));
  }
}

TEST_F(PullTest, TilesThatWereDamagedSinceAreNotTakenForVerified) {
  auto pending = begin(shard_boxes(*checkpoint()));
  fill_all(*pending, *source_);
  const Manifest manifest = pending->manifest();
  const TileIndex part = partial_tile(manifest);
  const TileIndex whole = checkpoint()->tiles.first_tile(*checkpoint()->tensors.find("scalar"));
  for (const TileIndex tile : {part, whole}) {
    const LayoutEntry& entry = manifest.layout.entries_of(checkpoint()->tiles.tensor_of(tile))[0];
    auto byte = pending->segment(entry.segment).subspan(entry.offset_bytes, 1);
    byte[0] ^= std::byte{1};
  }
  const TileIndex all = tiles_of_layout(*checkpoint(), manifest.layout).held.count();
  pending.reset();
  reopen();
  pending = begin(shard_boxes(*checkpoint()));
  EXPECT_FALSE(pending->verified().test(part));
  EXPECT_FALSE(pending->verified().test(whole));
  EXPECT_EQ(pending->verified().count(), all - 2);
  const auto early = store_->commit(std::move(pending));
  ASSERT_FALSE(early);
  EXPECT_THAT(early.error().message(), HasSubstr("2 of"));
}

TEST_F(PullTest, ADamagedResumeFileMeansStartingOver) {
  auto pending = begin(all_boxes(*checkpoint()));
  fill_all(*pending, *source_);
  const fs::path resume = pending->directory() / "rekindle.resume";
  pending.reset();
  for (const bool truncate : {true, false}) {
    std::string bytes = read_bytes(resume);
    if (truncate) {
      bytes.resize(bytes.size() - 1);
    } else {
      bytes[20] ^= 1;
    }
    write_bytes(resume, bytes);
    pending = begin(all_boxes(*checkpoint()));
    EXPECT_EQ(pending->verified().count(), 0u);
    fill_all(*pending, *source_);
    pending.reset();
  }
}

// By another process, to any length.
TEST_F(PullTest, ASegmentCutShortWhileItIsFilledIsNamedAndTheNextTryGoesOn) {
  for (const std::uint64_t left : {0ul, 5000ul}) {
    auto pending = begin(all_boxes(*checkpoint()));
    fill_all(*pending, *source_);
    EXPECT_TRUE(pending->check_sizes());
    const std::string name = pending->manifest().layout.segments()[0].name + ".partial";
    fs::resize_file(pending->directory() / name, left);
    EXPECT_EQ(pending->check_sizes().error().code(), ErrorCode::kInternal);
    EXPECT_THAT(pending->access_error().message(), HasSubstr(name));
    const auto early = store_->commit(std::move(pending));
    ASSERT_FALSE(early);
    EXPECT_EQ(early.error().code(), ErrorCode::kInternal);
    EXPECT_THAT(early.error().message(), HasSubstr(name));
    EXPECT_THAT(early.error().message(), HasSubstr("start the same command again"));
  }
  auto pending = begin(all_boxes(*checkpoint()));
  EXPECT_LT(pending->verified().count(), checkpoint()->tiles.tile_count());
  fill_all(*pending, *source_);
  EXPECT_TRUE(store_->commit(std::move(pending)));
}

TEST_F(PullTest, AResumeFileCutShortWhileItIsInUseIsNamedAndNobodyCrashes) {
  for (const std::uint64_t left : {0ul, 10ul}) {
    auto pending = begin(shard_boxes(*checkpoint()));
    const fs::path resume = pending->directory() / "rekindle.resume";
    fill_all(*pending, *source_);
    fs::resize_file(resume, left);
    fill_tiles(*pending, *source_, 0, 1);  // marks one more
    const auto early = store_->commit(std::move(pending));
    ASSERT_FALSE(early);
    EXPECT_EQ(early.error().code(), ErrorCode::kInternal);
    EXPECT_THAT(early.error().message(), HasSubstr(resume.string()));
  }
  pull(shard_boxes(*checkpoint()));
}

TEST_F(PullTest, AnIncompletePullIsNotCommittedAndCanGoOn) {
  auto pending = begin(all_boxes(*checkpoint()));
  fill_tiles(*pending, *source_, 1, checkpoint()->tiles.tile_count());
  const auto early = store_->commit(std::move(pending));
  ASSERT_FALSE(early);
  EXPECT_EQ(early.error().code(), ErrorCode::kInvalid);
  EXPECT_TRUE(store_->versions().empty());
  pending = begin(all_boxes(*checkpoint()));
  fill_tiles(*pending, *source_, 0, 1);
  EXPECT_TRUE(store_->commit(std::move(pending)));
}

TEST_F(PullTest, OneCopyIsFilledByOneAtATime) {
  auto pending = begin(all_boxes(*checkpoint()));
  const auto second = store_->begin(checkpoint(), pack(*checkpoint(), all_boxes(*checkpoint())));
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().code(), ErrorCode::kUnavailable);
  EXPECT_NE(begin(shard_boxes(*checkpoint())), nullptr);  // another layout is another copy
}

// Two pulls look for a copy, one of them commits, and then the other one begins: it asks again.
TEST_F(PullTest, ACopyThatWasCommittedMeanwhileIsNoMistakeOfTheCaller) {
  pull(all_boxes(*checkpoint()));
  const auto second = store_->begin(checkpoint(), pack(*checkpoint(), all_boxes(*checkpoint())));
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().code(), ErrorCode::kUnavailable);
  EXPECT_THAT(second.error().message(), HasSubstr("already here"));
}

TEST_F(PullTest, AVersionWithAnotherRootIsDenied) {
  pull(shard_boxes(*checkpoint()));
  std::vector<Digest> digests = checkpoint()->tile_digests;
  digests[0].bytes[0] ^= 1;
  const Digest root = checkpoint_root(id_, checkpoint()->tensors, checkpoint()->tiles, digests);
  const auto other = *Checkpoint::create(id_, checkpoint()->tensors, digests, root);
  const auto denied = store_->begin(other, pack(*other, all_boxes(*other)));
  ASSERT_FALSE(denied);
  EXPECT_EQ(denied.error().code(), ErrorCode::kDenied);
  EXPECT_THAT(denied.error().message(), HasSubstr(root.hex()));
}

TEST_F(PullTest, AHalfDoneCopyOfAnotherRootIsReplaced) {
  auto pending = begin(all_boxes(*checkpoint()));
  fill_all(*pending, *source_);
  pending.reset();
  std::vector<Digest> digests = checkpoint()->tile_digests;
  digests[0].bytes[0] ^= 1;
  const Digest root = checkpoint_root(id_, checkpoint()->tensors, checkpoint()->tiles, digests);
  const auto other = *Checkpoint::create(id_, checkpoint()->tensors, digests, root);
  const auto fresh = store_->begin(other, pack(*other, all_boxes(*other)));
  ASSERT_TRUE(fresh) << fresh.error().message();
  EXPECT_EQ((*fresh)->verified().count(), 0u);
}

TEST_F(PullTest, BeyondTheBudgetNamesTheBytesMissing) {
  store_.reset();
  store_ = open_store(store_path(), 1'000'000);
  const auto packed = pack(*checkpoint(), all_boxes(*checkpoint()));
  const std::uint64_t bytes = packed.layout.segment_bytes();
  const auto pending = store_->begin(checkpoint(), pack(*checkpoint(), all_boxes(*checkpoint())));
  ASSERT_FALSE(pending);
  EXPECT_EQ(pending.error().code(), ErrorCode::kExhausted);
  EXPECT_THAT(pending.error().message(),
              HasSubstr(fmt::format("{} are missing", bytes - 1'000'000)));
  EXPECT_EQ(store_->used_bytes(), 0u);
  EXPECT_EQ(store_->missing_bytes(checkpoint()->id, packed.layout), bytes - 1'000'000);
}

// The pages of a new copy are allocated while it is filled, and not more than there is room for.
TEST_F(PullTest, TheRoomOfTheFileSystemIsLookedAtBeforeAnythingIsWritten) {
  const auto packed = pack(*checkpoint(), all_boxes(*checkpoint()));
  const fs::path mount = temp_.path() / "small";
  fs::create_directories(mount);
  if (::mount("tmpfs", mount.c_str(), "tmpfs", 0, "size=4m") != 0) {
    GTEST_SKIP() << "only root mounts";
  }
  {
    auto store = open_store(mount / "store", 1 << 30);
    const auto pending = store->begin(checkpoint(), packed);
    ASSERT_FALSE(pending);
    EXPECT_EQ(pending.error().code(), ErrorCode::kExhausted);
    EXPECT_THAT(pending.error().message(), HasSubstr("their file system has"));
    EXPECT_EQ(store->used_bytes(), 0u);
  }
  EXPECT_EQ(::umount(mount.c_str()), 0);
}

TEST_F(PullTest, EveryPageOfACopyIsThereInTheEnd) {
  auto pending = begin(all_boxes(*checkpoint()));
  const fs::path file = pending->mapped(0)->path();
  const auto size = fs::file_size(file);
  const auto allocated = [&] {
    struct stat status {};
    EXPECT_EQ(::stat(file.c_str(), &status), 0);
    return static_cast<std::uintmax_t>(status.st_blocks) * 512;
  };
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  while (allocated() < size && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::yield();
  }
  EXPECT_GE(allocated(), size);
}

// On a disk all pages come before the files are watched for the writes of others.
TEST_F(PullTest, ACopyOnADiskIsVerifiedAtItsCommit) {
  const fs::path disk = fs::temp_directory_path() / fmt::format("rekindle-test-{}", ::getpid());
  {
    auto store = open_store(disk / "store");
    auto pending = store->begin(checkpoint(), pack(*checkpoint(), shard_boxes(*checkpoint())));
    ASSERT_TRUE(pending) << pending.error().message();
    fill_all(**pending, *source_);
    const auto version = store->commit(std::move(*pending));
    ASSERT_TRUE(version) << version.error().message();
    EXPECT_EQ((*version)->verification->state(), CopyState::kVerified);
    EXPECT_FALSE((*version)->manifest.part_proofs.empty());
  }
  fs::remove_all(disk);
}

// The resume file is not synced: a power cut may take any page of it.
TEST_F(PullTest, AProofThatWasLostWithThePowerIsNotKept) {
  auto pending = begin(shard_boxes(*checkpoint()));
  fill_all(*pending, *source_);
  const fs::path resume = pending->directory() / "rekindle.resume";
  pending.reset();
  {
    std::fstream file(resume, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(-40, std::ios::end);
    file << std::string(20, 'x');
  }
  pending = begin(shard_boxes(*checkpoint()));
  EXPECT_EQ(pending->verified().count(),
            tiles_of_layout(*checkpoint(), pending->manifest().layout).held.count());
  const auto version = store_->commit(std::move(pending));
  ASSERT_TRUE(version) << version.error().message();
  EXPECT_TRUE((*version)->manifest.part_proofs.empty());
}

TEST_F(PullTest, PartialBytesCountAgainstTheBudgetAlsoAfterRestart) {
  auto pending = begin(all_boxes(*checkpoint()));
  const std::uint64_t bytes = pending->manifest().layout.segment_bytes();
  EXPECT_EQ(store_->used_bytes(), bytes);
  pending.reset();
  store_.reset();
  store_ = open_store(store_path(), bytes + 10);
  EXPECT_GE(store_->used_bytes(), bytes);
  EXPECT_FALSE(store_->begin(checkpoint(), pack(*checkpoint(), shard_boxes(*checkpoint()))));
  const auto missing = [&](const std::vector<TensorBox>& boxes) {
    return store_->missing_bytes(checkpoint()->id, pack(*checkpoint(), boxes).layout);
  };
  EXPECT_GT(missing(shard_boxes(*checkpoint())), 0u);
  EXPECT_EQ(missing(all_boxes(*checkpoint())), 0u);
  EXPECT_NE(begin(all_boxes(*checkpoint())), nullptr);  // going on needs nothing more
}

TEST_F(PullTest, ADiscardedPullLeavesNothing) {
  auto pending = begin(all_boxes(*checkpoint()));
  fill_all(*pending, *source_);
  const fs::path directory = pending->directory();
  store_->discard(std::move(pending));
  EXPECT_FALSE(fs::exists(directory));
  EXPECT_EQ(store_->used_bytes(), 0u);
  EXPECT_EQ(begin(all_boxes(*checkpoint()))->verified().count(), 0u);
}

TEST_F(PullTest, ACommittedCopyKeepsTheAddressesOfThePull) {
  auto pending = begin(all_boxes(*checkpoint()));
  const std::byte* const address = pending->segment(0).data();
  fill_all(*pending, *source_);
  const auto version = *store_->commit(std::move(pending));
  EXPECT_EQ(version->segments[0]->bytes().data(), address);
  EXPECT_EQ(version->segments[0]->path(),
            version->directory / version->manifest.layout.segments()[0].name);
}

TEST_F(PullTest, ALayoutOfOtherTensorsIsInvalid) {
  const auto other = TensorSet::create({{"w", DType::kU8, {4}}});
  auto packed = pack_layout(*other, std::vector<TensorBox>{{0, {{0}, {4}}}}, 1 << 20);
  const auto pending = store_->begin(checkpoint(), std::move(*packed));
  ASSERT_FALSE(pending);
  EXPECT_EQ(pending.error().code(), ErrorCode::kInvalid);
}

TEST_F(PullTest, TilesAreMarkedFromManyThreads) {
  auto pending = begin(shard_boxes(*checkpoint()));
  fill_all(*pending, *source_);
  const TileIndex count = checkpoint()->tiles.tile_count();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (TileIndex tile = static_cast<TileIndex>(t); tile < count; tile += 4)
        pending->mark_verified(tile);
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_TRUE(store_->commit(std::move(pending)));
}

}  // namespace
}  // namespace rekindle::store
