#include <csignal>

#include <sys/wait.h>

#include "src/base/failpoint.h"
#include "tests/store/store_fixture.h"

// A child process works on the store and dies, or meets an error, at one named step. Whatever the
// step, the store that is opened next shows the state before or the state after, never half.
namespace rekindle::store {
namespace {

enum class Outcome { kOld, kNew };

class CrashTest : public StoreTest, public ::testing::WithParamInterface<const char*> {
 protected:
  // Runs `work` on the store in a child with this failpoint armed. True: it was killed there.
  bool killed_at(const std::string& spec, const std::function<void(SegmentStore&)>& work) {
    store_.reset();
    const pid_t child = ::fork();
    if (child == 0) {
      auto store = SegmentStore::open({store_path(), 1 << 30, std::nullopt});
      if (!store || !arm_failpoints(spec)) ::_exit(2);
      work(**store);
      ::_exit(0);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    store_ = open_store(store_path());
    if (WIFSIGNALED(status)) {
      EXPECT_EQ(WTERMSIG(status), SIGKILL);
      return true;
    }
    EXPECT_EQ(WEXITSTATUS(status), 0);
    return false;
  }

  void work_pull(SegmentStore& store) {
    auto pending = store.begin(checkpoint(), pack(*checkpoint(), shard_boxes(*checkpoint())));
    if (!pending) return;
    fill_all(**pending, *source_);
    (void)store.commit(std::move(*pending));
  }
  void work_publish(SegmentStore& store) { (void)publish(store, id_, source_path()); }

  // Nothing is there, or one whole copy.
  Outcome expect_old_or_new() {
    const auto versions = store_->versions();
    EXPECT_LE(versions.size(), 1u);
    for (const auto& version : versions) EXPECT_TRUE(verify_version(*version, 1, nullptr));
    EXPECT_TRUE(fs::is_empty(store_path() / "staging"));
    return versions.empty() ? Outcome::kOld : Outcome::kNew;
  }
  // And the work can be done again to its end.
  void expect_pull_succeeds() {
    if (!store_->versions().empty()) return;
    const auto version = pull(shard_boxes(*checkpoint()));
    ASSERT_NE(version, nullptr);
    EXPECT_TRUE(verify_version(*version, 1, nullptr));
    reopen();
    EXPECT_EQ(store_->versions().size(), 1u);
  }
  Outcome expected_outcome() const {
    return std::string(GetParam()).find("after_manifest_rename") != std::string::npos ||
                   std::string(GetParam()).find("after_rename") != std::string::npos
               ? Outcome::kNew
               : Outcome::kOld;
  }
};

std::string test_name(const ::testing::TestParamInfo<const char*>& info) {
  std::string name = info.param;
  for (char& c : name) {
    if (c == '.' || c == '@') c = '_';
  }
  return name;
}

class PullCrashTest : public CrashTest {};
INSTANTIATE_TEST_SUITE_P(
    Failpoints, PullCrashTest,
    ::testing::Values("store.begin.after_mkdir", "store.begin.after_manifest",
                      "store.begin.after_segment@1", "store.begin.after_segment@2",
                      "store.begin.after_segments", "store.begin.after_resume",
                      "store.commit.start", "store.commit.after_manifest",
                      "store.commit.between_segments@1", "store.commit.between_segments@2",
                      "store.commit.before_manifest_rename", "store.commit.after_manifest_rename"),
    test_name);

std::string with_action(const std::string& failpoint, const std::string& action) {
  const auto at = failpoint.find('@');
  return failpoint.substr(0, at) + "=" + action +
         (at == std::string::npos ? "" : failpoint.substr(at));
}

TEST_P(PullCrashTest, KilledThereTheStoreIsOldOrNewAndThePullGoesOn) {
  ASSERT_TRUE(
      killed_at(with_action(GetParam(), "kill"), [&](SegmentStore& store) { work_pull(store); }));
  EXPECT_EQ(expect_old_or_new(), expected_outcome());
  if (std::string(GetParam()).starts_with("store.commit") && expected_outcome() == Outcome::kOld) {
    // Everything was verified before the crash: nothing is fetched again.
    const auto pending = begin(shard_boxes(*checkpoint()));
    const LayoutTiles tiles = tiles_of_layout(*checkpoint(), pending->manifest().layout);
    EXPECT_EQ(pending->verified().count(), tiles.held.count());
  }
  expect_pull_succeeds();
}

TEST_P(PullCrashTest, AnErrorThereIsReportedAndThePullGoesOn) {
  for (const char* action : {"error:ENOSPC", "error:EIO"}) {
    ASSERT_TRUE(arm_failpoints(with_action(GetParam(), action)));
    auto pending = store_->begin(checkpoint(), pack(*checkpoint(), shard_boxes(*checkpoint())));
    Result<std::shared_ptr<const StoredVersion>> version;
    if (pending) {
      fill_all(**pending, *source_);
      version = store_->commit(std::move(*pending));
    } else {
      version = fail(pending.error());
    }
    ASSERT_TRUE(arm_failpoints(""));
    if (expected_outcome() == Outcome::kOld) {
      ASSERT_FALSE(version);
      EXPECT_THAT(version.error().message(), ::testing::HasSubstr("failpoint"));
    }
    reopen();
    EXPECT_EQ(expect_old_or_new(), expected_outcome());
    if (expected_outcome() == Outcome::kNew) {
      ASSERT_TRUE(store_->retire(id_));
    }
  }
  expect_pull_succeeds();
}

class PublishCrashTest : public CrashTest {};
INSTANTIATE_TEST_SUITE_P(
    Failpoints, PublishCrashTest,
    ::testing::Values("store.stage.after_mkdir", "store.stage.after_create@1",
                      "store.stage.after_create@2", "store.stage.after_create@3",
                      "store.stage.before_manifest", "store.stage.after_manifest",
                      "store.commit_staged.before_rename", "store.commit_staged.after_rename"),
    test_name);

TEST_P(PublishCrashTest, KilledThereTheStoreIsOldOrNewAndPublishingAgainSucceeds) {
  ASSERT_TRUE(killed_at(with_action(GetParam(), "kill"),
                        [&](SegmentStore& store) { work_publish(store); }));
  EXPECT_EQ(expect_old_or_new(), expected_outcome());
  const auto again = publish(*store_, id_, source_path());
  ASSERT_TRUE(again) << again.error().message();
  EXPECT_EQ((*again)->manifest.checkpoint->root, checkpoint()->root);
}

TEST_P(PublishCrashTest, AnErrorThereLeavesTheStoreAsItWas) {
  for (const char* action : {"error:ENOSPC", "error:EIO"}) {
    ASSERT_TRUE(arm_failpoints(with_action(GetParam(), action)));
    const auto version = publish(*store_, id_, source_path());
    ASSERT_TRUE(arm_failpoints(""));
    EXPECT_EQ(version.has_value(), expected_outcome() == Outcome::kNew);
    EXPECT_EQ(expect_old_or_new(), expected_outcome());
    if (!version) {
      EXPECT_EQ(store_->used_bytes(), 0u);
    }
  }
  EXPECT_TRUE(publish(*store_, id_, source_path()));
}

class RetireCrashTest : public CrashTest {};
INSTANTIATE_TEST_SUITE_P(Failpoints, RetireCrashTest,
                         ::testing::Values("store.remove.after_marker",
                                           "store.remove.between_files@1",
                                           "store.remove.between_files@2",
                                           "store.remove.before_rmdir"),
                         test_name);

TEST_P(RetireCrashTest, KilledThereTheNextOpenFinishesTheRemoval) {
  pull(shard_boxes(*checkpoint()));
  ASSERT_TRUE(killed_at(with_action(GetParam(), "kill"),
                        [&](SegmentStore& store) { (void)store.retire(id_); }));
  EXPECT_EQ(expect_old_or_new(), Outcome::kOld);
  EXPECT_EQ(store_->used_bytes(), 0u);
  EXPECT_TRUE(fs::is_empty(store_path() / "models"));
  EXPECT_NE(pull(shard_boxes(*checkpoint())), nullptr);
}

// A commit takes what a pull of an older version has left over off its place; then it is deleted.
class LeftoverCrashTest : public CrashTest {};
INSTANTIATE_TEST_SUITE_P(Failpoints, LeftoverCrashTest,
                         ::testing::Values("store.remove.after_marker",
                                           "store.remove.between_files@1",
                                           "store.remove.between_files@2",
                                           "store.remove.before_rmdir", "store.pool.delete_later@1",
                                           "store.pool.delete_later@2"),
                         test_name);

TEST_P(LeftoverCrashTest, KilledThereTheCommitHoldsAndTheNextOpenFinishesTheDeletion) {
  begin(all_boxes(*checkpoint())).reset();
  const ModelVersion newer{id_.model, id_.version + 1};
  ASSERT_TRUE(killed_at(with_action(GetParam(), "kill"), [&](SegmentStore& store) {
    ASSERT_TRUE(publish(store, newer, source_path()));
    wait_until_deleted();
  }));
  const auto version = store_->find(newer, source_->manifest.layout.digest());
  ASSERT_NE(version, nullptr);
  EXPECT_TRUE(verify_version(*version, 1, nullptr));
  EXPECT_EQ(store_->used_bytes(), version->manifest.layout.segment_bytes());
  EXPECT_FALSE(fs::exists(store_path() / "models" / "org%2Fmodel@1"));
  wait_until_deleted();
}

// Copies come and go, and each takes the files of the one before.
class PoolCrashTest : public CrashTest {
 protected:
  Result<void> work_recycle(SegmentStore& store) {
    for (int round = 0; round < 2; ++round) {
      TRY(auto pending, store.begin(checkpoint(), pack(*checkpoint(), shard_boxes(*checkpoint()))));
      fill_all(*pending, *source_);
      TRY_VOID(store.commit(std::move(pending)));
      TRY_VOID(store.retire(id_));
    }
    for (int round = 0; round < 2; ++round) {
      TRY_VOID(publish(store, id_, source_path()));
      TRY_VOID(store.retire(id_));
    }
    return {};
  }
};
// Three files of a pull come and go twice, then three of a publish.
INSTANTIATE_TEST_SUITE_P(Failpoints, PoolCrashTest,
                         ::testing::Values("store.pool.after_put@1", "store.pool.after_put@2",
                                           "store.pool.after_put@5", "store.pool.after_put@7",
                                           "store.pool.after_take@1", "store.pool.after_take@2",
                                           "store.pool.after_take@3", "store.pool.after_take@5"),
                         test_name);

TEST_P(PoolCrashTest, KilledThereNothingIsHalfDoneAndNoBytesAreTakenForVerified) {
  ASSERT_TRUE(killed_at(with_action(GetParam(), "kill"),
                        [&](SegmentStore& store) { (void)work_recycle(store); }));
  EXPECT_EQ(expect_old_or_new(), Outcome::kOld);
  wait_until_deleted();
  EXPECT_EQ(begin(shard_boxes(*checkpoint()))->verified().count(), 0u);
  expect_pull_succeeds();
}

TEST_P(PoolCrashTest, AnErrorThereIsReportedAndTheWorkCanBeDoneAgain) {
  for (const char* action : {"error:ENOSPC", "error:EIO"}) {
    store_.reset();
    store_ = open_store(store_path(), 1 << 30, std::nullopt);
    ASSERT_TRUE(arm_failpoints(with_action(GetParam(), action)));
    const auto done = work_recycle(*store_);
    ASSERT_TRUE(arm_failpoints(""));
    ASSERT_FALSE(done);
    EXPECT_THAT(done.error().message(), ::testing::HasSubstr("failpoint"));
    for (const auto& version : store_->versions())
      EXPECT_TRUE(verify_version(*version, 1, nullptr));
    (void)store_->retire(id_);
    EXPECT_EQ(store_->used_bytes(), 0u);
    EXPECT_TRUE(work_recycle(*store_));
    reopen();
    EXPECT_EQ(expect_old_or_new(), Outcome::kOld);
    wait_until_deleted();
  }
}

class KillAnywhereTest : public CrashTest {};

TEST_F(KillAnywhereTest, APullKilledAtRandomMomentsEndsWithoutFetchingTwice) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  test::Rng rng(seed);
  TileIndex before = 0;
  for (int life = 0; life < 12; ++life) {
    store_.reset();
    int progress[2];
    ASSERT_EQ(::pipe(progress), 0);
    const pid_t child = ::fork();
    if (child == 0) {
      auto store = SegmentStore::open({store_path(), 1 << 30});
      if (!store) ::_exit(2);
      auto pending = (*store)->begin(checkpoint(), pack(*checkpoint(), shard_boxes(*checkpoint())));
      if (!pending) ::_exit(3);
      for (TileIndex tile = 0; tile < checkpoint()->tiles.tile_count(); ++tile) {
        if ((*pending)->verified().test(tile)) continue;
        fill_tiles(**pending, *source_, tile, tile + 1);
        (void)!::write(progress[1], "t", 1);
      }
      ::pause();
    }
    ::close(progress[1]);
    // Killed after it has reported up to three more tiles.
    const std::uint64_t tiles = test::below(rng, 4);
    char byte = 0;
    for (std::uint64_t i = 0; i < tiles; ++i) (void)!::read(progress[0], &byte, 1);
    ::usleep(static_cast<useconds_t>(test::below(rng, 3000)));
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    ::close(progress[0]);
    store_ = open_store(store_path());
    EXPECT_EQ(expect_old_or_new(), Outcome::kOld);
    const auto pending = begin(shard_boxes(*checkpoint()));
    EXPECT_GE(pending->verified().count(), before);
    before = pending->verified().count();
  }
  expect_pull_succeeds();
}

}  // namespace
}  // namespace rekindle::store
