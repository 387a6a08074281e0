#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <ostream>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <poll.h>

#include <gtest/gtest.h>

#include "src/base/clock.h"
#include "src/base/units.h"
#include "tests/transport/test_source.h"
#include "tests/transport/transport_fixture.h"

// The promises of every Path (transport/path.h), for any backend. Include this in one source file
// per backend, write a PathFixture, and instantiate PathConformance with it.
namespace rekindle::transport::testing {

// A serving process, as the suite sees it. Its paths end before it does.
class PathFixture {
 public:
  virtual ~PathFixture() = default;
  virtual RegionKey serve(const TestSegment& segment) = 0;  // `segment` outlives the fixture
  virtual void withdraw(RegionKey key) = 0;
  virtual SessionToken admit(std::vector<RegionKey> regions) = 0;
  virtual void revoke(const SessionToken& token) = 0;  // returns when no read can succeed
  virtual Result<std::unique_ptr<Path>> connect(const SessionToken& token) = 0;
  virtual void kill_peer() = 0;
  // Announces a destination of reads as long as the result lives, for transports that register
  // memory.
  virtual std::shared_ptr<const void> use_local(std::span<std::byte> /*memory*/) { return nullptr; }
  // The machine lacks the device.
  virtual bool skips() const { return false; }
  // Like SIGSTOP and SIGCONT, for FreezablePathConformance.
  virtual void freeze_peer(bool /*frozen*/) {}
};

// The conformance suite over such a source.
template <typename Source>
class SourceFixture : public PathFixture {
 public:
  explicit SourceFixture(bool with_files = true) : with_files_(with_files) {}

  RegionKey serve(const TestSegment& segment) override { return source_.add(segment, with_files_); }
  void withdraw(RegionKey key) override { source_.registry_.remove(key); }
  SessionToken admit(std::vector<RegionKey> regions) override {
    return source_.admit(std::move(regions));
  }
  void revoke(const SessionToken& token) override {
    source_.registry_.revoke(token);
    source_.server_->drop_session(token);
  }
  Result<std::unique_ptr<Path>> connect(const SessionToken& token) override {
    if (source_.server_) target_ = source_.target(token);
    target_.token = token;
    if (!endpoint_.empty()) target_.endpoint = endpoint_;
    return source_.connector_->connect(target_, test_deadline());
  }
  void kill_peer() override {
    target_ = source_.target({});
    source_.server_.reset();
  }

 protected:
  Source source_;
  // Replaces the server's own endpoint unless it is empty.
  std::string endpoint_;

 private:
  const bool with_files_;
  PathTarget target_;
};

struct PathBackend {
  std::string name;
  std::function<std::unique_ptr<PathFixture>()> make;
  friend void PrintTo(const PathBackend& what, std::ostream* out) { *out << what.name; }
};

class PathConformance : public ::testing::TestWithParam<PathBackend> {
 protected:
  PathConformance()
      : fixture_(GetParam().make()),
        key_(fixture_->serve(segment_)),
        token_(fixture_->admit({key_})) {}
  void SetUp() override {
    if (fixture_->skips()) GTEST_SKIP() << "this machine lacks the device";
  }

