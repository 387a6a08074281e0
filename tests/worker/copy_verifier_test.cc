#include "recovery/worker/copy_verifier.h"

#include <algorithm>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/use_future.hpp>
#include <gmock/gmock.h>

#include "src/base/unique_fd.h"
#include "tests/support/process.h"
#include "tests/worker/published_version.h"

namespace rekindle::worker {
namespace {

namespace fs = std::filesystem;
using State = CopyCheck::State;

// The store has copies of an earlier life of the agent. None of them is verified.
class CopyVerifierTest : public ::testing::Test {
 protected:
  void SetUp() override { open(); }
  void open() {
    store_.reset();
    store_ = std::move(*store::SegmentStore::open({dir_ / "store", 0}));
    CopyVerifier::Hooks hooks;
    hooks.verified = [this] {
      for (const auto& stored : store_->versions()) {
        const auto id = stored->manifest.checkpoint->id.to_string();
        const bool told = std::ranges::find(order_, id) != order_.end();
        const bool good = stored->verification->state() == store::CopyState::kVerified;
        if (good && !told) order_.push_back(id);
      }
      if (order_.size() == store_->versions().size()) context_.stop();
    };
    hooks.replace = [this](std::shared_ptr<const store::StoredVersion> copy,
                           CopyVerifier::BadCopy bad) -> async::Task<void> {
      bad_ = std::move(bad.tiles);
      (void)store_->retire_copy(*copy);
      context_.stop();
      co_return;
    };
    verifier_ = std::make_unique<CopyVerifier>(context_.get_executor(), *store_, blocking_,
                                               digests_, std::move(hooks));
  }
  void publish(const ModelVersion& id) { publish_rows(*store_, dir_ / "made", id, 8); }
  std::shared_ptr<const store::StoredVersion> copy() const { return store_->versions().at(0); }
  void run() { context_.run_for(std::chrono::seconds(20)); }

  testing::TempDir dir_{true};
  boost::asio::io_context context_{1};
  std::vector<std::string> order_;
  std::vector<TileIndex> bad_;
  std::unique_ptr<store::SegmentStore> store_;
  std::unique_ptr<CopyVerifier> verifier_;
  WorkerPool blocking_{"t-blocking", 2, 64};
  WorkerPool digests_{"t-digest", 2, 64};
};

TEST_F(CopyVerifierTest, TheNewestOfEachModelIsVerifiedFirst) {
  for (const auto& id : {ModelVersion{"a", 2}, {"a", 3}, {"a", 1}, {"b", 1}}) publish(id);
  open();
  verifier_->start();
  run();
  EXPECT_EQ(order_, (std::vector<std::string>{"a@3", "b@1", "a@2", "a@1"}));
}

TEST_F(CopyVerifierTest, ACheckKeepsNoCopyThatWasLetGoOf) {
  publish({"m", 1});
  open();
  std::weak_ptr<const store::StoredVersion> gone = copy();
  const auto running = verifier_->check(copy());
  ASSERT_NE(running, nullptr);
  ASSERT_TRUE(store_->retire({"m", 1}));
  EXPECT_TRUE(gone.expired());
  EXPECT_EQ(store_->used_bytes(), 0u);
  verifier_->let_go_of_unlisted();
  while (!running->over()) ASSERT_GT(context_.run_one(), 0u);
  EXPECT_EQ(running->state, State::kUndecided);
}

TEST_F(CopyVerifierTest, AQuarantinedCopyIsBadWithoutBeingReadAgain) {
  publish({"m", 1});
  open();
  copy()->verification->quarantine("tile 3 of w");
  const auto check = verifier_->check(copy());
  ASSERT_NE(check, nullptr);
  EXPECT_EQ(check->state, State::kBad);
  EXPECT_EQ(check->why->message(), "tile 3 of w");
}

TEST_F(CopyVerifierTest, ATileThatDoesNotMatchIsTheEndOfTheCopy) {
  publish({"m", 1});
  open();
  const auto bad = copy();
  const int fd = ::open(bad->segments[0]->path().c_str(), O_WRONLY | O_CLOEXEC);
  ASSERT_EQ(::pwrite(fd, "wrong", 5, 8192), 5);
  ::close(fd);
  const auto check = verifier_->check(bad);
  run();
  EXPECT_EQ(check->state, State::kBad);
  EXPECT_EQ(bad->verification->state(), store::CopyState::kQuarantined);
  EXPECT_TRUE(store_->versions().empty());
}

TEST_F(CopyVerifierTest, AllTilesThatDoNotMatchAreNamed) {
  const auto tensors = *TensorSet::create({{"w", DType::kF32, {4096, 1024}}});  // several tiles
  const ModelVersion id{"m", 1};
  const auto files = Publication::begin(*store_, dir_ / "made", id, tensors);
  ASSERT_TRUE(files) << files.error().message();
  auto staged = store_->stage_segments(id, (*files)->filled(), {});
  ASSERT_TRUE(staged) << staged.error().message();
  ASSERT_TRUE(store_->commit_staged(*staged));
  open();
  const auto& checkpoint = *copy()->manifest.checkpoint;
  const TileIndex last = checkpoint.tiles.tile_count() - 1;
  ASSERT_GE(last, 2u);
  const fs::path file = copy()->segments[0]->path();
  const int fd = ::open(file.c_str(), O_WRONLY | O_CLOEXEC);
  const auto end = static_cast<off_t>(fs::file_size(file));
  ASSERT_EQ(::pwrite(fd, "wrong", 5, 8192), 5);
  ASSERT_EQ(::pwrite(fd, "wrong", 5, end - 5), 5);
  ::close(fd);
  verifier_->check(copy());
  run();
  EXPECT_EQ(bad_, (std::vector<TileIndex>{0, last}));
}

TEST_F(CopyVerifierTest, AWrongHeaderIsTheFaultOfNoTile) {
  publish({"m", 1});
  open();
  const int fd = ::open(copy()->segments[0]->path().c_str(), O_WRONLY | O_CLOEXEC);
  ASSERT_EQ(::pwrite(fd, "[", 1, 8), 1);
  ::close(fd);
  const auto check = verifier_->check(copy());
  run();
  EXPECT_EQ(check->state, State::kBad);
  EXPECT_TRUE(check->bad.empty());
}

// Only a time stamp of the copy has changed, so it is used again.
TEST_F(CopyVerifierTest, AChangeThatLeavesTheBytesAsTheyWereIsNotTheEndOfTheCopy) {
  publish({"m", 1});
  ::usleep(20'000);  // past the clock tick of the file's time stamp
  ASSERT_EQ(::chmod(copy()->segments[0]->path().c_str(), 0600), 0);
  EXPECT_NE(verifier_->check(copy()), nullptr);
  run();
  EXPECT_EQ(verifier_->check(copy()), nullptr);
}

// The bytes that the verifier reads may be overwritten the next moment.
TEST_F(CopyVerifierTest, B1ACopyThatSomebodyMayWriteToIsNotUsed) {
  publish({"m", 1});
  const std::filesystem::path file = copy()->segments[0]->path();
  UniqueFd writer(::open(file.c_str(), O_RDWR | O_CLOEXEC));
  ASSERT_TRUE(writer);
  const auto require = [&] {
    auto required = boost::asio::co_spawn(
        context_, verifier_->require(copy(), std::chrono::seconds(20)), boost::asio::use_future);
    while (required.wait_for(std::chrono::seconds(0)) != std::future_status::ready) {
      context_.restart();
      context_.run_for(std::chrono::milliseconds(10));
    }
    return required.get();
  };
  const auto refused = require();
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), ErrorCode::kUnavailable);
  EXPECT_THAT(refused.error().message(), ::testing::HasSubstr(file.string()));
  EXPECT_TRUE(bad_.empty());
  EXPECT_EQ(store_->versions().size(), 1u) << "its bytes are right: it stays";

