// How a path ends: what broke, what its ops say, and that nothing is written once they were
// reported.
#include <thread>

#include <gmock/gmock.h>

#include "tests/verbs/verbs_lab.h"
#include "transport/verbs/memory/local_memory.h"

namespace rekindle::transport::verbs {
namespace {

using testing::drain;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr std::byte kMark{0x5a};

LabOptions one_queue_pair() {
  LabOptions options;
  options.connector.queue_pairs = 1;
  return options;
}

// Memory that reads were about to land in, after they were reported.
class Untouched {
 public:
  explicit Untouched(std::vector<std::byte>& bytes) : bytes_(bytes) {
    std::fill(bytes_.begin(), bytes_.end(), kMark);
  }
  ~Untouched() {
    EXPECT_TRUE(std::all_of(bytes_.begin(), bytes_.end(), [](auto byte) { return byte == kMark; }))
        << "written after its read was reported";
  }
  Untouched(const Untouched&) = delete;
  Untouched& operator=(const Untouched&) = delete;

 private:
  std::vector<std::byte>& bytes_;
};

TEST(VerbsPathDrain, APostThatTakesSomeOfAChainEndsEveryOpOnceAndBreaksThePath) {
  for (std::size_t taken = 0; taken < 4; ++taken) {
    VerbsLab lab(one_queue_pair());
    const auto path = lab.path();
    ASSERT_NE(path, nullptr);
    std::vector<std::byte> local(8 * kMiB);
    const auto used = lab.puller().use(local);
    lab.network().deliver_by_hand();
    lab.network().fail_call(FakeCall::kPostSend,
                            {.error = ENOMEM, .device = "puller/mlx5_0", .taken = taken});
    // Four requests of 1 MiB each, in one chain.
    const auto posted = path->post(lab.reads(2, 2 * kMiB, local.data()));
    ASSERT_EQ(posted.value_or(0), 2u);
    EXPECT_EQ(lab.network().in_flight(), 0u) << "what was taken is flushed";
    EXPECT_THAT(statuses(drain(*path), 2), Each(OpStatus::kPeerLost)) << taken;
    EXPECT_THAT(path->why_broken(), HasSubstr("post: Cannot allocate memory"));
    const auto refused = path->post({});
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code(), ErrorCode::kPeerLost);
  }
}

// Requests that were taken and done, but whose completion nobody asked for: the device has nothing
// to say about them, so the queue pair goes at once.
TEST(VerbsPathDrain, WhatWasTakenUnsignalledBeforeAPostFailedIsDrainedByForce) {
  VerbsLab lab(one_queue_pair());
  const auto path = lab.path();
  ASSERT_NE(path, nullptr);
  std::vector<std::byte> local(kMiB);
  const auto used = lab.puller().use(local);
  lab.network().fail_call(FakeCall::kPostSend,
                          {.error = EIO, .device = "puller/mlx5_0", .taken = 2});
  ReadOp op = lab.read(0, 0, local.data(), 512);
  op.count = 4;
  op.remote_stride = 64 * kKiB;
  op.local_stride = 512;
  ASSERT_EQ(path->post({&op, 1}).value_or(0), 1u);
  std::vector<Completion> completions(16);
  completions.resize(path->poll(completions));  // one turn: there is nothing to wait for
  EXPECT_THAT(statuses(completions, 1), ElementsAre(OpStatus::kPeerLost));
  EXPECT_EQ(lab.network().queue_pairs("puller/mlx5_0"), 0u);
}

TEST(VerbsPathDrain, ABrokenCompletionQueueEndsAllOpsAtOnceAndNothingIsWrittenLater) {
  VerbsLab lab;
  const auto path = lab.path();
  ASSERT_NE(path, nullptr);
  std::vector<std::byte> local(8 * kMiB);
  const auto used = lab.puller().use(local);
  lab.network().deliver_by_hand();
  ASSERT_EQ(path->post(lab.reads(8, kMiB, local.data())).value_or(0), 8u);
  lab.network().fail_call(FakeCall::kPollCq,
                          {.error = EIO, .count = SIZE_MAX / 2, .device = "puller/mlx5_0"});
  std::vector<Completion> completions(16);
  completions.resize(path->poll(completions));  // one turn: there is nothing to wait for
  EXPECT_THAT(statuses(completions, 8), Each(OpStatus::kPeerLost));
  EXPECT_EQ(path->in_flight(), 0u);
  EXPECT_THAT(path->why_broken(), HasSubstr("completion queue"));
  EXPECT_EQ(lab.network().queue_pairs("puller/mlx5_0"), 0u);
  const Untouched later(local);
  EXPECT_EQ(lab.network().deliver(), 0u);
}

TEST(VerbsPathDrain, ADeviceThatNeverFlushesLosesItsQueuePairsAndThenTheOpsAreReported) {
  for (const bool registered : {true, false}) {
    VerbsLab lab;
    const auto path = lab.path();
    ASSERT_NE(path, nullptr);
    std::vector<std::byte> local(8 * kMiB);
    const auto used = registered ? lab.puller().use(local) : nullptr;
    lab.network().deliver_by_hand();
    ASSERT_EQ(path->post(lab.reads(8, kMiB, local.data())).value_or(0), 8u);
    lab.network().change("puller/mlx5_0", [](FakeDevice& device) { device.flushes = false; });
    path->abort();
    std::vector<Completion> none(16);
    if (path->poll(none) == 0) {
      EXPECT_TRUE(path->wake_at().has_value()) << "nothing else will wake its poller";
    }
    EXPECT_THAT(statuses(drain(*path), 8), Each(OpStatus::kAborted));
    EXPECT_EQ(lab.network().queue_pairs("puller/mlx5_0"), 0u);
    const Untouched later(local);
    lab.network().change("puller/mlx5_0", [](FakeDevice& device) { device.flushes = true; });
    EXPECT_EQ(lab.network().deliver(), 0u);
  }
}

TEST(VerbsPathDrain, BounceBlocksOfAQueueThatDoesNotFlushAreUsedAgainOnlyWhenItIsGone) {
  LabOptions options = one_queue_pair();
  options.connector.bounce_bytes = BouncePool::kBlockBytes;  // one block
  VerbsLab lab(options);
  const auto hung = lab.path();
  const auto other = lab.path();
  ASSERT_TRUE(hung != nullptr && other != nullptr);
  lab.network().deliver_by_hand();
  std::vector<std::byte> first(64 * kKiB), second(64 * kKiB);
  const ReadOp lost = lab.read(0, 0, first.data(), first.size());
  const ReadOp waiting = lab.read(0, kMiB, second.data(), second.size());
  ASSERT_EQ(hung->post({&lost, 1}).value_or(0), 1u);
  lab.network().change("puller/mlx5_0", [](FakeDevice& device) { device.flushes = false; });
  hung->abort();
  ASSERT_EQ(other->post({&waiting, 1}).value_or(0), 1u);
  EXPECT_EQ(lab.network().in_flight(), 1u) << "the hung one";
  EXPECT_TRUE(other->wake_at().has_value());
  EXPECT_THAT(statuses(drain(*hung), 1), ElementsAre(OpStatus::kAborted));
  lab.network().deliver_at_post();
  EXPECT_THAT(statuses(drain(*other), 1), ElementsAre(OpStatus::kOk));
  EXPECT_TRUE(lab.landed(waiting));
}

TEST(VerbsPathDrain, RetryExceededBreaksThePathAndSaysSo) {
  VerbsLab lab;
  const auto path = lab.path();
  ASSERT_NE(path, nullptr);
  std::vector<std::byte> local(4 * kMiB);
  lab.network().cut(kSourcePort, kPullerPort);
  ASSERT_EQ(path->post(lab.reads(16, 256 * kKiB, local.data())).value_or(0), 16u);
  const Untouched later(local);
  EXPECT_GT(lab.network().expire(), 0u);
  EXPECT_THAT(statuses(drain(*path), 16), Each(OpStatus::kPeerLost));
  EXPECT_THAT(path->why_broken(), HasSubstr("retry exceeded"));
  lab.network().join(kSourcePort, kPullerPort);
}

// Windows go first when a session is revoked: its reads fail while the queue pairs still stand.
TEST(VerbsPathDrain, ARemoteAccessErrorIsStaleForItsOpAndPeerLostForTheRest) {
  VerbsLab lab(one_queue_pair());
  const auto path = lab.path();
  ASSERT_NE(path, nullptr);
  lab.network().deliver_by_hand();
  std::vector<std::byte> local(4 * kMiB);
  ASSERT_EQ(path->post(lab.reads(3, kMiB, local.data())).value_or(0), 3u);
  lab.network().deliver_at_post();
  lab.network().deliver_by_hand();
  auto ok = drain(*path);
  EXPECT_THAT(statuses(ok, 3), Each(OpStatus::kOk));

  lab.network().hold(FakeCall::kModifyQp, "source/mlx5_0");
  lab.network().deliver_at_post();
  std::thread revoking([&] { lab.source().revoke(lab.token()); });
  ASSERT_TRUE(lab.network().wait_held(FakeCall::kModifyQp, 1, testing::test_deadline()));
  lab.network().deliver_by_hand();
  ASSERT_EQ(path->post(lab.reads(3, kMiB, local.data())).value_or(0), 3u);
  {
    const Untouched later(local);
    lab.network().deliver();
    EXPECT_THAT(statuses(drain(*path), 3),
                ElementsAre(OpStatus::kStale, OpStatus::kPeerLost, OpStatus::kPeerLost));
  }
  EXPECT_THAT(path->why_broken(), HasSubstr("remote access error"));
  lab.network().let_go(FakeCall::kModifyQp, "source/mlx5_0");
  revoking.join();
}

TEST(VerbsPathDrain, AbortReportsWhatHasArrivedAsDoneAndTheRestAsAborted) {
  VerbsLab lab(one_queue_pair());
  const auto path = lab.path();
  ASSERT_NE(path, nullptr);
  std::vector<std::byte> local(4 * kMiB);
  const auto used = lab.puller().use(local);
  lab.network().deliver_by_hand();
  const auto ops = lab.reads(4, kMiB, local.data());
  ASSERT_EQ(path->post(ops).value_or(0), 4u);
  const std::size_t half = lab.network().in_flight() / 2;  // an op may be several requests
  EXPECT_EQ(lab.network().deliver(half), half);
  path->abort();
  EXPECT_THAT(statuses(drain(*path), 4),
              ElementsAre(OpStatus::kOk, OpStatus::kOk, OpStatus::kAborted, OpStatus::kAborted));
  EXPECT_TRUE(lab.landed(ops[0]) && lab.landed(ops[1]));
}

TEST(VerbsPathDrain, AnErrorThatWasOnItsWayWhenItWasAbortedIsAnAbort) {
  VerbsLab lab(one_queue_pair());
  const auto path = lab.path();
  ASSERT_NE(path, nullptr);
  std::vector<std::byte> local(2 * kMiB);
  lab.network().cut(kSourcePort, kPullerPort);
  ASSERT_EQ(path->post(lab.reads(2, kMiB, local.data())).value_or(0), 2u);
  EXPECT_EQ(lab.network().expire(), 1u);
  path->abort();
  EXPECT_THAT(statuses(drain(*path), 2), Each(OpStatus::kAborted));
  lab.network().join(kSourcePort, kPullerPort);
}

TEST(VerbsPathDrain, AnIdlePathWhoseRailWentDownIsBrokenAlsoWhenItIsUpAgain) {
  for (const bool back : {false, true}) {
    VerbsLab lab;
    const auto path = lab.path();
    ASSERT_NE(path, nullptr);
    ASSERT_TRUE(path->post({}));
    lab.network().set_port_state(kPullerPort, IBV_PORT_DOWN);
    ASSERT_TRUE(VerbsLab::wait_rail(lab.puller().fabric(), false));
    if (back) {
      lab.network().set_port_state(kPullerPort, IBV_PORT_ACTIVE);
      ASSERT_TRUE(VerbsLab::wait_rail(lab.puller().fabric(), true));
    }
    const auto refused = path->post({});
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code(), ErrorCode::kPeerLost);
    EXPECT_THAT(path->why_broken(), HasSubstr(back ? "the port was down, or its address" : "port"));
    EXPECT_THAT(refused.error().message(), HasSubstr(path->why_broken()));
  }
}

