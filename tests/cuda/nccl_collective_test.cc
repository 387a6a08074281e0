#include <chrono>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>

#include "src/bucket/double_device.h"
#include "src/cuda/nccl.h"
#include "tests/cuda/gpu_test.h"
#include "tests/support/must.h"

namespace rekindle::cuda::testing {
namespace {

constexpr std::uint64_t kShare = (4 << 20) + 256;

TimePoint in_a_minute() { return SteadyClock().now() + std::chrono::seconds(60); }

std::byte byte_of(std::size_t share) { return static_cast<std::byte>(share + 1); }

// One rank, on the GPU of its number. Its part of a test runs on a thread of its own.
class Rank {
 public:
  Rank(std::shared_ptr<const Driver> driver, bucket::Collectives& collectives, std::uint32_t rank,
       std::uint32_t ranks, const std::string& id)
      : rank_(rank),
        device(must(open_device(std::move(driver), static_cast<int>(rank)))),
        stream(must(device->make_stream())),
        collective(must(collectives.meet(*device, rank, ranks, id))) {
    settle();
  }
  void settle() const {
    const TimePoint deadline = in_a_minute();
    while (!must(collective->settled())) {
      if (SteadyClock().now() > deadline) throw std::runtime_error("the others did not come");
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  // Fills its own shares of a bucket with right bytes, the rest with wrong ones.
  void fill(const std::vector<std::uint32_t>& owners) {
    memory = must(device->allocate(owners.size() * kShare));
    for (std::size_t share = 0; share < owners.size(); ++share) {
      const std::byte with = owners[share] == rank_ ? byte_of(share) : std::byte{0xff};
      const std::vector<std::byte> bytes(kShare, with);
      const bucket::Upload upload{
          .from = bytes.data(), .to = memory->address() + share * kShare, .run_bytes = kShare};
      must(stream->upload({&upload, 1}));
      must(stream->finish(in_a_minute()));
    }
  }
  bool has_all(std::size_t shares) {
    std::vector<std::byte> bytes(shares * kShare);
    const bucket::Download download{
        .from = memory->address(), .to = bytes.data(), .bytes = bytes.size()};
    must(stream->download({&download, 1}));
    must(stream->finish(in_a_minute()));
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      if (bytes[i] != byte_of(i / kShare)) return false;
    }
    return true;
  }

 private:
  const std::uint32_t rank_;

 public:
  const std::unique_ptr<bucket::Device> device;
  std::unique_ptr<bucket::Memory> memory;
  const std::unique_ptr<bucket::Stream> stream;
  const std::unique_ptr<bucket::Collective> collective;
};

class NcclCollectiveTest : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    collectives_ = must(make_nccl_collectives());
  }
  // Runs `body` for a rank on each of the first `ranks` GPUs.
  template <typename Body>
  void on_gpus(std::uint32_t ranks, const Body& body) {
    const std::string id = must(collectives_->make_id());
    std::vector<std::string> errors(ranks);
    std::vector<std::thread> threads;
    for (std::uint32_t number = 0; number < ranks; ++number) {
      threads.emplace_back([&, number] {
        try {
          Rank rank(driver_, *collectives_, number, ranks, id);
          body(rank);
        } catch (const std::exception& error) {
          errors[number] = error.what();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(errors, std::vector<std::string>(ranks));
  }
  void expect_spread(std::uint32_t ranks, const std::vector<std::vector<std::uint32_t>>& turns) {
    on_gpus(ranks, [&](Rank& rank) {
      for (const auto& owners : turns) {
        rank.fill(owners);
        must(rank.collective->spread(rank.memory->address(), kShare, owners, *rank.stream));
        rank.settle();
        must(rank.stream->finish(in_a_minute()));
        EXPECT_TRUE(must(rank.collective->settled()));
        EXPECT_TRUE(rank.has_all(owners.size()))
            << "rank " << rank.collective->rank() << ", " << owners.size() << " shares";
      }
    });
  }

  std::unique_ptr<bucket::Collectives> collectives_;
};

TEST_F(NcclCollectiveTest, ARankAloneHasWhatItOwns) { expect_spread(1, {{0}, {0, 0}, {0}}); }

TEST_F(NcclCollectiveTest, EveryRankGetsEveryShareFromItsOwner) {
  const auto ranks = static_cast<std::uint32_t>(devices_.size());
  // The same as with one rank.
  if (ranks < 2) return;
  std::vector<std::uint32_t> all(ranks);
  std::iota(all.begin(), all.end(), 0u);
  std::vector<std::uint32_t> backwards(all.rbegin(), all.rend());
  expect_spread(ranks, {all, {ranks - 1}, backwards, {0}, all, {0, ranks - 1}});
}

TEST_F(NcclCollectiveTest, Row43WhatWaitsForARankEndsWhenItIsAborted) {
  // There is no rank to wait for.
  if (devices_.size() < 2) return;
  on_gpus(2, [](Rank& rank) {
    const std::vector<std::uint32_t> owners{0, 1};
    rank.fill(owners);
    if (rank.collective->rank() == 0) {
      must(rank.collective->spread(rank.memory->address(), kShare, owners, *rank.stream));
      // The work waits on the device, or is not queued yet, because ranks connect at their first
      // use.
      (void)rank.stream->finish(SteadyClock().now() + std::chrono::milliseconds(200));
    }
    rank.collective->abort();
    must(rank.stream->finish(in_a_minute()));
    EXPECT_FALSE(rank.collective->settled());
    EXPECT_FALSE(rank.collective->spread(rank.memory->address(), kShare, owners, *rank.stream));
  });
}

TEST_F(NcclCollectiveTest, WhatCannotMeetIsRefused) {
  const auto gpu = must(open_device(driver_, 0));
  const auto device = bucket::make_double_device("double:0", 1 << 20);
  const std::string id = must(collectives_->make_id());
  const auto code = [&](bucket::Device& on, std::uint32_t rank, const std::string& by) {
    const auto met = collectives_->meet(on, rank, 1, by);
    return met ? std::nullopt : std::optional(met.error().code());
  };
  EXPECT_EQ(code(*device, 0, id), ErrorCode::kInvalid) << "no GPU";
  EXPECT_EQ(code(*gpu, 1, id), ErrorCode::kInvalid) << "rank 1 of 1";
  EXPECT_EQ(code(*gpu, 0, id.substr(1)), ErrorCode::kInvalid) << "half an id";
  EXPECT_EQ(code(*gpu, 0, id), std::nullopt);
}

}  // namespace
}  // namespace rekindle::cuda::testing
