// Which rails a puller connects, and what becomes of it when some, or all, do not work.
#include <atomic>
#include <thread>

#include <gmock/gmock.h>

#include "tests/verbs/verbs_lab.h"
#include "transport/verbs/memory/local_memory.h"

namespace rekindle::transport::verbs {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

constexpr std::size_t kQueuePairs = VerbsConnectorOptions{}.queue_pairs;

std::vector<FakeDevice> devices(std::size_t count, const FakePort& port = {}) {
  std::vector<FakeDevice> result;
  for (std::size_t i = 0; i < count; ++i) {
    result.push_back({.name = fmt::format("mlx5_{}", i), .ports = {port}});
  }
  return result;
}

LabOptions rails(std::size_t source, std::size_t puller) {
  LabOptions options;
  options.source_devices = devices(source);
  options.puller_devices = devices(puller);
  options.connector.probe_deadline = 100ms;
  return options;
}

std::vector<std::string> homes(const Paths& paths) {
  std::vector<std::string> names;
  for (const auto& path : paths) names.push_back(path->home()->name);
  return names;
}

void expect_reads(VerbsLab& lab, const Paths& paths) {
  for (const auto& path : paths) {
    std::vector<std::byte> local(kMiB);
    const ReadOp op = lab.read(1, 8192, local.data(), local.size());
    EXPECT_EQ(testing::read_one(*path, op), OpStatus::kOk) << path->describe();
    EXPECT_TRUE(lab.landed(op));
  }
}

void cut_rail(VerbsLab& lab, std::size_t sources, std::size_t puller) {
  for (std::size_t i = 0; i < sources; ++i) {
    lab.network().cut({fmt::format("puller/mlx5_{}", puller)}, {fmt::format("source/mlx5_{}", i)});
  }
}

TEST(VerbsConnector, EachRailOfThePullerGetsOnePathWhateverTheSourceHas) {
  for (const auto& [source, puller] : {std::pair(1, 1), {1, 3}, {3, 1}, {2, 2}, {2, 3}, {4, 2}}) {
    VerbsLab lab(rails(static_cast<std::size_t>(source), static_cast<std::size_t>(puller)));
    const auto paths = lab.connect();
    ASSERT_TRUE(paths) << paths.error().message();
    ASSERT_EQ(paths->size(), static_cast<std::size_t>(puller));
    expect_reads(lab, *paths);
    const int most = (puller + source - 1) / source;
    for (int i = 0; i < source; ++i) {
      EXPECT_LE(lab.network().queue_pairs(fmt::format("source/mlx5_{}", i)),
                static_cast<std::size_t>(2 * most));
    }
  }
}

TEST(VerbsConnector, ASlowRailStaysUnusedUntilTheFastOneIsDown) {
  LabOptions options = rails(2, 2);
  options.puller_devices[1].ports[0].width = 1;  // a quarter of the other
  VerbsLab lab(options);
  auto paths = lab.connect();
  ASSERT_TRUE(paths) << paths.error().message();
  EXPECT_THAT(homes(*paths), UnorderedElementsAre("mlx5_0:1"));
  lab.network().set_port_state(kPullerPort, IBV_PORT_DOWN);
  ASSERT_TRUE(VerbsLab::wait_rail(lab.puller().fabric(), false));
  paths = lab.connect();
  ASSERT_TRUE(paths) << paths.error().message();
  EXPECT_THAT(homes(*paths), UnorderedElementsAre("mlx5_1:1"));
  expect_reads(lab, *paths);
}

TEST(VerbsConnector, InfiniBandIsReachedByLidWithinItsSubnet) {
  LabOptions options = rails(1, 1);
  options.source_devices = devices(2, {.infiniband = true});
  options.puller_devices = devices(2, {.infiniband = true});
  VerbsLab lab(options);
  const auto paths = lab.connect();
  ASSERT_TRUE(paths) << paths.error().message();
  EXPECT_EQ(paths->size(), 2u);
  EXPECT_THAT(paths->front()->describe(), HasSubstr("LID "));
  expect_reads(lab, *paths);
}

TEST(VerbsConnector, WithoutACommonFabricTheErrorNamesWhatBothSidesHave) {
  LabOptions options = rails(1, 1);
  options.source_devices = devices(1, {.infiniband = true});
  VerbsLab lab(options);
  const auto paths = lab.connect();
  ASSERT_FALSE(paths);
  EXPECT_EQ(paths.error().code(), ErrorCode::kUnavailable);
  EXPECT_THAT(paths.error().message(), AllOf(HasSubstr("no common RDMA fabric"), HasSubstr("LID "),
                                             HasSubstr("mlx5_0:1 10.0.0.")));

  LabOptions subnets = rails(1, 1);
  subnets.source_devices = devices(1, {.infiniband = true});
  FakeGid other{.index = 0, .type = IBV_GID_TYPE_IB};
  other.bytes = {0xfe, 0xc0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0, 1};
  subnets.puller_devices = devices(1, {.infiniband = true, .gids = {other}});
  VerbsLab apart(subnets);
  EXPECT_THAT(apart.connect().error().message(), HasSubstr("no common RDMA fabric"));
}

TEST(VerbsConnector, RailsInUseAreNotConnectedAgain) {
  VerbsLab lab(rails(2, 2));
  const auto paths = lab.connect();
  ASSERT_TRUE(paths) << paths.error().message();
  const auto all = homes(*paths);
  ASSERT_THAT(all, UnorderedElementsAre("mlx5_0:1", "mlx5_1:1"));
  const auto none = lab.puller().connect(lab.source(), lab.token(), all);
  ASSERT_FALSE(none);
  EXPECT_EQ(none.error().code(), ErrorCode::kNotFound);
  const auto missing = lab.puller().connect(lab.source(), lab.token(), std::span(all).first(1));
  ASSERT_TRUE(missing) << missing.error().message();
  EXPECT_THAT(homes(*missing), UnorderedElementsAre(all[1]));
  EXPECT_EQ(lab.source().server()->link_count(), 3u);
}

TEST(VerbsConnector, OneDeadRouteOfTwoLeavesTheOther) {
  VerbsLab lab(rails(2, 2));
  cut_rail(lab, 2, 0);
  const auto paths = lab.connect();
  ASSERT_TRUE(paths) << paths.error().message();
  EXPECT_THAT(homes(*paths), UnorderedElementsAre("mlx5_1:1"));
  expect_reads(lab, *paths);
  EXPECT_EQ(lab.network().queue_pairs("puller/mlx5_0"), 0u);
}

TEST(VerbsConnector, WhenNoRouteWorksTheErrorSaysWhatWasTriedInVain) {
  VerbsLab lab(rails(2, 2));
  cut_rail(lab, 2, 0);
  cut_rail(lab, 2, 1);
  const auto paths = lab.connect();
  ASSERT_FALSE(paths);
  EXPECT_EQ(paths.error().code(), ErrorCode::kUnavailable);
  EXPECT_THAT(paths.error().message(),
              AllOf(HasSubstr("mlx5_"), HasSubstr("a first read was not answered within 100 ms")));
}

// A first read may fail before it is late.
TEST(VerbsConnector, AFirstReadThatFailsNamesTheCause) {
  VerbsLab lab;
  lab.network().deliver_by_thread(0us, 1ms);
  lab.network().cut(kPullerPort, kSourcePort);
  const auto paths = lab.connect();
  ASSERT_FALSE(paths);
  EXPECT_EQ(paths.error().code(), ErrorCode::kUnavailable);
  EXPECT_THAT(paths.error().message(), HasSubstr(ibv_wc_status_str(IBV_WC_RETRY_EXC_ERR)));
}

TEST(VerbsConnector, ALateFirstReadWritesToNobody) {
  LabOptions options = rails(1, 1);
  options.connector.bounce_bytes = 256 * kKiB;  // one block, which the next path gets
  options.connector.probe_deadline = 20ms;
  VerbsLab lab(options);
  const auto path = lab.path();
  ASSERT_NE(path, nullptr);
  lab.network().cut(kPullerPort, kSourcePort);
  ASSERT_FALSE(lab.connect());
  lab.network().join(kPullerPort, kSourcePort);
  EXPECT_EQ(lab.network().in_flight(), 0u);
  std::vector<std::byte> local(kMiB);
  const ReadOp op = lab.read(1, kMiB, local.data(), local.size());
  EXPECT_EQ(testing::read_one(*path, op), OpStatus::kOk);
  EXPECT_TRUE(lab.landed(op));
}

TEST(VerbsConnector, ARailWhoseDeviceGivesNothingIsLeftOut) {
  VerbsLab lab(rails(2, 2));
  lab.network().fail_call(FakeCall::kCreateCq,
                          {.error = ENOMEM, .count = 100, .device = "puller/mlx5_0"});
  const auto paths = lab.connect();
  ASSERT_TRUE(paths) << paths.error().message();
  EXPECT_THAT(homes(*paths), UnorderedElementsAre("mlx5_1:1"));
  lab.network().fail_call(FakeCall::kCreateCq,
                          {.error = ENOMEM, .count = 100, .device = "puller/mlx5_1"});
  const auto none = lab.connect();
  ASSERT_FALSE(none);
  EXPECT_EQ(none.error().code(), ErrorCode::kExhausted);
  EXPECT_THAT(none.error().message(), HasSubstr("create a completion queue"));
}

TEST(VerbsConnector, MemoryThatCannotBeRegisteredIsReadAllTheSameAndSaidOnce) {
  LabOptions options = rails(1, 1);
  options.connector.bounce_bytes = 256 * kKiB;
  options.puller_devices[0].max_registered_bytes = kMiB;
  VerbsLab lab(options);
  std::vector<std::byte> local(4 * kMiB), more(4 * kMiB);
  ::testing::internal::CaptureStderr();
  auto used = lab.puller().connector().use_memory(local, nullptr);
  auto also_used = lab.puller().connector().use_memory(more, nullptr);
  EXPECT_TRUE(testing::eventually([&] { return lab.puller().registrar().stats().failures >= 2; }));
  {
    const auto path = lab.path();
    const auto second = lab.path();
    const std::string said = ::testing::internal::GetCapturedStderr();
    EXPECT_THAT(said, HasSubstr("not registered"));
    EXPECT_THAT(said, HasSubstr("through bounce buffers"));
    EXPECT_EQ(said.find("verbs.not_registered"), said.rfind("verbs.not_registered")) << said;
    ASSERT_NE(path, nullptr);
    const ReadOp op = lab.read(1, kMiB, local.data(), local.size());
    EXPECT_EQ(testing::read_one(*path, op), OpStatus::kOk);
    EXPECT_TRUE(lab.landed(op));
  }
  ::testing::internal::CaptureStderr();
  used.reset();
  also_used.reset();
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
}

// A pull that ends before its memory has settled says it, too.
TEST(VerbsConnector, WhatCannotBeRegisteredIsSaidAtTheLatestWhenItIsLetGo) {
  LabOptions options = rails(1, 1);
  options.puller_devices[0].max_registered_bytes = kMiB;
  VerbsLab lab(options);
  std::vector<std::byte> local(4 * kMiB);
  auto used = lab.puller().connector().use_memory(local, nullptr);
  EXPECT_TRUE(testing::eventually([&] { return lab.puller().registrar().stats().failures >= 1; }));
  ::testing::internal::CaptureStderr();
  used.reset();
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("verbs.not_registered"));
}

