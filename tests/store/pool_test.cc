#include <algorithm>
#include <fstream>
#include <map>
#include <set>
#include <thread>

#include <fcntl.h>

#include "tests/store/store_fixture.h"

// Files of copies that are gone, which the next copy of the same layout takes.
namespace rekindle::store {
namespace {

constexpr std::uint64_t kBudget = 1 << 30;

ino_t inode_of(const fs::path& path) {
  struct stat status {};
  EXPECT_EQ(::stat(path.c_str(), &status), 0) << path;
  return status.st_ino;
}

std::multiset<ino_t> inodes_of(const StoredVersion& version) {
  std::multiset<ino_t> inodes;
  for (const auto& segment : version.segments) inodes.insert(inode_of(segment->path()));
  return inodes;
}

std::uint64_t bytes_of(const StoredVersion& version) {
  return version.manifest.layout.segment_bytes();
}

class PoolTest : public StoreTest {
 protected:
  void SetUp() override {
    StoreTest::SetUp();
    store_.reset();
    store_ = open_store(store_path(), kBudget, std::nullopt);
    // The same tensors with other bytes.
    fs::remove_all(source_path());
    write_checkpoint(source_path(), 2);
    auto published = publish(*source_store_, {"org/model", 2}, source_path());
    ASSERT_TRUE(published) << published.error().message();
    second_ = *published;
  }
  std::unique_ptr<PendingVersion> begin_from(const StoredVersion& source) {
    const auto& checkpoint = source.manifest.checkpoint;
    auto pending = store_->begin(checkpoint, pack(*checkpoint, all_boxes(*checkpoint)));
    EXPECT_TRUE(pending) << pending.error().message();
    return pending ? std::move(*pending) : nullptr;
  }
  std::shared_ptr<const StoredVersion> pull_from(const StoredVersion& source) {
    auto pending = begin_from(source);
    fill_all(*pending, source);
    auto version = store_->commit(std::move(pending));
    EXPECT_TRUE(version) << version.error().message();
    return version ? *version : nullptr;
  }
  fs::path pool() const { return store_path() / "pool"; }

