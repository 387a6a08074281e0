// The puller's end of staged links on the fake: waiting for bounce blocks, and the end of a path.
#include <gmock/gmock.h>

#include "tests/verbs/staged_fixture.h"
#include "transport/verbs/memory/local_memory.h"

namespace rekindle::transport::verbs {
namespace {

using testing::drain;
using testing::eventually;
using ::testing::HasSubstr;

class StagedPathTest : public StagedLinkTest {
 protected:
  static constexpr auto kPuller = "puller/mlx5_0";
  VerbsConnectorOptions one_bounce_block() const {
    VerbsConnectorOptions options;
    options.bounce_bytes = BouncePool::kBlockBytes;
    return options;
  }
  // A path beside the staged ones. Its read is given up, but holds a bounce block until let_go().
  void hold_bounce_block() {
    const RegionKey small = source_->serve(small_);
    hog_ = connect(source_->admit({small}));
    ASSERT_NE(hog_, nullptr);
    ASSERT_EQ(hog_->describe().find("staged"), std::string::npos);
    network_.deliver_by_hand();
    const ReadOp op{.remote = small, .local = landing_.data(), .run_bytes = landing_.size()};
    ASSERT_EQ(hog_->post({&op, 1}).value_or(0), 1u);
    network_.change(kPuller, [](FakeDevice& device) { device.flushes = false; });
    hog_->abort();
    network_.deliver_by_thread(20us, 50ms);
  }
  void let_go() {
    network_.change(kPuller, [](FakeDevice& device) { device.flushes = true; });
    EXPECT_EQ(drain(*hog_).size(), 1u);
  }

  testing::TestSegment small_{4096, 7};
  std::vector<std::byte> landing_ = std::vector<std::byte>(4096);
  std::unique_ptr<Path> hog_;
};

TEST_F(StagedPathTest, ALinkIsProvenWhileAllBounceBlocksAreInUse) {
  start({}, one_bounce_block());
  hold_bounce_block();
  const auto paths = puller_->connect(*source_, token_);
  EXPECT_TRUE(paths) << paths.error().message();
  let_go();
}

TEST_F(StagedPathTest, APartThatWaitsForABounceBlockDoesNotWaitForTheRate) {
  start({}, one_bounce_block());
  const auto path = connect(source_->admit({key_}, 1));
  ASSERT_NE(path, nullptr);
  hold_bounce_block();
  const std::size_t held = network_.in_flight();
  const auto answers = network_.calls(FakeCall::kPostSend, device_);
  std::vector<std::byte> local(kStagedBytes);
  const ReadOp op = read(0, local.data(), local.size());
  ASSERT_EQ(path->post({&op, 1}).value_or(0), 1u);
  ASSERT_TRUE(eventually([&] {
    return network_.calls(FakeCall::kPostSend, device_) > answers && network_.in_flight() == held;
  }));
  Completion done;
  EXPECT_EQ(path->poll({&done, 1}), 0u);
  ASSERT_TRUE(path->wake_at().has_value());
  EXPECT_LT(*path->wake_at(), std::chrono::steady_clock::now() + 1h);
  let_go();
  EXPECT_TRUE(eventually([&] {
    EXPECT_EQ(path->poll({&done, 1}), 0u);
    return path->bytes_landed() > 0;
  }));
  path->abort();
  EXPECT_EQ(drain(*path).size(), 1u);
}

TEST_F(StagedPathTest, AReadThatFailedBeforeAnAbortWasPolledIsAborted) {
  start();
  const auto path = connect(token_);
  ASSERT_NE(path, nullptr);
  network_.deliver_by_hand();
  const auto posted = network_.calls(FakeCall::kPostSend, kPuller);
  std::vector<std::byte> local(64);
  const ReadOp op = read(0, local.data(), local.size());
  ASSERT_EQ(path->post({&op, 1}).value_or(0), 1u);
  Completion done;
  ASSERT_TRUE(eventually([&] {  // until it asks for the block, which is not delivered any more
    network_.deliver();
    EXPECT_EQ(path->poll({&done, 1}), 0u);
    return network_.calls(FakeCall::kPostSend, kPuller) == posted + 2;
  }));
  network_.cut({kPuller}, {device_});
  EXPECT_EQ(network_.expire(), 1u);
  path->abort();
  const auto completions = drain(*path);
  ASSERT_EQ(completions.size(), 1u);
  EXPECT_EQ(completions[0].status, OpStatus::kAborted);
}

TEST_F(StagedPathTest, ARailThatWentDownAndCameBackIsNamed) {
  start();
  const auto path = connect(token_);
  ASSERT_NE(path, nullptr);
  for (const auto state : {IBV_PORT_DOWN, IBV_PORT_ACTIVE}) {
    network_.set_port_state({kPuller}, state);
    ASSERT_TRUE(eventually([&] {
      puller_->fabric().refresh();
      return puller_->fabric().rails().front()->state().up == (state == IBV_PORT_ACTIVE);
    }));
  }
  std::vector<std::byte> local(64);
  const ReadOp op = read(0, local.data(), local.size());
  const auto posted = path->post({&op, 1});
  ASSERT_FALSE(posted);
  EXPECT_THAT(posted.error().message(), HasSubstr("port was down"));
}

}  // namespace
}  // namespace rekindle::transport::verbs