  std::unique_ptr<Path> connect() { return connect(token_); }
  std::unique_ptr<Path> connect(const SessionToken& token) {
    auto path = fixture_->connect(token);
    // The source may still register its memory with its NICs, in the background.
    const TimePoint give_up = steady_now() + std::chrono::seconds(30);
    while (!path && path.error().code() == ErrorCode::kUnavailable && steady_now() < give_up) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      path = fixture_->connect(token);
    }
    if (path) return std::move(*path);
    ADD_FAILURE() << path.error().message();
    return nullptr;
  }
  ReadOp read(std::uint64_t id, std::uint64_t offset, std::byte* local, std::uint64_t bytes) const {
    return {
        .wr_id = id, .remote = key_, .remote_offset = offset, .local = local, .run_bytes = bytes};
  }
  // `count` reads of `bytes` each, one behind the other.
  std::vector<ReadOp> reads(std::size_t count, std::uint64_t bytes, std::vector<std::byte>& local) {
    local.assign(count * bytes, std::byte{0});
    use(local);
    std::vector<ReadOp> ops;
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint64_t offset = i * bytes % (kSegmentBytes - bytes);
      ops.push_back(read(i, offset, local.data() + i * bytes, bytes));
    }
    return ops;
  }
  void use(std::span<std::byte> memory) { used_.push_back(fixture_->use_local(memory)); }
  bool landed(const ReadOp& op) const {
    for (std::uint64_t run = 0; run < op.count; ++run) {
      if (std::memcmp(op.local + run * op.local_stride,
                      segment_.bytes().data() + op.remote_offset + run * op.remote_stride,
                      op.run_bytes) != 0) {
        return false;
      }
    }
    return true;
  }

  static constexpr std::uint64_t kSegmentBytes = 4 * kMiB + 13;
  const TestSegment segment_{kSegmentBytes};
  const std::unique_ptr<PathFixture> fixture_;
  const RegionKey key_;
  const SessionToken token_;
  std::vector<std::shared_ptr<const void>> used_;
};

TEST_P(PathConformance, ContiguousReadsOfOddSizesLandByteForByte) {
  const auto path = connect();
  ASSERT_NE(path, nullptr);
  for (const std::uint64_t bytes :
       {1ul, 2ul, 7ul, 4095ul, 4097ul, 65'537ul, 1'000'003ul, kSegmentBytes}) {
    std::vector<std::byte> local(bytes + 2, std::byte{0xee});
    use(local);
    const ReadOp op = read(bytes, kSegmentBytes - bytes, local.data() + 1, bytes);
    ASSERT_EQ(read_one(*path, op), OpStatus::kOk) << bytes;
    EXPECT_TRUE(landed(op)) << bytes;
    EXPECT_EQ(local.front(), std::byte{0xee});
    EXPECT_EQ(local.back(), std::byte{0xee});
    used_.clear();  // before the memory goes
  }
}

TEST_P(PathConformance, RandomStridedReadsEqualANaiveCopy) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  const auto pick = [&](std::uint64_t low, std::uint64_t high) {
    return std::uniform_int_distribution<std::uint64_t>(low, high)(random);
  };
  const auto path = connect();
  ASSERT_NE(path, nullptr);
  constexpr std::size_t kOps = 200;
  std::vector<std::vector<std::byte>> local(kOps), expected(kOps);
  std::vector<ReadOp> ops;
  for (std::size_t i = 0; i < kOps; ++i) {
    ReadOp op{.wr_id = i, .remote = key_};
    op.count = pick(1, 300);
    op.run_bytes = i % 5 == 0 ? 1 : i % 7 == 0 ? pick(30 * kKiB, 300 * kKiB) : pick(1, 4000);
    op.count = std::min(op.count, 2 * kMiB / op.run_bytes);
    op.remote_stride = op.run_bytes + (i % 3 == 0 ? 0 : pick(0, 900));
    op.local_stride = op.run_bytes + (i % 4 == 0 ? 0 : pick(0, 60));
    const std::uint64_t extent = (op.count - 1) * op.remote_stride + op.run_bytes;
    op.remote_offset = pick(0, kSegmentBytes - extent);
    local[i].assign((op.count - 1) * op.local_stride + op.run_bytes, std::byte{0xee});
    expected[i] = local[i];
    use(local[i]);
    op.local = local[i].data();
    for (std::uint64_t run = 0; run < op.count; ++run) {
      std::memcpy(expected[i].data() + run * op.local_stride,
                  segment_.bytes().data() + op.remote_offset + run * op.remote_stride,
                  op.run_bytes);
    }
    ops.push_back(op);
  }
  const auto completions = read_all(*path, ops);
  EXPECT_EQ(sorted_ids(completions), first_ids(kOps));
  for (const auto& completion : completions) EXPECT_EQ(completion.status, OpStatus::kOk);
  for (std::size_t i = 0; i < kOps; ++i) EXPECT_EQ(local[i], expected[i]) << "op " << i;
}