  const ModelVersion second_id_{"org/model", 2};
  std::shared_ptr<const StoredVersion> second_;
};

TEST_F(PoolTest, TheNextCopyOfTheLayoutTakesTheFiles) {
  auto first = pull_from(*source_);
  const auto inodes = inodes_of(*first);
  const std::uint64_t bytes = bytes_of(*first);
  first.reset();
  ASSERT_TRUE(store_->retire(id_));
  EXPECT_EQ(store_->pooled_bytes(), bytes);
  EXPECT_EQ(store_->used_bytes(), 0u);
  EXPECT_TRUE(fs::is_empty(store_path() / "models"));

  const auto next = pull_from(*second_);
  EXPECT_EQ(inodes_of(*next), inodes);
  EXPECT_EQ(store_->pooled_bytes(), 0u);
  EXPECT_EQ(store_->used_bytes(), bytes);
  EXPECT_TRUE(verify_version(*next, 2, nullptr));
  store_.reset();
  store_ = open_store(store_path(), kBudget, std::nullopt);
  ASSERT_EQ(store_->versions().size(), 1u);
  EXPECT_TRUE(verify_version(*store_->versions()[0], 2, nullptr));
}

std::map<ino_t, const std::byte*> addresses_of(const StoredVersion& version) {
  std::map<ino_t, const std::byte*> addresses;
  for (const auto& segment : version.segments) {
    addresses[inode_of(segment->path())] = segment->bytes().data();
  }
  return addresses;
}

// Of this process, of files below the directory.
std::size_t mappings_below(const fs::path& directory) {
  std::ifstream maps("/proc/self/maps");
  std::size_t count = 0;
  for (std::string line; std::getline(maps, line);) {
    count += line.find(fs::canonical(directory).string() + "/") != std::string::npos;
  }
  return count;
}

TEST_F(PoolTest, AFileKeepsItsAddressAndItsLifeForTheNextCopy) {
  auto first = pull_from(*source_);
  const auto addresses = addresses_of(*first);
  std::vector<bool> ended(first->segments.size());
  for (std::size_t i = 0; i < ended.size(); ++i) {
    first->segments[i]->life()->at_end([&ended, i] { ended[i] = true; });
  }
  first.reset();
  ASSERT_TRUE(store_->retire(id_));
  EXPECT_EQ(mappings_below(store_path()), 0u) << "the files in the pool are mapped";

  auto next = pull_from(*second_);
  EXPECT_EQ(addresses_of(*next), addresses);
  EXPECT_TRUE(verify_version(*next, 2, nullptr));
  EXPECT_EQ(std::count(ended.begin(), ended.end(), true), 0);
  // Files of the pool that are deleted end it, and so does a store that closes.
  next.reset();
  ASSERT_TRUE(store_->retire(second_id_));
  TimePoint now{};
  store_->trim_pool(now);
  store_->trim_pool(now + std::chrono::hours(1));
  EXPECT_EQ(store_->pooled_bytes(), 0u);
  EXPECT_EQ(std::count(ended.begin(), ended.end(), false), 0);
}

// What a process takes away from a file does not come back with its size.
TEST_F(PoolTest, AFileThatLostPagesGetsAnotherLife) {
  auto first = pull_from(*source_);
  const fs::path file = first->segments[0]->path();
  const ino_t inode = inode_of(file);
  bool ended = false;
  first->segments[0]->life()->at_end([&] { ended = true; });
  first.reset();
  ASSERT_TRUE(store_->retire(id_));
  for (const auto& pooled : fs::directory_iterator(pool())) {
    if (inode_of(pooled.path()) != inode) continue;
    const std::uint64_t size = fs::file_size(pooled.path());
    fs::resize_file(pooled.path(), 4096);
    fs::resize_file(pooled.path(), size);
  }
  const auto next = pull_from(*second_);
  EXPECT_TRUE(ended);
  EXPECT_TRUE(verify_version(*next, 2, nullptr));
}

// Nothing may go on to pin it.
TEST_F(PoolTest, AFileThatSomebodyDeletedOrLinkedElsewhereEndsItsLife) {
  auto first = pull_from(*source_);
  ASSERT_GE(first->segments.size(), 2u);
  std::vector<bool> ended(first->segments.size());
  for (std::size_t i = 0; i < ended.size(); ++i) {
    first->segments[i]->life()->at_end([&ended, i] { ended[i] = true; });
  }
  const fs::path linked = first->segments[0]->path();
  fs::create_hard_link(linked, store_path().parent_path() / "elsewhere");
  fs::remove(first->segments[1]->path());
  first.reset();
  ASSERT_TRUE(store_->retire(id_));
  EXPECT_TRUE(ended[0]);
  for (const auto& file : fs::directory_iterator(pool())) fs::remove(file.path());
  store_->trim_pool(TimePoint());
  EXPECT_EQ(std::count(ended.begin(), ended.end(), false), 0);
  EXPECT_EQ(store_->pooled_bytes(), 0u);
}

// Who wrote to it may still have it open.
TEST_F(PoolTest, FilesOfACopyThatIsNotVerifiedAreNotTaken) {
  auto first = pull_from(*source_);
  ASSERT_EQ(first->verification->state(), CopyState::kVerified);
  ::usleep(20'000);  // past the clock tick of the file's time stamp
  const UniqueFd writer(::open(first->segments[0]->path().c_str(), O_WRONLY | O_CLOEXEC));
  ASSERT_EQ(::pwrite(writer.get(), "x", 1, 5000), 1);
  first.reset();
  ASSERT_TRUE(store_->retire(id_));
  EXPECT_EQ(store_->pooled_bytes(), 0u);
  EXPECT_EQ(store_->used_bytes(), 0u);
  EXPECT_EQ(pull_from(*second_)->verification->state(), CopyState::kVerified);
}

TEST_F(PoolTest, NotWhileSomebodyHoldsASegment) {
  auto first = pull_from(*source_);
  std::shared_ptr<const MappedSegment> lent = first->segments[0];
  const ino_t inode = inode_of(lent->path());
  const std::string before(reinterpret_cast<const char*>(lent->bytes().data()),
                           lent->bytes().size());
  const std::uint64_t bytes = bytes_of(*first);
  first.reset();
  ASSERT_TRUE(store_->retire(id_));
  EXPECT_EQ(store_->pooled_bytes(), bytes);

  auto next = pull_from(*second_);
  EXPECT_EQ(inodes_of(*next).count(inode), 0u);
  EXPECT_EQ(store_->pooled_bytes(), lent->bytes().size());
  EXPECT_EQ(std::memcmp(lent->bytes().data(), before.data(), before.size()), 0);
  lent.reset();
  EXPECT_EQ(inodes_of(*pull_from(*source_)).count(inode), 1u);
}

TEST_F(PoolTest, BytesOfAnEarlierCopyAreNotTakenForVerified) {
  pull_from(*source_);
  ASSERT_TRUE(store_->retire(id_));
  ASSERT_GT(store_->pooled_bytes(), 0u);
  auto pending = begin_from(*source_);  // every byte would be right
  EXPECT_EQ(store_->pooled_bytes(), 0u);
  EXPECT_EQ(pending->verified().count(), 0u);
  const auto early = store_->commit(std::move(pending));
  ASSERT_FALSE(early);
  EXPECT_EQ(early.error().code(), ErrorCode::kInvalid);
  EXPECT_EQ(begin_from(*source_)->verified().count(), 0u);

  // Half of it is written when the process goes: only that half counts in the next life.
  store_->retire(id_).value();
  pending = begin_from(*second_);
  const TileIndex half = checkpoint()->tiles.tile_count() / 2;
  fill_tiles(*pending, *second_, 0, half);
  pending.reset();
  store_.reset();
  store_ = open_store(store_path(), kBudget, std::nullopt);
  EXPECT_EQ(begin_from(*second_)->verified().count(), half);
}

TEST_F(PoolTest, WhatIsDiscardedOrReplacedIsTakenToo) {
  auto pending = begin_from(*source_);
  const ino_t inode = inode_of(pending->mapped(0)->path());
  fill_all(*pending, *source_);  // only files with all their pages are taken
  store_->discard(std::move(pending));
  EXPECT_GT(store_->pooled_bytes(), 0u);
  EXPECT_EQ(store_->used_bytes(), 0u);
  pending = begin_from(*second_);
  EXPECT_EQ(inode_of(pending->mapped(0)->path()), inode);
  // Without its resume file it starts over, in the same memory.
  const fs::path resume = pending->directory() / "rekindle.resume";
  pending.reset();
  fs::remove(resume);
  pending = begin_from(*second_);
  EXPECT_EQ(inode_of(pending->mapped(0)->path()), inode);
  EXPECT_EQ(pending->verified().count(), 0u);
}

TEST_F(PoolTest, APublishTakesTheFilesOfAPublishThatIsGone) {
  const fs::path paths[] = {source_path()};
  { ASSERT_TRUE(store_->stage({"dropped", 1}, paths, nullptr)); }
  const std::uint64_t bytes = store_->pooled_bytes();
  EXPECT_GT(bytes, 0u);
  auto first = *publish(*store_, {"m", 1}, source_path());
  EXPECT_EQ(store_->pooled_bytes(), 0u);
  EXPECT_EQ(bytes_of(*first), bytes);
  const auto inodes = inodes_of(*first);
  first.reset();
  ASSERT_TRUE(store_->retire({"m", 1}));

  fs::remove_all(source_path());
  write_checkpoint(source_path(), 3);
  const auto next = *publish(*store_, {"m", 2}, source_path());
  EXPECT_EQ(inodes_of(*next), inodes);
  EXPECT_TRUE(verify_version(*next, 2, nullptr));
  for (const char* name :
       {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}) {
    EXPECT_EQ(read_bytes(next->directory / name), read_bytes(source_path() / name));
  }
}

TEST_F(PoolTest, FilesOfAnEarlierLifeAreDeleted) {
  pull_from(*source_);
  begin_from(*second_).reset();
  store_.reset();
  store_ = open_store(store_path(), kBudget, std::nullopt);
  ASSERT_TRUE(store_->retire(id_));
  store_->discard(begin_from(*second_));
  EXPECT_EQ(store_->pooled_bytes(), 0u);
  wait_until_deleted();
}

TEST_F(PoolTest, FilesWithAnotherNameStayWithIt) {
  const fs::path other = temp_.path() / "exported.safetensors";
  auto version = pull_from(*source_);
  const fs::path path = version->segments[0]->path();
  fs::create_hard_link(path, other);
  const std::string before = read_bytes(path);
  const std::uint64_t bytes = bytes_of(*version);
  // The link has changed a stamp: without this it would be a copy that is not verified.
  ASSERT_TRUE(version->verification->record(*version->verification->stamp()));
  version.reset();
  ASSERT_TRUE(store_->retire(id_));
  EXPECT_EQ(store_->pooled_bytes(), bytes - before.size());
  pull_from(*second_);
  EXPECT_EQ(read_bytes(other), before);
}

// What a trainer writes, version after version.
class PublicationPoolTest : public PoolTest {
 protected:
  void SetUp() override {
    PoolTest::SetUp();
    fs::create_directory(directory_ = temp_.path() / "publish");
  }
  fs::path file() const { return directory_ / packed_.layout.segments()[0].name; }
  std::shared_ptr<MappedSegment> write_segment() {
    const std::uint64_t bytes = packed_.layout.segments()[0].size_bytes;
    auto segment = store_->create_segment(file(), bytes);
    EXPECT_TRUE(segment) << segment.error().message();
    const std::string& header = packed_.headers[0];
    std::memcpy((*segment)->writable().data(), header.data(), header.size());
    return *segment;
  }
  ino_t commit(std::uint64_t version, std::shared_ptr<MappedSegment> segment) {
    auto staged =
        store_->stage_segments({"t", version}, {tensors_, packed_, {std::move(segment)}}, nullptr);
    EXPECT_TRUE(staged) << staged.error().message();
    const auto copy = store_->commit_staged(*staged);
    EXPECT_TRUE(copy) << copy.error().message();
    EXPECT_TRUE(verify_version(**copy, 1, nullptr));
    return inode_of((*copy)->segments[0]->path());
  }
  const TensorSet tensors_ = *TensorSet::create({{"w", DType::kF32, {100'000}}});
  const PackedLayout packed_ =
      *pack_layout(tensors_, std::vector<TensorBox>{{0, Box::whole({100'000})}}, 1 << 30);
  fs::path directory_;
};

TEST_F(PublicationPoolTest, ATrainersFilesComeBackToItOnceTheCopyIsGone) {
  const std::uint64_t bytes = packed_.layout.segments()[0].size_bytes;
  auto first = write_segment();
  const ino_t inode = inode_of(file());
  EXPECT_EQ(commit(1, std::move(first)), inode);
  ASSERT_TRUE(store_->remove_segment(file()));  // it has another name by now
  EXPECT_EQ(store_->pooled_bytes(), 0u);

  auto second = write_segment();
  EXPECT_NE(inode_of(file()), inode);  // the copy still has the first one
  EXPECT_NE(commit(2, std::move(second)), inode);
  ASSERT_TRUE(store_->retire({"t", 1}));
  EXPECT_EQ(store_->pooled_bytes(), bytes);
  auto third = write_segment();
  EXPECT_EQ(inode_of(file()), inode);
  EXPECT_EQ(commit(3, std::move(third)), inode);
}

TEST_F(PublicationPoolTest, ACopyIsNotReplacedByOneWhoseFileSomebodyHasOpenedForWriting) {
  auto staged = store_->stage_segments({"t", 1}, {tensors_, packed_, {write_segment()}}, nullptr);
  ASSERT_TRUE(staged) << staged.error().message();
  fs::path staged_file;
  for (const auto& at : fs::recursive_directory_iterator(store_path() / "staging")) {
    if (at.path().extension() == ".safetensors") staged_file = at.path();
  }
  // The same bytes, committed before, and changed since.
  auto twin = store_->stage_segments({"t", 1}, {tensors_, packed_, {write_segment()}}, nullptr);
  ASSERT_TRUE(twin) << twin.error().message();
  const auto copy = store_->commit_staged(*twin);
  ASSERT_TRUE(copy) << copy.error().message();
  ::usleep(20'000);  // past the clock tick of the file's time stamp
  ASSERT_EQ(::chmod((*copy)->segments[0]->path().c_str(), 0600), 0);
  ASSERT_EQ((*copy)->verification->state(), CopyState::kUnverified);

  EXPECT_EQ(::open(staged_file.c_str(), O_WRONLY | O_NONBLOCK | O_CLOEXEC), -1);
  const auto refused = store_->commit_staged(*staged);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), ErrorCode::kCorrupt);
  EXPECT_EQ(store_->versions(), std::vector{*copy});
}

TEST_F(PublicationPoolTest, AFileThatSomebodyMayWriteToIsNeverUsedAgain) {
  auto segment = write_segment();
  const ino_t inode = inode_of(file());
  const int kept = ::open(file().c_str(), O_RDWR);
  EXPECT_NE(commit(1, std::move(segment)), inode);
  ASSERT_TRUE(store_->remove_segment(file()));
  ::close(kept);
  EXPECT_EQ(store_->pooled_bytes(), 0u);
}

TEST_F(PoolTest, FilesGoWhereTheBudgetNeedsTheRoom) {
  const std::uint64_t bytes = bytes_of(*pull_from(*source_));
  store_.reset();
  fs::remove_all(store_path());
  store_ = open_store(store_path(), bytes + bytes / 2, bytes);
  auto first = pull_from(*source_);
  const auto packed = pack(*checkpoint(), shard_boxes(*checkpoint()));
  const auto& next = second_->manifest.checkpoint;
  // A reader's bytes are no room, pooled or not.
  ASSERT_TRUE(store_->retire(id_));
  EXPECT_EQ(store_->pooled_bytes(), bytes);
  EXPECT_GT(store_->missing_bytes(second_id_, pack(*next, all_boxes(*next)).layout), 0u);
  const auto refused = store_->begin(next, pack(*next, all_boxes(*next)));
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), ErrorCode::kExhausted);
  EXPECT_TRUE(verify_version(*first, 1, nullptr));

  first.reset();
  EXPECT_EQ(store_->used_bytes(), 0u);
  EXPECT_EQ(store_->missing_bytes(second_id_, packed.layout), 0u);
  write_safetensors(temp_.path() / "large" / "a.safetensors", {{"w", DType::kU8, {bytes}}}, 5);
  const auto large = publish(*store_, {"large", 1}, temp_.path() / "large");
  ASSERT_TRUE(large) << large.error().message();
  EXPECT_LE(store_->used_bytes() + store_->pooled_bytes(), store_->budget_bytes());
}

TEST_F(PoolTest, ItKeepsNoMoreThanItMay) {
  auto version = pull_from(*source_);
  const std::uint64_t bytes = bytes_of(*version);
  std::uint64_t largest = 0;
  for (const auto& segment : version->segments) {
    largest = std::max<std::uint64_t>(largest, segment->bytes().size());
  }
  version.reset();
  ASSERT_GT(bytes, largest);
  for (const std::uint64_t most : {std::uint64_t{0}, largest, bytes - 1}) {
    store_.reset();
    store_ = open_store(store_path(), kBudget, most);
    for (const auto& old : store_->versions()) (void)store_->retire_copy(*old);
    pull_from(*source_);
    ASSERT_TRUE(store_->retire(id_));
    EXPECT_LE(store_->pooled_bytes(), most);
    EXPECT_EQ(store_->pooled_bytes() > 0, most > 0);
    std::uint64_t on_disk = 0;
    for (const auto& file : fs::directory_iterator(pool())) on_disk += file.file_size();
    EXPECT_EQ(on_disk, store_->pooled_bytes());
  }
}

TEST_F(PoolTest, OldFilesGo) {
  pull_from(*source_);
  ASSERT_TRUE(store_->retire(id_));
  const std::uint64_t bytes = store_->pooled_bytes();
  TimePoint now{};
  store_->trim_pool(now);
  pull(shard_boxes(*checkpoint()));  // another layout: it takes none of them
  ASSERT_TRUE(store_->retire(id_));
  const std::uint64_t younger = store_->pooled_bytes() - bytes;
  ASSERT_GT(younger, 0u);
  now += std::chrono::minutes(10) - std::chrono::nanoseconds(1);
  store_->trim_pool(now);
  EXPECT_EQ(store_->pooled_bytes(), bytes + younger);
  now += std::chrono::nanoseconds(1);
  store_->trim_pool(now);
  EXPECT_EQ(store_->pooled_bytes(), younger);
  now += std::chrono::minutes(10);
  store_->trim_pool(now);
  EXPECT_EQ(store_->pooled_bytes(), 0u);
  EXPECT_TRUE(fs::is_empty(pool()));
}

// One tensor of `bytes`, pulled into the store under test.
class ReserveTest : public PoolTest {
 protected:
  void open_with_reserve(std::uint64_t reserve_bytes, std::uint64_t budget_bytes = kBudget) {
    store_.reset();
    fs::remove_all(store_path());
    auto store = SegmentStore::open({.directory = store_path(),
                                     .budget_bytes = budget_bytes,
                                     .pool_bytes = std::nullopt,
                                     .reserve_bytes = reserve_bytes});
    ASSERT_TRUE(store) << store.error().message();
    store_ = std::move(*store);
  }
  std::shared_ptr<const StoredVersion> make_source(const ModelVersion& id, std::uint64_t bytes) {
    const fs::path at = temp_.path() / id.to_string();
    write_safetensors(at / "a.safetensors", {{"w", DType::kU8, {bytes}}}, 5);
    auto published = publish(*source_store_, id, at);
    EXPECT_TRUE(published) << published.error().message();
    return *published;
  }
  std::set<ino_t> pool_inodes() const {
    std::set<ino_t> inodes;
    for (const auto& file : fs::directory_iterator(pool())) inodes.insert(inode_of(file.path()));
    return inodes;
  }
  // Returns the bytes of the new file.
  std::uint64_t top_up() {
    const auto added = store_->top_up_reserve();
    EXPECT_TRUE(added) << added.error().message();
    return added.value_or(0);
  }
};

TEST_F(ReserveTest, AFirstPullTakesAFileOfItOfASimilarSize) {
  open_with_reserve(128 * kMiB);
  EXPECT_EQ(store_->pooled_bytes(), 0u);
  EXPECT_EQ(top_up(), 128 * kMiB);
  EXPECT_EQ(store_->pooled_bytes(), 128 * kMiB);
  EXPECT_EQ(store_->used_bytes(), 0u);
  const auto reserve = pool_inodes();
  ASSERT_EQ(reserve.size(), 1u);

  for (const std::uint64_t bytes : {100 * kMiB, 150 * kMiB}) {
    const auto source = make_source({"large", bytes}, bytes);
    auto version = pull_from(*source);
    EXPECT_EQ(inode_of(version->segments[0]->path()), *reserve.begin());
    EXPECT_EQ(version->segments[0]->bytes().size(), bytes_of(*version));
    EXPECT_TRUE(verify_version(*version, 2, nullptr));
    // The next one takes the file that this one leaves.
    ASSERT_TRUE(source_store_->retire({"large", bytes}));
    const auto id = version->manifest.checkpoint->id;
    version.reset();
    ASSERT_TRUE(store_->retire(id));
  }
}

TEST_F(ReserveTest, AFileThatIsCutOffGetsAnotherLife) {
  open_with_reserve(128 * kMiB);
  bool ended = false;
  const auto prepare = [&](MappedSegment& file) {
    file.life()->at_end([&] { ended = true; });
    EXPECT_EQ(store_->pooled_bytes(), 0u) << "a copy could take it";
  };
  ASSERT_TRUE(store_->top_up_reserve(prepare));
  EXPECT_FALSE(ended);
  const auto source = make_source({"large", 1}, 100 * kMiB);
  const auto version = pull_from(*source);
  EXPECT_TRUE(ended);
  EXPECT_TRUE(verify_version(*version, 2, nullptr));
}

TEST_F(ReserveTest, ASmallCopyTakesNoLargeFileOfIt) {
  open_with_reserve(128 * kMiB);
  ASSERT_NE(top_up(), 0u);
  pull_from(*source_);
  EXPECT_EQ(store_->pooled_bytes(), 128 * kMiB);
}

TEST_F(ReserveTest, ItGrowsToTheLargestCopyAndOutlivesTheTrim) {
  open_with_reserve(64 * kMiB);
  const auto source = make_source({"large", 1}, 100 * kMiB);
  const std::uint64_t bytes = bytes_of(*pull_from(*source));
  EXPECT_EQ(top_up(), bytes);
  EXPECT_EQ(top_up(), 0u);
  TimePoint now{};
  store_->trim_pool(now);
  store_->trim_pool(now + std::chrono::hours(1));
  EXPECT_EQ(store_->pooled_bytes(), bytes);
  // Beyond the reserve files go.
  ASSERT_TRUE(store_->retire({"large", 1}));
  EXPECT_EQ(store_->pooled_bytes(), 2 * bytes);
  store_->trim_pool(now + std::chrono::hours(1));
  store_->trim_pool(now + std::chrono::hours(2));
  EXPECT_EQ(store_->pooled_bytes(), bytes);
}

TEST_F(ReserveTest, ItFitsIntoTheBudgetAndMakesRoomForCopies) {
  open_with_reserve(256 * kMiB, 192 * kMiB);
  ASSERT_NE(top_up(), 0u);
  EXPECT_EQ(store_->pooled_bytes(), 192 * kMiB);
  const auto source = make_source({"large", 1}, 80 * kMiB);
  ASSERT_NE(pull_from(*source), nullptr);
  EXPECT_LE(store_->used_bytes() + store_->pooled_bytes(), store_->budget_bytes());
  ASSERT_NE(top_up(), 0u);
  EXPECT_LE(store_->used_bytes() + store_->pooled_bytes(), store_->budget_bytes());
  EXPECT_GT(store_->pooled_bytes(), 64 * kMiB);
}

TEST_F(PoolTest, AFileThatIsCutShortBeforeItsPagesComeStaysShort) {
  const fs::path path = store_path() / "pool" / "x";
  auto segment = MappedSegment::create(path, 8 * kMiB, {}, {.later = true});
  ASSERT_TRUE(segment) << segment.error().message();
  fs::resize_file(path, 100);
  ASSERT_TRUE((*segment)->lacks_pages());
  EXPECT_FALSE((*segment)->populate(false));
  EXPECT_EQ(fs::file_size(path), 100u);
}

// The kernel has entered all of them into the page table, so a write costs no fault.
TEST_F(PoolTest, ASegmentsPagesAreMappedBeforeTheFirstWrite) {
  constexpr std::uint64_t kBytes = 96 * kMiB;
  auto segment = MappedSegment::create(store_path() / "pool" / "x", kBytes);
  ASSERT_TRUE(segment) << segment.error().message();
  std::vector<std::uint64_t> pages(kBytes / kPageBytes);
  const auto first = reinterpret_cast<std::uintptr_t>((*segment)->writable().data()) / kPageBytes;
  const UniqueFd pagemap(::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC));
  const std::size_t size = pages.size() * sizeof pages[0];
  ASSERT_EQ(::pread(pagemap.get(), pages.data(), size, static_cast<off_t>(first * sizeof pages[0])),
            static_cast<ssize_t>(size));
  constexpr std::uint64_t kPresent = std::uint64_t{1} << 63;
  EXPECT_TRUE(
      std::ranges::all_of(pages, [](std::uint64_t page) { return (page & kPresent) != 0; }));
}

TEST_F(PoolTest, ItGoesWithTheStoreAndWhatACrashLeftGoesAfterTheOpen) {
  pull_from(*source_);
  ASSERT_TRUE(store_->retire(id_));
  EXPECT_FALSE(fs::is_empty(pool()));
  store_.reset();
  EXPECT_TRUE(fs::is_empty(pool()));
  write_bytes(pool() / "7", "x");
  store_ = open_store(store_path(), kBudget, std::nullopt);
  wait_until_deleted();
}

TEST_F(PoolTest, SomebodyDeletedOrChangedAFileOfIt) {
  pull_from(*source_);
  ASSERT_TRUE(store_->retire(id_));
  bool first = true;
  for (const auto& file : fs::directory_iterator(pool())) {
    if (first) {
      fs::remove(file.path());
    } else {
      fs::resize_file(file.path(), 100);
    }
    first = false;
  }
  EXPECT_TRUE(verify_version(*pull_from(*second_), 2, nullptr));
}

TEST_F(PoolTest, ThreadsPullAndRetireAtOnce) {
  store_.reset();
  store_ = open_store(store_path(), 6 * bytes_of(*source_), 3 * bytes_of(*source_));
  std::vector<std::thread> threads;
  for (std::uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (std::uint64_t i = 0; i < 12; ++i) {
        const StoredVersion& from = (t + i) % 2 == 0 ? *source_ : *second_;
        const Checkpoint& like = *from.manifest.checkpoint;
        const ModelVersion id{"t" + std::to_string(t), i + 1};
        const Digest root = checkpoint_root(id, like.tensors, like.tiles, like.tile_digests);
        const auto checkpoint = *Checkpoint::create(id, like.tensors, like.tile_digests, root);
        const auto boxes = i % 3 == 0 ? shard_boxes(*checkpoint) : all_boxes(*checkpoint);
        auto pending = store_->begin(checkpoint, pack(*checkpoint, boxes));
        ASSERT_TRUE(pending) << pending.error().message();
        EXPECT_EQ((*pending)->verified().count(), 0u);
        fill_all(**pending, from);
        if (i % 5 == 4) {
          store_->discard(std::move(*pending));
          continue;
        }
        const auto version = store_->commit(std::move(*pending));
        ASSERT_TRUE(version) << version.error().message();
        store_->trim_pool(TimePoint{} + std::chrono::minutes(i));
        EXPECT_TRUE(verify_version(**version, 1, nullptr));
        ASSERT_TRUE(store_->retire(id));
        EXPECT_TRUE(verify_version(**version, 1, nullptr));  // it is still held
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(store_->used_bytes(), 0u);
  EXPECT_LE(store_->pooled_bytes(), 3 * bytes_of(*source_));
  EXPECT_TRUE(fs::is_empty(store_path() / "models"));
}

}  // namespace
}  // namespace rekindle::store
