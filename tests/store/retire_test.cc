#include "tests/store/store_fixture.h"

namespace rekindle::store {
namespace {

class RetireTest : public StoreTest {
 protected:
  // Directories of copies of id_, committed or not.
  std::ptrdiff_t copies_left() const {
    std::error_code none;
    const fs::directory_iterator copies(store_path() / "models" / "org%2Fmodel@1", none);
    return std::distance(fs::begin(copies), fs::end(copies));
  }
};

TEST_F(RetireTest, AllCopiesGoAndTheirBytesAreFree) {
  const std::uint64_t bytes = pull(all_boxes(*checkpoint()))->manifest.layout.segment_bytes() +
                              pull(shard_boxes(*checkpoint()))->manifest.layout.segment_bytes();
  const auto freed = store_->retire(id_);
  ASSERT_TRUE(freed) << freed.error().message();
  EXPECT_EQ(*freed, bytes);
  EXPECT_TRUE(store_->find(id_).empty());
  EXPECT_EQ(store_->used_bytes(), 0u);
  EXPECT_TRUE(fs::is_empty(store_path() / "models"));
  EXPECT_EQ(store_->retire(id_).error().code(), ErrorCode::kNotFound);
}

TEST_F(RetireTest, ReadersKeepTheirBytesAndTheBudgetKnows) {
  auto reader = pull(all_boxes(*checkpoint()));
  ASSERT_TRUE(store_->retire(id_));
  EXPECT_EQ(store_->used_bytes(), reader->manifest.layout.segment_bytes());
  EXPECT_TRUE(verify_version(*reader, 1, nullptr));
  reader.reset();
  EXPECT_EQ(store_->used_bytes(), 0u);
}

TEST_F(RetireTest, ARunningPullStays) {
  pull(shard_boxes(*checkpoint()));
  auto pending = begin(all_boxes(*checkpoint()));
  ASSERT_TRUE(store_->retire(id_));
  fill_all(*pending, *source_);
  EXPECT_TRUE(store_->commit(std::move(pending)));
}

TEST_F(RetireTest, HalfDonePullsOfTheVersionGoToo) {
  auto pending = begin(all_boxes(*checkpoint()));
  pending.reset();
  EXPECT_TRUE(store_->retire(id_));
  EXPECT_EQ(store_->used_bytes(), 0u);
  EXPECT_TRUE(fs::is_empty(store_path() / "models"));
}

// What an agent that was killed has left, and nobody asks for any more, would stay for good.
TEST_F(RetireTest, HalfDonePullsOfOlderVersionsGoWithACommit) {
  begin(all_boxes(*checkpoint())).reset();
  begin(shard_boxes(*checkpoint())).reset();
  reopen();
  EXPECT_GT(store_->used_bytes(), 0u);
  ASSERT_TRUE(publish(*store_, {"another", id_.version + 1}, source_path()));
  EXPECT_EQ(copies_left(), 2);
  const auto newer = publish(*store_, {id_.model, id_.version + 1}, source_path());
  ASSERT_TRUE(newer) << newer.error().message();
  EXPECT_EQ(copies_left(), 0);
  EXPECT_EQ(store_->used_bytes(), 2 * (*newer)->manifest.layout.segment_bytes());
}

TEST_F(RetireTest, OlderPullsThatRunAndCopiesThatCannotBeReadStay) {
  auto pending = begin(all_boxes(*checkpoint()));
  const fs::path damaged = pull(shard_boxes(*checkpoint()))->directory;
  write_bytes(damaged / "rekindle.manifest", "no manifest");
  store_->discard_unfinished_before({id_.model, id_.version + 1}).value();
  fill_all(*pending, *source_);
  EXPECT_TRUE(store_->commit(std::move(pending)));
  reopen();
  store_->discard_unfinished_before({id_.model, id_.version + 1}).value();
  EXPECT_TRUE(fs::exists(damaged / "rekindle.manifest"));
  EXPECT_EQ(store_->find(id_).size(), 1u);
  EXPECT_EQ(copies_left(), 2);
}

TEST_F(RetireTest, FilesThatAreNotOursAreKept) {
  const fs::path stray = pull(all_boxes(*checkpoint()))->directory / "notes.txt";
  write_bytes(stray, "mine");
  ASSERT_TRUE(store_->retire(id_));
  EXPECT_EQ(read_bytes(stray), "mine");
  reopen();
  EXPECT_EQ(read_bytes(stray), "mine");
  EXPECT_TRUE(store_->versions().empty());
  EXPECT_NE(pull(all_boxes(*checkpoint())), nullptr);
  EXPECT_EQ(read_bytes(stray), "mine");
}

}  // namespace
}  // namespace rekindle::store