TEST(VerbsPathDrain, AStormOfPortEventsDisturbsNoRead) {
  VerbsLab lab;
  const auto path = lab.path();
  ASSERT_NE(path, nullptr);
  std::vector<std::byte> local(8 * kMiB);
  const auto used = lab.puller().use(local);
  lab.network().deliver_by_thread(200us, 10s);
  const auto ops = lab.reads(256, 32 * kKiB, local.data());
  ASSERT_EQ(path->post(ops).value_or(0), ops.size());
  for (int i = 0; i < 2000; ++i) {
    for (const char* device : {"puller/mlx5_0", "source/mlx5_0"}) {
      lab.network().inject(device, IBV_EVENT_CLIENT_REREGISTER);
      lab.network().inject(device, IBV_EVENT_PORT_ACTIVE);
      lab.network().inject(device, IBV_EVENT_SM_CHANGE);
    }
  }
  EXPECT_THAT(statuses(drain(*path), ops.size()), Each(OpStatus::kOk));
  for (const auto& op : ops) ASSERT_TRUE(lab.landed(op)) << op.wr_id;
}

TEST(VerbsPathDrain, APathCanBeDestroyedInEveryStateWithoutOpsInFlight) {
  enum class State {
    kFresh,
    kUsed,
    kArmed,
    kAborted,
    kBroken,
    kForced,
    kRailDown,
    kSourceGone,
    kDeviceGone
  };
  for (const State state :
       {State::kFresh, State::kUsed, State::kArmed, State::kAborted, State::kBroken, State::kForced,
        State::kRailDown, State::kSourceGone, State::kDeviceGone}) {
    VerbsLab lab;  // says what is leaked
    const auto path = lab.path();
    ASSERT_NE(path, nullptr);
    std::vector<std::byte> local(kMiB);
    if (state != State::kFresh) {
      ASSERT_EQ(testing::read_one(*path, lab.read(1, 0, local.data(), kMiB)), OpStatus::kOk);
    }
    const ReadOp op = lab.read(0, 0, local.data(), kMiB);
    switch (state) {
      case State::kArmed:
        ASSERT_TRUE(path->arm());
        ASSERT_EQ(path->post({&op, 1}).value_or(0), 1u);  // an event that nobody takes
        EXPECT_FALSE(path->arm());
        (void)drain(*path);
        break;
      case State::kAborted:
        path->abort();
        break;
      case State::kBroken:
        lab.network().fail_call(FakeCall::kPostSend, {.error = EIO, .device = "puller/mlx5_0"});
        EXPECT_EQ(testing::read_one(*path, op), OpStatus::kPeerLost);
        break;
      case State::kForced:
        lab.network().deliver_by_hand();
        ASSERT_EQ(path->post({&op, 1}).value_or(0), 1u);
        lab.network().fail_call(FakeCall::kPollCq, {.error = EIO, .device = "puller/mlx5_0"});
        EXPECT_EQ(drain(*path).size(), 1u);
        break;
      case State::kRailDown:
        lab.network().set_port_state(kPullerPort, IBV_PORT_DOWN);
        ASSERT_TRUE(VerbsLab::wait_rail(lab.puller().fabric(), false));
        break;
      case State::kSourceGone:
        lab.source().stop();
        break;
      case State::kDeviceGone:
        lab.network().remove_device("puller/mlx5_0");
        break;
      default:
        break;
    }
    EXPECT_EQ(path->in_flight(), 0u);
  }
}

}  // namespace
}  // namespace rekindle::transport::verbs
