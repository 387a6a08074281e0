// Staged paths to a source that obeys no rule: whatever it answers, an op ends once, and what is
// not what was asked for lands nowhere.
#include <algorithm>
#include <functional>

#include <gtest/gtest.h>

#include "src/base/units.h"
#include "tests/verbs/fake_verbs.h"
#include "tests/verbs/verbs_hosts.h"
#include "transport/verbs/staged/stage_pool.h"
#include "transport/verbs/staged/staged_path.h"

namespace rekindle::transport::verbs {
namespace {

constexpr std::size_t kBlocks = 2;
constexpr std::uint32_t kBlockBytes = 64 << 10;
constexpr RegionKey kRegion{3, 5};
constexpr std::byte kMark{0x5a};
constexpr std::byte kGathered{0x77};

// All that is sent is done inside the call that posts it.
class RogueSourceTest : public ::testing::Test {
 protected:
  RogueSourceTest() {
    source_api_.add_device({.name = "mlx5_0"});
    puller_api_.add_device({.name = "mlx5_0"});
    source_ = VerbsSource::open(source_api_, {});
    puller_ = VerbsSource::open(puller_api_, {});
    registrar_ = MemoryRegistrar::create(*puller_, {});
    block_.assign(kBlockBytes, kGathered);
  }
  void SetUp() override {
    Device& device = *source_->devices().front();
    control_ = std::move(StageControl::create(device).value());
    mr_ = MrHandle(source_api_.reg_mr(device.pd(), block_.data(), block_.size(),
                                      IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ),
                   {&source_api_});
    ConnectionOptions options;
    options.queue_pairs = 1;
    options.recv_depth = kMaxStageBlocks;
    end_ = std::move(Connection::create(*source_->rails().front(), options).value());
    auto connection = std::move(Connection::create(*puller_->rails().front(), options).value());
    ASSERT_TRUE(end_->connect(remote(*connection), ConnectionRole::kServes));
    ASSERT_TRUE(connection->connect(remote(*end_), ConnectionRole::kReads));
    for (std::size_t i = 0; i < kMaxStageBlocks; ++i) receive(i);
    const StageOffer::Block block{reinterpret_cast<std::uint64_t>(block_.data()), mr_->rkey};
    auto path = StagedPath::create(
        {.windows = {},
         .bounce = std::move(BouncePool::create(*puller_->devices().front(), 1 * kMiB).value()),
         .memory = std::make_shared<LocalMemory>(*registrar_),
         .limiter = nullptr,
         .description = "rogue",
         .connection = std::move(connection)},
        {kBlockBytes, {kBlocks, block}, {{kRegion, 1 * kMiB}}}, {});
    ASSERT_TRUE(path) << path.error().message();
    path_ = std::move(*path);
  }

  StageRequest post(std::byte* local, std::uint64_t bytes) {
    const ReadOp op{.wr_id = 9, .remote = kRegion, .local = local, .run_bytes = bytes};
    EXPECT_EQ(path_->post({&op, 1}).value_or(0), 1u);
    ibv_wc wc{};
    EXPECT_EQ(source_api_.poll_cq(end_->cq(), 1, &wc), 1);
    const auto message = control_->to_receive(wc.wr_id).first(wc.byte_len);
    return parse_stage_request(message, {kBlocks, kBlockBytes}).value();
  }
  static StageAnswer honest(const StageRequest& request) {
    return {request.slot, request.sequence, OpStatus::kOk,
            static_cast<std::uint32_t>(request.total_bytes())};
  }
  static std::vector<std::byte> bytes_of(const StageAnswer& answer) {
    std::vector<std::byte> bytes(kStageAnswerBytes);
    encode(answer, bytes);
    return bytes;
  }
  void say(const std::vector<std::byte>& message) {
    std::copy(message.begin(), message.end(), block_.begin());
    ibv_sge entry{reinterpret_cast<std::uint64_t>(block_.data()),
                  static_cast<std::uint32_t>(message.size()), mr_->lkey};
    ibv_send_wr request{};
    request.opcode = IBV_WR_SEND;
    request.sg_list = &entry;
    request.num_sge = 1;
    ibv_send_wr* bad = nullptr;
    EXPECT_EQ(source_api_.post_send(end_->queue_pair(0), &request, &bad), 0);
    std::fill_n(block_.begin(), message.size(), kGathered);
  }
  // Says it instead of the answer to a read.
  void expect_refused(const std::function<std::vector<std::byte>(const StageRequest&)>& answer) {
    std::vector<std::byte> local(4096, kMark);
    say(answer(post(local.data(), local.size())));
    const auto completions = testing::drain(*path_);
    ASSERT_EQ(completions.size(), 1u);
    EXPECT_EQ(completions[0].wr_id, 9u);
    EXPECT_EQ(completions[0].status, OpStatus::kPeerLost);
    EXPECT_EQ(local, std::vector<std::byte>(4096, kMark));
    EXPECT_EQ(path_->bytes_landed(), 0u);
    EXPECT_FALSE(path_->post({}));
    EXPECT_NE(path_->why_broken(), "");
  }
  void expect_answer_refused(const std::function<void(StageAnswer&)>& change) {
    expect_refused([&](const StageRequest& request) {
      StageAnswer answer = honest(request);
      change(answer);
      return bytes_of(answer);
    });
  }