TEST(VerbsConnector, AnEndpointThatIsGarbageIsInvalid) {
  VerbsLab lab;
  auto target = lab.source().target(lab.token());
  for (const std::string& bytes : {std::string("\x08"), std::string(200, '\xff'),
                                   target.endpoint.substr(0, target.endpoint.size() - 1)}) {
    target.endpoint = bytes;
    const auto begun = lab.puller().connector().begin(target, {});
    ASSERT_FALSE(begun);
    EXPECT_EQ(begun.error().code(), ErrorCode::kInvalid);
  }
  target.endpoint = "";  // protocol 0
  EXPECT_THAT(lab.puller().connector().begin(target, {}).error().message(),
              HasSubstr("speaks verbs protocol 0"));
}

TEST(VerbsConnector, ALinkIsProvenAlsoWhileAllBounceBlocksAreInUse) {
  LabOptions options = rails(1, 1);
  options.connector.bounce_bytes = BouncePool::kBlockBytes;  // one block
  options.connector.probe_deadline = 20ms;
  VerbsLab lab(options);
  const auto busy = lab.path();
  ASSERT_NE(busy, nullptr);
  const auto handshake = lab.puller().connector().begin(lab.source().target(lab.token()), {});
  ASSERT_TRUE(handshake);
  const auto answer = lab.source().server()->accept(lab.token(), (*handshake)->request());
  ASSERT_TRUE(answer) << answer.error().message();
  lab.network().deliver_by_hand();
  std::vector<std::byte> local(4096);
  const ReadOp op = lab.read(0, 0, local.data(), local.size());
  ASSERT_EQ(busy->post({&op, 1}).value_or(0), 1u);
  const auto paths = (*handshake)->finish(*answer);  // nothing moves
  ASSERT_FALSE(paths);
  EXPECT_THAT(paths.error().message(), HasSubstr("a first read was not answered"));
  lab.network().deliver_at_post();
  lab.network().deliver();
  EXPECT_EQ(testing::drain(*busy).size(), 1u);
}

