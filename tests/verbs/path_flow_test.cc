// What a path posts, and when: bounce blocks, rates, memory that comes and goes.
#include <gmock/gmock.h>

#include "tests/verbs/verbs_lab.h"
#include "transport/verbs/memory/local_memory.h"

namespace rekindle::transport::verbs {
namespace {

using testing::drain;
using ::testing::Each;
using testing::read_all;

// Far apart, so that each run is a request of its own, and bounced where `local` is not registered.
ReadOp scattered(const VerbsLab& lab, std::uint64_t id, std::byte* local, std::uint64_t runs) {
  ReadOp op = lab.read(id, id * 1024, local, 512);
  op.count = runs;
  op.remote_stride = 32 * kKiB;
  op.local_stride = 512;
  return op;
}

// What is done but was not signalled must not keep its blocks: nothing else would ever free them.
TEST(VerbsPathFlow, BouncedReadsOfTwoPathsEndHoweverFewBlocksThereAre) {
  for (const std::uint64_t blocks : {1ul, 2ul, 5ul}) {
    for (const std::size_t queue_pairs : {1ul, 4ul}) {
      LabOptions options;
      options.connector.bounce_bytes = blocks * BouncePool::kBlockBytes;
      options.connector.queue_pairs = queue_pairs;
      VerbsLab lab(options);
      std::vector<std::byte> local(2 * kMiB);
      std::vector<std::unique_ptr<Path>> paths;
      std::vector<ReadOp> ops;
      for (std::uint64_t i = 0; i < 16; ++i) {
        ops.push_back(scattered(lab, i, local.data() + i * 128 * kKiB, 200));
      }
      std::vector<Completion> done;
      for (const std::size_t first : {0ul, 8ul}) {
        paths.push_back(lab.path());
        ASSERT_NE(paths.back(), nullptr);
        ASSERT_EQ(paths.back()->post(std::span(ops).subspan(first, 8)).value_or(0), 8u);
      }
      EXPECT_TRUE(testing::eventually([&] {
        std::vector<Completion> some(16);
        for (int turn = 0; turn < 2000; ++turn) {
          const auto& path = paths[static_cast<std::size_t>(turn % 2)];
          const std::size_t count = path->poll(some);
          done.insert(done.end(), some.begin(), some.begin() + static_cast<std::ptrdiff_t>(count));
        }
        return done.size() == ops.size();
      })) << blocks
          << " blocks, " << queue_pairs << " queue pairs";
      for (const auto& path : paths) {
        path->abort();
        (void)drain(*path);
      }
      EXPECT_THAT(statuses(done, ops.size()), Each(OpStatus::kOk));
      for (const auto& op : ops) EXPECT_TRUE(lab.landed(op)) << op.wr_id;
    }
  }
}

TEST(VerbsPathFlow, AbortWhileItWaitsForABlockEndsEveryOp) {
  LabOptions options;
  options.connector.bounce_bytes = BouncePool::kBlockBytes;
  VerbsLab lab(options);
  const auto holder = lab.path();
  const auto waiting = lab.path();
  ASSERT_TRUE(holder != nullptr && waiting != nullptr);
  lab.network().deliver_by_hand();
  std::vector<std::byte> local(4 * kMiB);
  ASSERT_EQ(holder->post(lab.reads(1, kMiB, local.data())).value_or(0), 1u);
  ASSERT_EQ(waiting->post(lab.reads(3, kMiB, local.data() + kMiB)).value_or(0), 3u);
  EXPECT_EQ(lab.network().in_flight(), 1u);
  waiting->abort();
  EXPECT_THAT(statuses(drain(*waiting), 3), Each(OpStatus::kAborted));
  lab.network().deliver_at_post();
  EXPECT_THAT(statuses(drain(*holder), 1), Each(OpStatus::kOk));
}

TEST(VerbsPathFlow, MemoryThatIsRegisteredWhileThePathLivesIsReadIntoDirectly) {
  VerbsLab lab;
  const auto path = lab.path();
  ASSERT_NE(path, nullptr);
  lab.network().deliver_by_hand();
  std::vector<std::byte> local(4 * kMiB);
  const ReadOp op = lab.read(0, 0, local.data(), 2 * kMiB);
  const auto requests = [&] {
    EXPECT_EQ(path->post({&op, 1}).value_or(0), 1u);
    const std::size_t count = lab.network().in_flight();
    lab.network().deliver();
    EXPECT_THAT(statuses(drain(*path), 1), Each(OpStatus::kOk));
    EXPECT_TRUE(lab.landed(op));
    std::fill(local.begin(), local.end(), std::byte{0});
    return count;
  };
  EXPECT_EQ(requests(), 8u) << "bounced, a block each";
  auto used = lab.puller().use(local);
  // Of 1 MiB each, once another thread has registered it.
  EXPECT_TRUE(testing::eventually([&] { return requests() == 2; }));
  used.reset();
  EXPECT_EQ(requests(), 8u);
}

// A read that begins in registered memory and ends in other memory.
TEST(VerbsPathFlow, ReadsAcrossTheEdgesOfRegisteredMemoryLandWhole) {
  VerbsLab lab;
  const auto path = lab.path();
  ASSERT_NE(path, nullptr);
  std::vector<std::byte> local(6 * kMiB);
  const auto used = lab.puller().use(std::span(local).subspan(2 * kMiB + 16, 2 * kMiB));
  ReadOp op = lab.read(0, 4096, local.data() + 1, 5 * kMiB);
  EXPECT_EQ(testing::read_one(*path, op), OpStatus::kOk);
  EXPECT_TRUE(lab.landed(op));
  EXPECT_EQ(path->bytes_landed(), 5 * kMiB);
}

TEST(VerbsPathFlow, RunsOfTwoRegionsInTurnsComeFromTheirOwnRegion) {
  VerbsLab lab;
  const testing::TestSegment other(8 * kMiB, 99);
  const RegionKey other_key = lab.source().serve(other);
  const auto path = lab.path(lab.source().admit({lab.key(), other_key}));
  ASSERT_NE(path, nullptr);
  std::vector<std::byte> local(kMiB);
  const auto used = lab.puller().use(local);
  std::vector<ReadOp> ops;
  for (std::uint64_t i = 0; i < 8; ++i) {
    ops.push_back(scattered(lab, i, local.data() + i * 64 * kKiB, 100));
    if (i % 2 == 1) ops.back().remote = other_key;
  }
  // Twice, so that an op takes the slot of one that read the other region.
  for (int round = 0; round < 2; ++round) {
    std::fill(local.begin(), local.end(), std::byte{0});
    EXPECT_THAT(statuses(read_all(*path, ops), ops.size()), Each(OpStatus::kOk));
    for (const ReadOp& op : ops) {
      const auto& segment = op.remote == other_key ? other : lab.segment();
      for (std::uint64_t run = 0; run < op.count; ++run) {
        const std::byte* const there =
            segment.bytes().data() + op.remote_offset + run * op.remote_stride;
        ASSERT_EQ(std::memcmp(op.local + run * op.local_stride, there, op.run_bytes), 0)
            << op.wr_id;
      }
    }
  }
}

// The bucket holds 16 KiB at such rates, and nothing is sent for less than a quarter of that.
constexpr std::uint64_t kSlowRate = 4 * kKiB;
constexpr std::uint64_t kBucket = 16 * kKiB;
constexpr std::uint64_t kSmallest = 4 * kKiB;

TEST(VerbsPathFlow, ARateShrinksRequestsAndIsSharedByThePathsOfASession) {
  VerbsLab lab;
  const SessionToken slow = lab.source().admit({lab.key()}, kSlowRate);
  const auto first = lab.path(slow);
  const auto second = lab.path(slow);
  const auto unlimited = lab.path();
  ASSERT_TRUE(first != nullptr && second != nullptr && unlimited != nullptr);
  std::vector<std::byte> local(4 * kMiB);
  const auto used = lab.puller().use(local);
  const ReadOp op = lab.read(0, 0, local.data(), kMiB);
  ASSERT_EQ(first->post({&op, 1}).value_or(0), 1u);
  ReadOp other = lab.read(0, kMiB, local.data() + kMiB, kMiB);
  ASSERT_EQ(second->post({&other, 1}).value_or(0), 1u);
  std::vector<Completion> none(4);
  EXPECT_EQ(first->poll(none), 0u);
  EXPECT_EQ(second->poll(none), 0u);
  EXPECT_GE(first->bytes_landed(), kSmallest);
  // A whole mebibyte at this rate takes four minutes.
  EXPECT_LE(first->bytes_landed() + second->bytes_landed(), 16 * kBucket);
  EXPECT_TRUE(first->wake_at().has_value()) << "nothing else will wake its poller";
  EXPECT_TRUE(second->wake_at().has_value());
  EXPECT_EQ(testing::read_one(*unlimited, lab.read(3, 0, local.data() + 2 * kMiB, kMiB)),
            OpStatus::kOk);

  // Nothing of them is out: no need to destroy a queue pair for their end.
  for (const auto& path : {first.get(), second.get()}) {
    path->abort();
    EXPECT_THAT(statuses(drain(*path), 1), Each(OpStatus::kAborted));
  }
  EXPECT_EQ(lab.network().queue_pairs("puller/mlx5_0"), 6u);
}

TEST(VerbsPathFlow, ReadsUnderARateLandWhole) {
  VerbsLab lab;
  const SessionToken limited = lab.source().admit({lab.key()}, 4 * kMiB);
  const auto path = lab.path(limited);
  ASSERT_NE(path, nullptr);
  std::vector<std::byte> local(2 * kMiB);
  std::vector<ReadOp> ops = lab.reads(3, 100'001, local.data());
  ops.push_back(scattered(lab, 3, local.data() + kMiB, 100));
  ReadOp dense = lab.read(4, 5, local.data() + kMiB + 512 * kKiB, 96);  // covering reads
  dense.count = 500;
  dense.remote_stride = 200;
  dense.local_stride = 96;
  ops.push_back(dense);
  EXPECT_THAT(statuses(read_all(*path, ops), ops.size()), Each(OpStatus::kOk));
  for (const auto& op : ops) EXPECT_TRUE(lab.landed(op)) << op.wr_id;
  const std::uint64_t payload = 3 * 100'001 + 100 * 512 + 500 * 96;
  EXPECT_EQ(path->bytes_landed(), payload);
  EXPECT_EQ(lab.network().queue_pairs("puller/mlx5_0"), 2u) << "drained by force";
}

}  // namespace
}  // namespace rekindle::transport::verbs