  FakeNetwork network_;
  FakeVerbs source_api_{network_, "source"}, puller_api_{network_, "puller"};
  std::unique_ptr<Fabric> source_, puller_;
  std::unique_ptr<MemoryRegistrar> registrar_;
  std::vector<std::byte> block_;
  std::unique_ptr<StageControl> control_;
  MrHandle mr_;
  std::unique_ptr<Connection> end_;
  std::unique_ptr<StagedPath> path_;

 private:
  static RemoteEnd remote(const Connection& there) {
    return {there.rail().state().address, there.mtu_bytes(), 4, there.ends()};
  }
  void receive(std::size_t index) {
    ibv_sge entry = control_->entry(control_->to_receive(index));
    ibv_recv_wr request{};
    request.wr_id = index;
    request.sg_list = &entry;
    request.num_sge = 1;
    ibv_recv_wr* bad = nullptr;
    ASSERT_EQ(source_api_.post_recv(end_->queue_pair(0), &request, &bad), 0);
  }
};

TEST_F(RogueSourceTest, AnHonestAnswerLands) {
  std::vector<std::byte> local(4096, kMark);
  say(bytes_of(honest(post(local.data(), local.size()))));
  const auto completions = testing::drain(*path_);
  ASSERT_EQ(completions.size(), 1u);
  EXPECT_EQ(completions[0].status, OpStatus::kOk);
  EXPECT_EQ(local, std::vector<std::byte>(4096, kGathered));
}

TEST_F(RogueSourceTest, AnAnswerForABlockThatNobodyAskedForBreaksThePath) {
  expect_answer_refused([](StageAnswer& answer) { answer.slot = 1; });
}

TEST_F(RogueSourceTest, AnAnswerForABlockThatDoesNotExistBreaksThePath) {
  expect_answer_refused([](StageAnswer& answer) { answer.slot = kBlocks; });
}

TEST_F(RogueSourceTest, AnAnswerToAnotherRequestBreaksThePath) {
  expect_answer_refused([](StageAnswer& answer) { ++answer.sequence; });
}

TEST_F(RogueSourceTest, AnAnswerWithFewerBytesThanAskedForBreaksThePath) {
  expect_answer_refused([](StageAnswer& answer) { --answer.bytes; });
}

TEST_F(RogueSourceTest, AnAnswerWithMoreBytesThanAskedForBreaksThePath) {
  expect_answer_refused([](StageAnswer& answer) { ++answer.bytes; });
}

TEST_F(RogueSourceTest, AStatusThatNoSourceSaysBreaksThePath) {
  expect_answer_refused([](StageAnswer& answer) {
    answer.status = OpStatus::kAborted;
    answer.bytes = 0;
  });
}

TEST_F(RogueSourceTest, AnAnswerCutShortBreaksThePath) {
  expect_refused([](const StageRequest& request) {
    auto bytes = bytes_of(honest(request));
    bytes.pop_back();
    return bytes;
  });
}

TEST_F(RogueSourceTest, AnAnswerThatFitsNoReceiveBreaksThePath) {
  expect_refused([](const StageRequest& request) {
    auto bytes = bytes_of(honest(request));
    bytes.resize(kStageMessageBytes + 1);
    return bytes;
  });
}

TEST_F(RogueSourceTest, ASecondAnswerBreaksThePathAndTheOpStaysReportedOnce) {
  std::vector<std::byte> local(4096, kMark);
  const auto answer = bytes_of(honest(post(local.data(), local.size())));
  say(answer);
  const auto completions = testing::drain(*path_);
  ASSERT_EQ(completions.size(), 1u);
  EXPECT_EQ(completions[0].status, OpStatus::kOk);
  say(answer);
  Completion done;
  EXPECT_EQ(path_->poll({&done, 1}), 0u);
  EXPECT_FALSE(path_->post({}));
  EXPECT_EQ(path_->in_flight(), 0u);
}

}  // namespace
}  // namespace rekindle::transport::verbs