TEST(VerbsConnector, ADeviceThatTakesItsTimeHoldsUpNoOtherDevice) {
  for (const FakeCall slow : {FakeCall::kCreateQp, FakeCall::kRegMr}) {
    VerbsLab lab(rails(2, 2));
    lab.network().hold(slow, "puller/mlx5_0");
    Result<Paths> both;
    std::thread slow_one([&] { both = lab.connect(); });
    EXPECT_TRUE(lab.network().wait_held(slow, 1, testing::test_deadline()));
    // Its own other rail is ready, and so is a pull that does not use that device.
    EXPECT_TRUE(testing::eventually(
        [&] { return lab.network().queue_pairs("puller/mlx5_1") == kQueuePairs; }));
    Result<Paths> other;
    std::atomic<bool> connected = false;
    std::thread fast_one([&] {
      const std::vector<std::string> in_use{"mlx5_0:1"};
      other = lab.puller().connect(lab.source(), lab.token(), in_use);
      connected = true;
    });
    EXPECT_TRUE(testing::eventually([&] { return connected.load(); }));
    lab.network().let_go(slow, "puller/mlx5_0");
    slow_one.join();
    fast_one.join();
    ASSERT_TRUE(both && other);
    EXPECT_THAT(homes(*other), ElementsAre("mlx5_1:1"));
    EXPECT_THAT(homes(*both), ElementsAre("mlx5_0:1", "mlx5_1:1"));
    expect_reads(lab, *both);
  }
}

}  // namespace
}  // namespace rekindle::transport::verbs