  writer.reset();
  const auto fine = require();
  EXPECT_TRUE(fine) << fine.error().message();
  EXPECT_EQ(copy()->verification->state(), store::CopyState::kVerified);
}

TEST_F(CopyVerifierTest, WrongTilesOfACopyThatSomebodyMayWriteToAreFound) {
  publish({"m", 1});
  const std::filesystem::path file = copy()->segments[0]->path();
  const UniqueFd writer(::open(file.c_str(), O_RDWR | O_CLOEXEC));
  const auto last = static_cast<off_t>(std::filesystem::file_size(file)) - 1;
  char byte = 0;
  ASSERT_EQ(::pread(writer.get(), &byte, 1, last), 1);
  byte = static_cast<char>(byte ^ 1);
  ASSERT_EQ(::pwrite(writer.get(), &byte, 1, last), 1);
  EXPECT_NE(verifier_->check(copy()), nullptr);
  run();
  EXPECT_EQ(bad_, (std::vector<TileIndex>{0}));
  EXPECT_TRUE(store_->versions().empty());
}

// Found by the tampering test: pulls waited for such a copy up to their whole deadline.
TEST_F(CopyVerifierTest, ACopyThatSomebodyWroteToAndCutShortDoesNotStayUndecided) {
  publish({"m", 1});
  const std::filesystem::path file = copy()->segments[0]->path();
  UniqueFd writer(::open(file.c_str(), O_RDWR | O_CLOEXEC));
  ASSERT_TRUE(writer);
  const auto check = verifier_->check(copy());
  ASSERT_NE(check, nullptr);
  while (!check->over()) ASSERT_GT(context_.run_one(), 0u);
  ASSERT_EQ(check->state, State::kUndecided);
  ASSERT_EQ(::ftruncate(writer.get(), 5000), 0);
  writer.reset();
  verifier_->start();
  context_.restart();
  run();
  EXPECT_TRUE(store_->versions().empty()) << "nobody was told that it is lost";
}

}  // namespace
}  // namespace rekindle::worker
