#include "src/cuda/nccl.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <thread>

#include "src/base/clock.h"
#include "src/bucket/double_device.h"
#include "tests/cuda/gpu_test.h"
#include "tests/support/must.h"

namespace rekindle::cuda::testing {
namespace {

constexpr std::size_t kBytes = 4 << 20;

TimePoint soon() { return SteadyClock().now() + std::chrono::seconds(60); }

// False: not by the deadline.
bool settles(Communicator& communicator, TimePoint deadline) {
  while (!must(communicator.settled())) {
    if (SteadyClock().now() >= deadline) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return true;
}

TEST(NcclLibrary, ThatIsNotHereIsNotFound) {
  const auto nccl = Nccl::load("libnccl-that-nobody-has.so.2");
  ASSERT_FALSE(nccl);
  EXPECT_EQ(nccl.error().code(), ErrorCode::kNotFound);
}

TEST(NcclLibrary, IsNoOtherLibrary) {
  const auto nccl = Nccl::load("libc.so.6");
  ASSERT_FALSE(nccl);
  EXPECT_EQ(nccl.error().code(), ErrorCode::kNotFound);
}

// All GPUs of this host, one rank each, all on one thread.
class NcclTest : public GpuTest {
 protected:
  struct Member {
    std::unique_ptr<bucket::Device> device;
    // kBytes for each rank.
    std::unique_ptr<bucket::Memory> memory;
    std::unique_ptr<bucket::Stream> stream;
    std::unique_ptr<Communicator> communicator;
  };

  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    nccl_ = must(Nccl::load());
    const auto id = must(nccl_->make_id());
    members_.resize(devices_.size());
    for (int rank = 0; rank < ranks(); ++rank) {
      Member& one = member(rank);
      one.device = must(open_device(driver_, rank));
      one.memory = must(one.device->allocate(devices_.size() * kBytes));
      one.stream = must(one.device->make_stream());
      one.communicator =
          must(Communicator::start(nccl_, *one.device, {.rank = rank, .ranks = ranks()}, id));
    }
    settle();
  }
  int ranks() const { return static_cast<int>(devices_.size()); }
  Member& member(int rank) { return members_[static_cast<std::size_t>(rank)]; }
  bucket::DeviceAddress part(int rank, int of) {
    return member(rank).memory->address() + static_cast<std::uint64_t>(of) * kBytes;
  }
  void settle() {
    for (const Member& one : members_) ASSERT_TRUE(settles(*one.communicator, soon()));
  }
  void fill(int rank, int of, std::byte with) {
    const std::vector<std::byte> bytes(kBytes, with);
    const bucket::Upload upload{.from = bytes.data(), .to = part(rank, of), .run_bytes = kBytes};
    must(member(rank).stream->upload({&upload, 1}));
    must(member(rank).stream->finish(soon()));
  }
  bool holds(int rank, int of, std::byte what) {
    std::vector<std::byte> bytes(kBytes);
    const bucket::Download download{.from = part(rank, of), .to = bytes.data(), .bytes = kBytes};
    must(member(rank).stream->download({&download, 1}));
    must(member(rank).stream->finish(soon()));
    return std::all_of(bytes.begin(), bytes.end(), [&](std::byte one) { return one == what; });
  }
  template <typename Queue>
  void together(const Queue& queue) {
    must(nccl_->group(*members_.front().communicator, [&]() -> Result<void> {
      for (int rank = 0; rank < ranks(); ++rank) TRY_VOID(queue(rank, member(rank)));
      return {};
    }));
    settle();
  }

  std::shared_ptr<const Nccl> nccl_;
  std::vector<Member> members_;
};

TEST_F(NcclTest, ABroadcastReachesEveryRank) {
  EXPECT_GE(nccl_->version(), 21'400);
  const int root = ranks() - 1;
  for (int rank = 0; rank < ranks(); ++rank) fill(rank, 0, std::byte{0});
  fill(root, 0, std::byte{42});
  together([&](int rank, Member& one) {
    return one.communicator->broadcast(part(rank, 0), part(rank, 0), kBytes, root, *one.stream);
  });
  for (int rank = 0; rank < ranks(); ++rank) EXPECT_TRUE(holds(rank, 0, std::byte{42})) << rank;
}

TEST_F(NcclTest, WhatEachRankHasIsGatheredAtAll) {
  for (int rank = 0; rank < ranks(); ++rank) fill(rank, rank, static_cast<std::byte>(rank + 1));
  together([&](int rank, Member& one) {
    return one.communicator->all_gather(part(rank, rank), part(rank, 0), kBytes, *one.stream);
  });
  for (int rank = 0; rank < ranks(); ++rank) {
    for (int of = 0; of < ranks(); ++of) {
      EXPECT_TRUE(holds(rank, of, static_cast<std::byte>(of + 1))) << rank << ' ' << of;
    }
  }
}

TEST_F(NcclTest, ARankThatNobodyMeetsIsNotSettledAndCanBeGivenUp) {
  const auto id = must(nccl_->make_id());
  const auto alone =
      must(Communicator::start(nccl_, *members_.front().device, {.rank = 0, .ranks = 2}, id));
  EXPECT_FALSE(settles(*alone, SteadyClock().now() + std::chrono::milliseconds(200)));
}

TEST_F(NcclTest, ItNeedsARealGpu) {
  const auto device = bucket::make_double_device("double:0", 1 << 20);
  const auto none = Communicator::start(nccl_, *device, {}, must(nccl_->make_id()));
  ASSERT_FALSE(none);
  EXPECT_EQ(none.error().code(), ErrorCode::kInvalid);
}

}  // namespace
}  // namespace rekindle::cuda::testing
