#include "tests/store/store_fixture.h"

namespace rekindle::store {
namespace {

class RetireTest : public StoreTest {};

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