TEST_P(PathConformance, ReadsOutsideTheRegionAreInvalidAndThePathGoesOn) {
  const auto path = connect();
  ASSERT_NE(path, nullptr);
  constexpr std::uint64_t kMax = ~std::uint64_t{0};
  std::vector<std::byte> local(64, std::byte{0xee});
  const ReadOp bad[] = {
      {.remote_offset = kSegmentBytes, .run_bytes = 1},
      {.remote_offset = kSegmentBytes - 7, .run_bytes = 8},
      {.remote_offset = kSegmentBytes + 1, .run_bytes = 0},
      {.remote_offset = kMax, .run_bytes = 8},
      {.remote_offset = kMax - 3, .run_bytes = 8},
      {.remote_offset = 8, .run_bytes = kMax},
      {.run_bytes = 8, .count = 2, .remote_stride = kMax, .local_stride = 8},
      {.run_bytes = 8, .count = std::uint64_t{1} << 61, .remote_stride = 8, .local_stride = 8},
      {.run_bytes = 8, .count = 2, .remote_stride = kSegmentBytes - 7, .local_stride = 8},
      {.run_bytes = 1 << 20, .count = std::uint64_t{1} << 50},  // 2^70 bytes in all
      {.run_bytes = 1, .count = 3, .remote_stride = kMax / 2 + 1, .local_stride = 1},
      {.remote_offset = kSegmentBytes, .run_bytes = kMax, .count = kMax, .remote_stride = kMax},
  };
  for (ReadOp op : bad) {
    op.remote = key_;
    op.local = local.data();
    EXPECT_EQ(read_one(*path, op), OpStatus::kInvalid)
        << op.remote_offset << " " << op.run_bytes << " " << op.count << " " << op.remote_stride;
  }
  EXPECT_EQ(local, std::vector<std::byte>(64, std::byte{0xee}));
  EXPECT_EQ(path->bytes_landed(), 0u);
  EXPECT_EQ(read_one(*path, read(1, 0, local.data(), local.size())), OpStatus::kOk);
}

TEST_P(PathConformance, AnotherGenerationIsStaleAndAForeignRegionIsDenied) {
  const TestSegment other(4096, 7);
  const RegionKey foreign = fixture_->serve(other);
  const RegionKey gone = fixture_->serve(other);
  const SessionToken token = fixture_->admit({key_, gone});
  fixture_->withdraw(gone);
  const auto path = connect(token);
  ASSERT_NE(path, nullptr);
  std::vector<std::byte> local(64, std::byte{0xee});
  const auto status_of = [&](RegionKey key) {
    ReadOp op = read(9, 0, local.data(), local.size());
    op.remote = key;
    return read_one(*path, op);
  };
  EXPECT_EQ(status_of(gone), OpStatus::kStale);
  EXPECT_EQ(status_of(foreign), OpStatus::kDenied);
  EXPECT_EQ(local, std::vector<std::byte>(64, std::byte{0xee}));
  EXPECT_EQ(status_of(key_), OpStatus::kOk);
}

TEST_P(PathConformance, AnUnknownSessionReadsNothing) {
  std::vector<std::byte> local(64);
  const auto path = fixture_->connect(SessionToken::random());
  if (path) {
    EXPECT_EQ(read_one(**path, read(1, 0, local.data(), local.size())), OpStatus::kDenied);
  } else {
    EXPECT_EQ(path.error().code(), ErrorCode::kDenied);
  }
}

