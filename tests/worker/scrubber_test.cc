#include "recovery/worker/scrubber.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <boost/asio/io_context.hpp>
#include <gtest/gtest.h>

#include "tests/support/process.h"
#include "tests/worker/published_version.h"

namespace rekindle::worker {
namespace {

using store::CopyState;

// Two published copies, m@1 and m@2, that this process has verified.
class ScrubberTest : public ::testing::Test {
 protected:
  void SetUp() override {
    publish({"m", 1});
    publish({"m", 2});
    CopyVerifier::Hooks hooks;
    hooks.replace = [this](std::shared_ptr<const store::StoredVersion> copy,
                           const CopyVerifier::BadCopy& bad) -> async::Task<void> {
      replaced_.push_back(copy->manifest.checkpoint->id);
      bad_ = bad.tiles;
      (void)store_->retire_copy(*copy);
      context_.stop();
      co_return;
    };
    verifier_ = std::make_unique<CopyVerifier>(context_.get_executor(), *store_, blocking_,
                                               digests_, std::move(hooks));
  }
  void publish(const ModelVersion& id) { publish_rows(*store_, dir_ / "made", id, 4096); }
  std::shared_ptr<const store::StoredVersion> copy(std::uint64_t version) const {
    return store_->find({"m", version}).at(0);
  }
  TimePoint read(std::uint64_t version) const {
    return copy(version)->verification->record()->read;
  }
  void scrub(ScrubOptions options) {
    scrubber_ = std::make_unique<Scrubber>(context_.get_executor(), *store_, *verifier_, blocking_,
                                           options);
    scrubber_->start();
  }
  // Returns false after 20 s.
  bool run_until(const std::function<bool()>& done) {
    const TimePoint give_up = SteadyClock().now() + std::chrono::seconds(20);
    while (!done() && SteadyClock().now() < give_up) {
      context_.restart();
      context_.run_for(std::chrono::milliseconds(5));
    }
    return done();
  }

  testing::TempDir dir_{true};
  boost::asio::io_context context_{1};
  std::unique_ptr<store::SegmentStore> store_ = std::move(*store::SegmentStore::open(
      {.directory = dir_ / "store", .evidence = store::Evidence::kStamps}));
  std::vector<ModelVersion> replaced_;
  std::vector<TileIndex> bad_;
  WorkerPool blocking_{"t-blocking", 2, 64};
  WorkerPool digests_{"t-digest", 2, 64};
  std::unique_ptr<CopyVerifier> verifier_;
  std::unique_ptr<Scrubber> scrubber_;
};

constexpr ScrubOptions kAtOnce{.every = std::chrono::milliseconds(1), .core_share = 1};

TEST_F(ScrubberTest, ANewIntervalAppliesAtOnce) {
  const TimePoint first = read(1);
  scrub({.every = std::chrono::milliseconds(0), .core_share = 1});
  context_.run_for(std::chrono::milliseconds(20));
  EXPECT_EQ(read(1), first);
  scrubber_->set_interval(std::chrono::milliseconds(1));
  EXPECT_TRUE(run_until([&] { return read(1) > first; }));
}

TEST_F(ScrubberTest, EachCopyIsReadAgainAndAgain) {
  const TimePoint first = read(1);
  const TimePoint second = read(2);
  scrub(kAtOnce);
  EXPECT_TRUE(run_until([&] { return read(1) > first && read(2) > second; }));
  const TimePoint again = read(1);
  EXPECT_TRUE(run_until([&] { return read(1) > again; }));
  EXPECT_TRUE(replaced_.empty());
}

TEST_F(ScrubberTest, BytesThatHaveChangedWithoutAStampAreFound) {
  // Bad memory changes bytes without a time stamp. So does a write through a mapping whose pages
  // were read before. This store takes no leases, which would reveal the mapping.
  const std::filesystem::path file = copy(1)->segments[0]->path();
  const int fd = ::open(file.c_str(), O_RDWR | O_CLOEXEC);
  const auto size = std::filesystem::file_size(file);
  auto* const bytes =
      static_cast<volatile char*>(::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
  ASSERT_NE(bytes, MAP_FAILED);
  ::close(fd);
  // A read and a write in C++ may become one instruction, which writes at once.
  ASSERT_EQ(::madvise(const_cast<char*>(bytes), size, MADV_POPULATE_READ), 0);
  bytes[size - 1] = static_cast<char>(bytes[size - 1] ^ 1);
  ::munmap(const_cast<char*>(bytes), size);
  ASSERT_EQ(copy(1)->verification->state(), CopyState::kVerified) << "no stamp tells";
  const TileIndex last = copy(1)->manifest.checkpoint->tiles.tile_count() - 1;
  scrub(kAtOnce);
  EXPECT_TRUE(run_until([&] { return !replaced_.empty(); }));
  EXPECT_EQ(replaced_, (std::vector<ModelVersion>{{"m", 1}}));
  EXPECT_EQ(bad_, (std::vector<TileIndex>{last}));
  EXPECT_EQ(copy(2)->verification->state(), CopyState::kVerified);
}

TEST_F(ScrubberTest, AShareOfACoreIsNotExceeded) {
  // One tile is read at once. The others wait for an hour of rest.
  const TimePoint first = read(1);
  scrub({.every = std::chrono::milliseconds(1), .core_share = 1e-6});
  context_.run_for(std::chrono::milliseconds(300));
  EXPECT_EQ(read(1), first);
}

TEST_F(ScrubberTest, KeepsNoCopyThatWasLetGoOf) {
  scrub({.every = std::chrono::milliseconds(1), .core_share = 1e-6});
  context_.run_for(std::chrono::milliseconds(300));
  std::weak_ptr<const store::StoredVersion> gone = copy(1);
  ASSERT_TRUE(store_->retire({"m", 1}));
  EXPECT_TRUE(gone.expired());
}

TEST(CoreShare, B9RestsOfLessThanAMillisecondAddUp) {
  using namespace std::chrono_literals;
  CoreShare share(0.01);
  std::chrono::milliseconds rest{};
  for (int tile = 0; tile < 100'000; ++tile) rest += share.rest_after(3us);
  // Oracle: 300 ms of work, at 1 % of a core, need 29.7 s of rest.
  EXPECT_GE(rest, 29'699ms);
  EXPECT_LE(rest, 29'700ms);
}

TEST(CoreShare, B9NoRestIsOwedTwice) {
  using namespace std::chrono_literals;
  CoreShare share(0.25);
  EXPECT_EQ(share.rest_after(500us), 1ms);
  EXPECT_EQ(share.rest_after(500us), 2ms) << "half a millisecond was left";
  EXPECT_EQ(share.rest_after(1s), 3s);
  EXPECT_EQ(share.rest_after(0us), 0ms);
}

TEST(CoreShare, B9AWholeCoreNeedsNoRest) {
  CoreShare share(1);
  EXPECT_EQ(share.rest_after(std::chrono::hours(1)), std::chrono::milliseconds(0));
}

}  // namespace
}  // namespace rekindle::worker
