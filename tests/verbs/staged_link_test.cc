// Staged links on the fake: pullers that break the rules, sources that cannot read their own bytes,
// and rights that are taken away under load.
#include <algorithm>
#include <atomic>
#include <fstream>
#include <string>
#include <thread>

#include <gtest/gtest.h>

#include "tests/verbs/staged_fixture.h"
#include "transport/verbs/staged/stage_pool.h"

namespace rekindle::transport::verbs {
namespace {

using testing::drain;
using testing::eventually;
using testing::read_all;
using testing::read_one;
using testing::TestSegment;

TEST_F(StagedLinkTest, APullerWhoseMessageIsCutShortLosesItsLinkOnly) {
  start();
  auto bytes = RawPuller::bytes_of(request());
  bytes.resize(bytes.size() - 1);
  expect_only_its_own_link_to_end({bytes});
}

TEST_F(StagedLinkTest, APullerThatNamesABlockItDoesNotHaveLosesItsLinkOnly) {
  start();
  StageRequest bad = request();
  bad.slot = kMaxStageBlocks;
  expect_only_its_own_link_to_end({RawPuller::bytes_of(bad)});
}

TEST_F(StagedLinkTest, APullerThatAsksForMoreThanABlockLosesItsLinkOnly) {
  start();
  StageRequest bad = request();
  bad.run_bytes = kMaxStageBlockBytes + 1;
  expect_only_its_own_link_to_end({RawPuller::bytes_of(bad)});
}

TEST_F(StagedLinkTest, APullerThatAsksForABlockTwiceLosesItsLinkOnly) {
  start();
  network_.deliver_at_post();  // both arrive before the source looks
  const auto bytes = RawPuller::bytes_of(request());
  expect_only_its_own_link_to_end({bytes, bytes});
}

TEST_F(StagedLinkTest, RunsOutsideTheRegionAndForeignRegionsAreAnsweredAndTheLinkGoesOn) {
  start();
  const TestSegment other(4096, 7);
  const RegionKey foreign = source_->serve(other);
  RawPuller raw(puller_api_);
  const auto connected = raw.connect(*source_, token_);
  ASSERT_TRUE(connected) << connected.error().message();
  StageRequest asked = request();
  const auto status_of = [&](const StageRequest& what) {
    raw.say({RawPuller::bytes_of(what)});
    const auto answer = raw.answer();
    EXPECT_TRUE(answer) << answer.error().message();
    return answer ? answer->status : OpStatus::kAborted;
  };
  asked.offset = kStagedBytes - 63;
  EXPECT_EQ(status_of(asked), OpStatus::kInvalid);
  asked = request();
  asked.region = foreign;
  EXPECT_EQ(status_of(asked), OpStatus::kDenied);
  EXPECT_EQ(status_of(request()), OpStatus::kOk);
  const auto block = raw.read_block(64);
  ASSERT_EQ(block.size(), 64u);
  EXPECT_EQ(std::memcmp(block.data(), segment_.bytes().data(), 64), 0);
  source_->registry().remove(key_);
  EXPECT_EQ(status_of(request()), OpStatus::kStale);
}

TEST_F(StagedLinkTest, ABlockHoldsNothingOfTheSessionBefore) {
  start({.staging_bytes = kMaxStageBlockBytes + kPageBytes});  // a single block
  {
    RawPuller first(puller_api_);
    ASSERT_TRUE(first.connect(*source_, token_));
    first.say({RawPuller::bytes_of(request())});
    ASSERT_TRUE(first.answer());
    ASSERT_NE(first.read_block(64), std::vector<std::byte>(64));
    source_->revoke(token_);
  }
  RawPuller second(puller_api_);
  const auto connected = second.connect(*source_, source_->admit({key_}));
  ASSERT_TRUE(connected) << connected.error().message();
  EXPECT_EQ(second.read_block(kMaxStageBlockBytes), std::vector<std::byte>(kMaxStageBlockBytes));
}

TEST_F(StagedLinkTest, WithoutAWindowThePullerHearsWhyTheRegionIsNotRegistered) {
  start({.staging_bytes = 0});
  const auto paths = puller_->connect(*source_, token_);
  ASSERT_FALSE(paths);
  EXPECT_NE(paths.error().message().find("2.00 MiB of 2.00 MiB not registered"), std::string::npos)
      << paths.error().message();
  EXPECT_FALSE(source_->server()->registration_problems().empty());
}

TEST_F(StagedLinkTest, BlocksOfASilentPullerAreLentToOthersInTheEnd) {
  start({.staging_bytes = kMaxStageBlockBytes + kPageBytes, .staging_idle_limit = 0ms});
  const auto silent = connect(token_);
  ASSERT_NE(silent, nullptr);
  const SessionToken token = source_->admit({key_});
  std::unique_ptr<Path> path;
  EXPECT_TRUE(eventually([&] {
    auto paths = puller_->connect(*source_, token);
    if (paths) path = std::move(paths->front());
    return path != nullptr;
  }));
  ASSERT_NE(path, nullptr);
  std::vector<std::byte> local(4096);
  EXPECT_EQ(read_one(*path, read(0, local.data(), local.size())), OpStatus::kOk);
}

TEST_F(StagedLinkTest, ASegmentCutShortIsAFaultThereAndThePathGoesOn) {
  start();
  const auto path = connect(token_);
  ASSERT_NE(path, nullptr);
  segment_.truncate(1 * kMiB);
  std::vector<std::byte> local(kStagedBytes, std::byte{0xee});
  EXPECT_EQ(read_one(*path, read(1 * kMiB, local.data(), 64)), OpStatus::kFault);
  EXPECT_EQ(read_one(*path, read(0, local.data(), local.size())), OpStatus::kFault);
  EXPECT_EQ(read_one(*path, read(0, local.data(), 1 * kMiB)), OpStatus::kOk);
  EXPECT_EQ(std::memcmp(local.data(), segment_.bytes().data(), 1 * kMiB), 0);
}

// No reader sees bytes that are written after revoke() has returned.
TEST_F(StagedLinkTest, RevokeUnderLoadEndsEveryAccessBeforeItReturns) {
  start();
  auto* const bytes = const_cast<std::byte*>(segment_.bytes().data());
  std::memset(bytes, 0x11, kStagedBytes);
  for (int round = 0; round < 20; ++round) {
    const SessionToken token = source_->admit({key_});
    const auto path = connect(token);
    ASSERT_NE(path, nullptr);
    std::vector<std::byte> local(kStagedBytes);
    std::vector<ReadOp> ops;
    for (std::size_t i = 0; i < 16; ++i) {
      ops.push_back(
          read(i * kStagedBytes / 16, local.data() + i * kStagedBytes / 16, kStagedBytes / 16));
      ops.back().wr_id = i;
    }
    std::atomic<bool> reading = false;
    std::thread revoker([&] {
      while (!reading) std::this_thread::yield();
      source_->revoke(token);
      std::memset(bytes, 0x22, kStagedBytes);
    });
    ASSERT_EQ(path->post(ops).value_or(0), ops.size());
    reading = true;
    const auto completions = drain(*path);
    revoker.join();
    ASSERT_EQ(testing::sorted_ids(completions), testing::first_ids(ops.size()));
    for (const auto& byte : local) ASSERT_NE(byte, std::byte{0x22}) << "round " << round;
    std::memset(bytes, 0x11, kStagedBytes);
  }
}

TEST_F(StagedLinkTest, ASourceThatDiesWhileItGathersIsNoticedAlthoughNothingIsInTheQueue) {
  start();
  const auto path = connect(token_);
  ASSERT_NE(path, nullptr);
  network_.hold(FakeCall::kPostSend, device_);  // its thread gets no further than the answer
  std::vector<std::byte> local(64);
  const ReadOp op = read(0, local.data(), local.size());
  ASSERT_EQ(path->post({&op, 1}).value_or(0), 1u);
  ASSERT_TRUE(network_.wait_held(FakeCall::kPostSend, 1, testing::test_deadline()));
  network_.remove_device(device_);
  const auto completions = drain(*path);
  ASSERT_EQ(completions.size(), 1u);
  EXPECT_EQ(completions[0].status, OpStatus::kPeerLost);
  network_.let_go(FakeCall::kPostSend, device_);
}

TEST_F(StagedLinkTest, AFrozenSourceCompletesNothingAndAbortDrains) {
  start();
  const auto path = connect(token_);
  ASSERT_NE(path, nullptr);
  network_.hold(FakeCall::kPostSend, device_);
  std::vector<std::byte> local(kStagedBytes, std::byte{0xee});
  const ReadOp op = read(0, local.data(), local.size());
  ASSERT_EQ(path->post({&op, 1}).value_or(0), 1u);
  ASSERT_TRUE(network_.wait_held(FakeCall::kPostSend, 1, testing::test_deadline()));
  Completion done;
  for (int turn = 0; turn < 1000; ++turn) ASSERT_EQ(path->poll({&done, 1}), 0u);
  EXPECT_TRUE(path->wake_at().has_value());  // to ask whether it is still there
  path->abort();
  const auto completions = drain(*path);
  ASSERT_EQ(completions.size(), 1u);
  EXPECT_EQ(completions[0].status, OpStatus::kAborted);
  network_.let_go(FakeCall::kPostSend, device_);
  EXPECT_EQ(local, std::vector<std::byte>(kStagedBytes, std::byte{0xee}));
}

TEST_F(StagedLinkTest, TheRateOfTheSessionHoldsBackRequests) {
  start();
  const auto path = connect(source_->admit({key_}, 1));
  ASSERT_NE(path, nullptr);
  std::vector<std::byte> local(kStagedBytes);
  const ReadOp op = read(0, local.data(), local.size());
  ASSERT_EQ(path->post({&op, 1}).value_or(0), 1u);
  Completion done;
  EXPECT_TRUE(eventually([&] {
    EXPECT_EQ(path->poll({&done, 1}), 0u);
    return path->wake_at() > std::chrono::steady_clock::now() + 1h;
  }));
  EXPECT_LT(path->bytes_landed(), kStagedBytes);
  path->abort();
  EXPECT_EQ(drain(*path).size(), 1u);
}

// The keys of a NIC are easily guessed.
TEST_F(StagedLinkTest, WithoutMemoryWindowsNoPullerReadsTheBlocksOfAnother) {
  network_.change(device_, [](FakeDevice& device) {
    device.attr.device_cap_flags &= ~static_cast<unsigned>(IBV_DEVICE_MEM_WINDOW_TYPE_2B);
  });
  start();
  RawPuller victim(puller_api_);
  ASSERT_TRUE(victim.connect(*source_, token_));
  victim.say({RawPuller::bytes_of(request())});
  ASSERT_TRUE(victim.answer());
  const auto& block = victim.offer().blocks.front();
  const testing::TestSegment other(kStagedBytes, 1);
  const SessionToken another = source_->admit({source_->serve(other)});
  RawPuller by_key(puller_api_);
  RawPuller by_own_key(puller_api_);
  ASSERT_TRUE(by_key.connect(*source_, another));
  ASSERT_TRUE(by_own_key.connect(*source_, another));
  EXPECT_TRUE(by_key.read(block.address, block.key, 4096).empty());
  EXPECT_TRUE(by_own_key.read(block.address, by_own_key.offer().blocks.front().key, 4096).empty());
  EXPECT_EQ(victim.read(block.address, block.key, 4096).size(), 4096u);
}

TEST_F(StagedLinkTest, WithoutMemoryWindowsTheNextSessionReadsNoMessagesEither) {
  network_.change(device_, [](FakeDevice& device) {
    device.attr.device_cap_flags &= ~static_cast<unsigned>(IBV_DEVICE_MEM_WINDOW_TYPE_2B);
  });
  start({.staging_bytes = kMaxStageBlockBytes});  // a single block
  {
    RawPuller first(puller_api_);
    ASSERT_TRUE(first.connect(*source_, token_));
    first.say({RawPuller::bytes_of(request())});
    ASSERT_TRUE(first.answer());
    source_->revoke(token_);
  }
  RawPuller second(puller_api_);
  const auto connected = second.connect(*source_, source_->admit({key_}));
  ASSERT_TRUE(connected) << connected.error().message();
  const std::size_t all = kMaxStageBlockBytes + kPageBytes;  // that the key is good for
  EXPECT_EQ(second.read_block(all), std::vector<std::byte>(all));
}

TEST_F(StagedLinkTest, APullerThatConnectsAgainGetsTheBlocksOfItsOldLink) {
  start({.staging_bytes = kMaxStageBlockBytes, .staging_idle_limit = 1h});
  auto old = connect(token_);
  ASSERT_NE(old, nullptr);
  old->abort();
  old.reset();
  std::unique_ptr<Path> path;
  EXPECT_TRUE(eventually([&] {
    auto paths = puller_->connect(*source_, token_);
    if (paths) path = std::move(paths->front());
    return path != nullptr;
  }));
  ASSERT_NE(path, nullptr);
  std::vector<std::byte> local(4096);
  EXPECT_EQ(read_one(*path, read(0, local.data(), local.size())), OpStatus::kOk);
}

TEST_F(StagedLinkTest, ADeviceThatHangsWhileALinkOfItEndsHoldsUpNoOtherDevice) {
  source_api_.add_device({.name = "mlx5_1"});
  puller_api_.add_device({.name = "mlx5_1"});
  start();
  const auto paths = puller_->connect(*source_, token_);
  ASSERT_TRUE(paths) << paths.error().message();
  const auto other = std::find_if(paths->begin(), paths->end(), [](const auto& path) {
    return path->describe().find("-> mlx5_1") != std::string::npos;
  });
  ASSERT_NE(other, paths->end());
  RawPuller raw(puller_api_);
  const auto connected = raw.connect(*source_, source_->admit({key_}));
  ASSERT_TRUE(connected) << connected.error().message();
  network_.hold(FakeCall::kModifyQp, device_);
  raw.say({{std::byte{1}}});
  EXPECT_TRUE(network_.wait_held(FakeCall::kModifyQp, 1, testing::test_deadline()));
  std::vector<std::byte> local(kStagedBytes);
  EXPECT_EQ(read_one(**other, read(0, local.data(), local.size())), OpStatus::kOk);
  network_.let_go(FakeCall::kModifyQp, device_);
}

TEST_F(StagedLinkTest, TheWindowHasAsManyBlocksAsItsBytesHold) {
  const auto fabric = VerbsSource::open(source_api_, {});
  StagePool pool(*fabric->devices().front(), VerbsServerOptions{}.staging_bytes);
  EXPECT_EQ(pool.block_bytes(), kMaxStageBlockBytes);
  EXPECT_EQ(pool.size(), 32u);
}

TEST_F(StagedLinkTest, AShareOfTheLockLimitThatHoldsNoBlockIsNamed) {
  const auto fabric = VerbsSource::open(source_api_, {});
  const StagePool pool(*fabric->devices().front(), 8 * kKiB);
  EXPECT_EQ(pool.size(), 0u);
  EXPECT_NE(pool.problem().find("8.00 KiB"), std::string::npos) << pool.problem();
  EXPECT_NE(pool.problem().find("ulimit -l"), std::string::npos) << pool.problem();
}

// Lines of the log so far; stderr is being captured.
std::size_t lines_about(const std::string& event) {
  std::ifstream log("/proc/self/fd/2");
  std::size_t lines = 0;
  for (std::string line; std::getline(log, line);) lines += line.find(event) != std::string::npos;
  return lines;
}

TEST_F(StagedLinkTest, WhatIsNotRegisteredIsSaidAtStartAndOnceAlthoughNobodyPulls) {
  ::testing::internal::CaptureStderr();
  start();
  const bool said = eventually([] { return lines_about("verbs.not_registered") > 0; });
  // Neither a further puller nor a further segment makes it repeat the old ones.
  const auto path = connect(token_);
  const TestSegment second(1 * kMiB, 2);
  source_->serve(second);
  const bool said_more = eventually([] { return lines_about("verbs.not_registered") > 1; });
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_TRUE(said && said_more) << log;
  EXPECT_NE(path, nullptr);
  for (const auto* what :
       {"segments=\"1 of 1\" missing=\"2.00 MiB\"", "segments=\"1 of 2\" missing=\"1.00 MiB\"",
        "the limit set for each device is", "through a staging window"}) {
    EXPECT_NE(log.find(what), std::string::npos) << what << " in\n" << log;
  }
}

}  // namespace
}  // namespace rekindle::transport::verbs