TEST_P(PathConformance, TenThousandSmallReadsPostedInPrefixesCompleteOnceEach) {
  const auto path = connect();
  ASSERT_NE(path, nullptr);
  std::vector<std::byte> local;
  const auto ops = reads(10'000, 24, local);
  const auto taken = path->post(ops);
  ASSERT_TRUE(taken) << taken.error().message();
  ASSERT_GT(*taken, 0u);
  ASSERT_LE(*taken, ops.size());
  EXPECT_EQ(path->in_flight(), *taken);
  auto completions = drain(*path);
  EXPECT_EQ(completions.size(), *taken);
  const auto rest = read_all(*path, {ops.begin() + static_cast<std::ptrdiff_t>(*taken), ops.end()});
  completions.insert(completions.end(), rest.begin(), rest.end());
  EXPECT_EQ(sorted_ids(completions), first_ids(ops.size()));
  for (const auto& completion : completions) ASSERT_EQ(completion.status, OpStatus::kOk);
  for (const auto& op : ops) ASSERT_TRUE(landed(op)) << op.wr_id;
}

TEST_P(PathConformance, BytesLandedNeverFallsAndEndsAtTheTotal) {
  const auto path = connect();
  ASSERT_NE(path, nullptr);
  std::vector<std::byte> local;
  const auto ops = reads(24, 300'001, local);
  std::size_t posted = 0;
  std::vector<Completion> some(3);
  std::uint64_t last = path->bytes_landed();
  EXPECT_EQ(last, 0u);
  std::size_t done = 0;
  ASSERT_TRUE(eventually([&] {
    for (int turn = 0; turn < 100 && done < ops.size(); ++turn) {
      if (posted < ops.size()) posted += path->post(std::span(ops).subspan(posted)).value_or(0);
      done += path->poll(some);
      EXPECT_GE(path->bytes_landed(), last);
      last = path->bytes_landed();
    }
    return done == ops.size();
  }));
  EXPECT_EQ(last, 24u * 300'001u);
}

TEST_P(PathConformance, TheDescriptorIsReadableWhenThereIsSomethingToDo) {
  const auto path = connect();
  ASSERT_NE(path, nullptr);
  ASSERT_GE(path->wait_fd(), 0);
  std::vector<std::byte> local(kSegmentBytes);
  for (std::uint64_t round = 0; round < 20; ++round) {
    const ReadOp op = read(round, 0, local.data(), round % 2 == 0 ? 64 : kSegmentBytes);
    ASSERT_EQ(path->post({&op, 1}).value_or(0), 1u);
    std::vector<Completion> done(4);
    const TimePoint deadline = test_deadline();
    while (path->poll(done) == 0) {
      if (!path->arm()) continue;
      const auto events = static_cast<short>(POLLIN | (path->wants_write() ? POLLOUT : 0));
      pollfd entry{path->wait_fd(), events, 0};
      ASSERT_EQ(::poll(&entry, 1, 20'000), 1) << "nothing to wait for, but the read is not done";
      ASSERT_LT(std::chrono::steady_clock::now(), deadline);
    }
    EXPECT_EQ(done[0].wr_id, round);
  }
}

TEST_P(PathConformance, EveryPostedReadCompletesOnceAfterAbortAndNothingIsWrittenLater) {
  const auto path = connect();
  const auto bystander = connect();
  ASSERT_TRUE(path != nullptr && bystander != nullptr);
  std::vector<std::byte> local;
  const auto ops = reads(64, 1'000'000, local);
  const std::size_t taken = path->post(ops).value_or(0);
  ASSERT_GT(taken, 0u);
  std::vector<Completion> completions(1);
  completions.resize(path->poll(completions));
  path->abort();
  path->abort();
  const auto rest = drain(*path);
  completions.insert(completions.end(), rest.begin(), rest.end());
  EXPECT_EQ(sorted_ids(completions), first_ids(taken));
  for (const auto& completion : completions) {
    EXPECT_TRUE(completion.status == OpStatus::kOk || completion.status == OpStatus::kAborted)
        << to_string(completion.status);
    if (completion.status == OpStatus::kOk) {
      EXPECT_TRUE(landed(ops[completion.wr_id])) << completion.wr_id;
    }
  }
  const auto refused = path->post(ops);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), ErrorCode::kPeerLost);
  EXPECT_FALSE(path->post({}));

  std::fill(local.begin(), local.end(), std::byte{0x11});
  std::vector<std::byte> other;
  EXPECT_EQ(read_all(*bystander, reads(8, 1'000'000, other)).size(),
            8u);  // takes longer than a late write would
  EXPECT_EQ(std::count(local.begin(), local.end(), std::byte{0x11}),
            static_cast<std::ptrdiff_t>(local.size()));
}

TEST_P(PathConformance, EveryPostedReadCompletesOnceWhenThePeerDies) {
  const auto path = connect();
  ASSERT_NE(path, nullptr);
  std::vector<std::byte> local;
  const auto ops = reads(64, 1'000'000, local);
  const std::size_t taken = path->post(ops).value_or(0);
  ASSERT_GT(taken, 0u);
  fixture_->kill_peer();
  const auto completions = drain(*path);
  EXPECT_EQ(sorted_ids(completions), first_ids(taken));
  for (const auto& completion : completions) {
    if (completion.status == OpStatus::kOk) {
      EXPECT_TRUE(landed(ops[completion.wr_id])) << completion.wr_id;
    } else {  // kStale: the keys may go before the connection
      EXPECT_TRUE(completion.status == OpStatus::kPeerLost || completion.status == OpStatus::kStale)
          << to_string(completion.status);
    }
  }
  EXPECT_FALSE(fixture_->connect(token_));
}

// The engine asks an idle path with an empty post() whether its peer is still there.
TEST_P(PathConformance, AnEmptyPostTakesNothingAndTellsABrokenPath) {
  const auto path = connect();
  ASSERT_NE(path, nullptr);
  const auto none = path->post({});
  ASSERT_TRUE(none) << none.error().message();
  EXPECT_EQ(*none, 0u);
  EXPECT_EQ(path->in_flight(), 0u);
  fixture_->kill_peer();
  std::vector<std::byte> local(64);
  std::vector<Completion> completions(1);
  const ReadOp op = read(3, 0, local.data(), local.size());
  if (path->post({&op, 1}).value_or(0) == 1) {
    completions = drain(*path);
    ASSERT_EQ(completions.size(), 1u);
    if (completions[0].status == OpStatus::kOk) return;  // a mapping outlives its server
  }
  EXPECT_TRUE(eventually([&] {
    std::vector<Completion> nothing(1);
    EXPECT_EQ(path->poll(nothing), 0u);
    return !path->post({});
  }));
}

// For backends whose peer can be stopped inside the test's process.
class FreezablePathConformance : public PathConformance {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(FreezablePathConformance);

TEST_P(FreezablePathConformance, AFrozenPeerCompletesNothingAndAbortStillDrains) {
  const auto path = connect();
  const auto other = connect();
  ASSERT_TRUE(path != nullptr && other != nullptr);
  fixture_->freeze_peer(true);
  std::vector<std::byte> local;
  const std::size_t taken = path->post(reads(16, 100'000, local)).value_or(0);
  ASSERT_GT(taken, 0u);
  std::vector<Completion> some(16);
  for (int turn = 0; turn < 1000; ++turn) ASSERT_EQ(path->poll(some), 0u);
  EXPECT_EQ(path->bytes_landed(), 0u);
  path->abort();
  EXPECT_EQ(sorted_ids(drain(*path)), first_ids(taken));

  // The peer answers these requests when it runs again.
  std::vector<std::byte> late;
  const auto ops = reads(4, 100'000, late);
  ASSERT_EQ(other->post(ops).value_or(0), ops.size());
  fixture_->freeze_peer(false);
  for (const auto& completion : drain(*other)) EXPECT_EQ(completion.status, OpStatus::kOk);
  for (const auto& op : ops) EXPECT_TRUE(landed(op)) << op.wr_id;
}

TEST_P(PathConformance, EmptyReadsCompleteAndTouchNothing) {
  const auto path = connect();
  ASSERT_NE(path, nullptr);
  EXPECT_EQ(read_one(*path, read(1, 0, nullptr, 0)), OpStatus::kOk);
  EXPECT_EQ(read_one(*path, read(2, kSegmentBytes, nullptr, 0)), OpStatus::kOk);
  ReadOp no_runs = read(3, 0, nullptr, 8);
  no_runs.count = 0;
  EXPECT_EQ(read_one(*path, no_runs), OpStatus::kOk);
  EXPECT_EQ(path->bytes_landed(), 0u);
}

// The destination file was truncated. That is no fault of the peer's, and no crash.
TEST_P(PathConformance, ADestinationThatCannotBeWrittenIsALocalFault) {
  TestSegment destination(kSegmentBytes);
  auto* const local = const_cast<std::byte*>(destination.bytes().data());
  destination.truncate(1 * kMiB);
  for (const std::uint64_t offset : {0ul, 3 * kMiB}) {
    const auto path = connect();
    ASSERT_NE(path, nullptr);
    EXPECT_EQ(read_one(*path, read(1, offset, local + offset, 1 * kMiB)),
              offset == 0 ? OpStatus::kOk : OpStatus::kLocalFault);
    ReadOp strided = read(2, 0, local + offset, 1000);
    strided.count = 200;
    strided.remote_stride = strided.local_stride = 5000;
    EXPECT_EQ(read_one(*connect(), strided), offset == 0 ? OpStatus::kOk : OpStatus::kLocalFault);
    path->abort();
  }
}

TEST_P(PathConformance, AnyWrIdComesBackAsItWas) {
  const auto path = connect();
  ASSERT_NE(path, nullptr);
  std::vector<std::byte> local(8);
  for (const std::uint64_t id : {0ul, 1ul << 32, ~0ul >> 1, ~0ul}) {
    // read_one() compares the ids.
    EXPECT_EQ(read_one(*path, read(id, 0, local.data(), 8)), OpStatus::kOk);
  }
}

TEST_P(PathConformance, ADeadPeersPathAbortsToo) {
  const auto path = connect();
  ASSERT_NE(path, nullptr);
  std::vector<std::byte> local;
  const std::size_t taken = path->post(reads(16, 300'001, local)).value_or(0);
  ASSERT_GT(taken, 0u);
  fixture_->kill_peer();
  path->abort();
  EXPECT_EQ(sorted_ids(drain(*path)), first_ids(taken));
}

TEST_P(PathConformance, TwoPathsOfOneSessionDoNotDisturbEachOther) {
  const auto first = connect();
  const auto second = connect();
  ASSERT_TRUE(first != nullptr && second != nullptr);
  std::vector<std::byte> first_local, second_local;
  const auto first_ops = reads(8, 500'000, first_local);
  const auto second_ops = reads(8, 500'000, second_local);
  const std::size_t taken = first->post(first_ops).value_or(0);
  ASSERT_GT(taken, 0u);
  first->abort();
  const auto completions = read_all(*second, second_ops);
  EXPECT_EQ(sorted_ids(completions), first_ids(8));
  for (const auto& completion : completions) EXPECT_EQ(completion.status, OpStatus::kOk);
  for (const auto& op : second_ops) EXPECT_TRUE(landed(op)) << op.wr_id;
  EXPECT_EQ(sorted_ids(drain(*first)), first_ids(taken));
}

TEST_P(PathConformance, ARevokedSessionReadsNoMoreAndOthersGoOn) {
  const SessionToken doomed = fixture_->admit({key_});
  const auto victim = connect(doomed);
  const auto bystander = connect();
  ASSERT_TRUE(victim != nullptr && bystander != nullptr);
  std::vector<std::byte> local(4096);
  ASSERT_EQ(read_one(*victim, read(0, 0, local.data(), 4096)), OpStatus::kOk);
  fixture_->revoke(doomed);
  std::vector<std::byte> untouched(4096, std::byte{0xee});
  const ReadOp op = read(1, 0, untouched.data(), 4096);
  if (victim->post({&op, 1}).value_or(0) == 1) {
    const auto completions = drain(*victim);
    ASSERT_EQ(completions.size(), 1u);
    EXPECT_NE(completions[0].status, OpStatus::kOk);
  }
  EXPECT_EQ(untouched, std::vector<std::byte>(4096, std::byte{0xee}));
  EXPECT_EQ(read_one(*bystander, read(2, 0, local.data(), 4096)), OpStatus::kOk);
}

}  // namespace rekindle::transport::testing
