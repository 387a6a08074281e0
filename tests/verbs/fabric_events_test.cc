#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/verbs/fabric_fixture.h"

// Rails under events, lost events and storms of events.
namespace rekindle::transport::verbs {
namespace {

using ::testing::HasSubstr;

class FabricEventsTest : public FabricTest {};

TEST_F(FabricEventsTest, APortThatIsDownAtTheStartComesUpLater) {
  StubDevice& nic = add_nic("mlx5_0", 1);
  nic.ports[0].attr.state = IBV_PORT_DOWN;
  auto fabric = open();
  ASSERT_EQ(fabric->rails().size(), 1U);
  const Rail& rail = *fabric->rails()[0];
  EXPECT_FALSE(Rail::is_up(rail.epoch()));
  EXPECT_EQ(rail.state().why_down, "port down");
  set([&] { nic.ports[0].attr.state = IBV_PORT_ACTIVE; });
  api_.push(nic, IBV_EVENT_PORT_ACTIVE);
  await([&] { return Rail::is_up(rail.epoch()); });
  EXPECT_EQ(rail.state().why_down, "");
}

TEST_F(FabricEventsTest, AnEventThatWasLostIsMadeUpFor) {
  StubDevice& nic = add_nic("mlx5_0", 1);
  auto fabric = open();
  const Rail& rail = *fabric->rails()[0];
  const std::uint32_t before = rail.epoch();
  set([&] { nic.ports[0].attr.state = IBV_PORT_DOWN; });  // and no event
  await([&] { return !Rail::is_up(rail.epoch()); });
  set([&] { nic.ports[0].attr.state = IBV_PORT_ACTIVE; });
  await([&] { return Rail::is_up(rail.epoch()); });
  EXPECT_EQ(rail.epoch(), before + 2);
}

TEST_F(FabricEventsTest, AFlapThatIsOverBeforeAnybodyLookedMovesTheEpoch) {
  StubDevice& nic = add_nic("mlx5_0", 1, 2);
  auto fabric = open();
  const Rail& rail = *fabric->rails()[0];
  const std::uint32_t before = rail.epoch();
  const std::uint32_t other = fabric->rails()[1]->epoch();
  api_.push(nic, IBV_EVENT_PORT_ERR, 1);  // the port itself is active again by now
  api_.push(nic, IBV_EVENT_PORT_ACTIVE, 1);
  await([&] { return rail.epoch() > before && Rail::is_up(rail.epoch()); });
  EXPECT_EQ(fabric->rails()[1]->epoch(), other);  // it was not this port
}

TEST_F(FabricEventsTest, AStormOfEventsIsTakenWholeAndCostsFewLooks) {
  StubDevice& nic = add_nic("mlx5_0", 1);
  StubDevice& calm = add_nic("mlx5_1", 2);
  auto fabric = open();
  const std::uint32_t before = fabric->rails()[0]->epoch();
  constexpr std::uint64_t kFlaps = 20'000;
  std::uint64_t looks = 0;
  set([&] { looks = nic.looks; });
  for (std::uint64_t i = 0; i < kFlaps; ++i) {
    api_.push(nic, IBV_EVENT_PORT_ERR);
    api_.push(nic, IBV_EVENT_PORT_ACTIVE);
    if (i == kFlaps / 2) api_.push(calm, IBV_EVENT_PORT_ERR);
  }
  await([&] { return api_.acked == 2 * kFlaps + 1; });
  await([&] { return Rail::is_up(fabric->rails()[0]->epoch()); });
  EXPECT_GT(fabric->rails()[0]->epoch(), before);
  await([&] { return Rail::is_up(fabric->rails()[1]->epoch()); });
  set([&] { EXPECT_LT(nic.looks - looks, kFlaps / 10); });
}

TEST_F(FabricEventsTest, AnEndlessStormOnOneDeviceHidesNothingOnAnother) {
  StubDevice& noisy = add_nic("mlx5_0", 1);
  StubDevice& other = add_nic("mlx5_1", 2);
  auto fabric = open();
  set([&] { noisy.endless_events = true; });
  api_.push(noisy, IBV_EVENT_COMM_EST);
  await([&] { return api_.acked > 10'000; });
  set([&] { other.ports[0].attr.state = IBV_PORT_DOWN; });  // seen without an event
  await([&] { return !Rail::is_up(fabric->rails()[1]->epoch()); });
  set([&] { other.ports[0].attr.state = IBV_PORT_ACTIVE; });
  api_.push(other, IBV_EVENT_PORT_ACTIVE);
  await([&] { return Rail::is_up(fabric->rails()[1]->epoch()); });
  EXPECT_TRUE(Rail::is_up(fabric->rails()[0]->epoch()));
}  // and it is closed under the storm

TEST_F(FabricEventsTest, AnAddressThatChangesMovesTheEpochThoughThePortStaysUp) {
  StubDevice& nic = add_nic("mlx5_0", 1);
  auto fabric = open();
  const Rail& rail = *fabric->rails()[0];
  const std::uint32_t before = rail.epoch();
  set([&] { nic.ports[0].gids = {roce(1, 9)}; });
  api_.push(nic, IBV_EVENT_GID_CHANGE);
  await([&] { return rail.epoch() == before + 2; });
  EXPECT_EQ(format_gid(rail.state().address.gid), "10.0.0.9");
}

TEST_F(FabricEventsTest, FurtherAddressesBreakNothing) {
  StubDevice& nic = add_nic("mlx5_0", 1);
  nic.ports[0].gids = {roce(3, 1)};
  auto fabric = open();
  const Rail& rail = *fabric->rails()[0];
  const std::uint32_t before = rail.epoch();
  set([&] { nic.ports[0].gids = {roce(1, 9), roce(3, 1), roce(5, 5)}; });
  fabric->refresh();
  EXPECT_EQ(rail.epoch(), before);
  set([&] { nic.ports[0].gids = {roce(1, 9)}; });  // ours has gone
  fabric->refresh();
  EXPECT_EQ(rail.epoch(), before + 2);
  set([&] { nic.ports[0].gids.clear(); });
  fabric->refresh();
  EXPECT_EQ(rail.epoch(), before + 3);
  EXPECT_THAT(rail.state().why_down, HasSubstr("no RoCE v2 GID"));
}

TEST_F(FabricEventsTest, AGidIndexThatIsEmptyKeepsTheRailDownAndSaysWhy) {
  StubDevice& nic = add_nic("mlx5_0", 1);
  FabricOptions options;
  options.sysfs = sysfs_.path();
  options.gid_index = 4;
  auto fabric = open_with(options);
  EXPECT_THAT(fabric->rails()[0]->state().why_down, HasSubstr("GID index 4 is empty"));
  set([&] { nic.ports[0].gids.push_back(roce(4, 44)); });
  fabric->refresh();
  EXPECT_EQ(fabric->rails()[0]->state().address.gid_index, 4);
  EXPECT_TRUE(Rail::is_up(fabric->rails()[0]->epoch()));
}

TEST_F(FabricEventsTest, AnotherLidOnInfinibandMovesTheEpoch) {
  StubDevice& nic = api_.add("mlx5_0");
  nic.ports[0].attr.link_layer = IBV_LINK_LAYER_INFINIBAND;
  nic.ports[0].attr.lid = 12;
  ibv_gid_entry gid{};
  gid.gid.raw[0] = 0xfe;
  gid.gid.raw[1] = 0x80;
  nic.ports[0].gids = {gid};
  auto fabric = open();
  const Rail& rail = *fabric->rails()[0];
  const std::uint32_t before = rail.epoch();
  EXPECT_EQ(to_string(rail.state().address), "LID 12");
  set([&] { nic.ports[0].attr.lid = 13; });
  api_.push(nic, IBV_EVENT_LID_CHANGE);
  await([&] { return rail.epoch() == before + 2; });
}

TEST_F(FabricEventsTest, OnlyASmallerMtuMovesTheEpoch) {
  StubDevice& nic = add_nic("mlx5_0", 1);
  nic.ports[0].attr.active_mtu = IBV_MTU_2048;
  auto fabric = open();
  const Rail& rail = *fabric->rails()[0];
  const std::uint32_t before = rail.epoch();
  set([&] { nic.ports[0].attr.active_mtu = IBV_MTU_4096; });
  fabric->refresh();
  EXPECT_EQ(rail.epoch(), before);
  EXPECT_EQ(rail.state().mtu_bytes, 4096U);
  set([&] { nic.ports[0].attr.active_mtu = IBV_MTU_1024; });
  fabric->refresh();
  EXPECT_EQ(rail.epoch(), before + 2);
}

TEST_F(FabricEventsTest, AFatalDeviceIsDeadForGood) {
  StubDevice& nic = add_nic("mlx5_0", 1, 2);
  add_nic("mlx5_1", 2);
  auto fabric = open();
  api_.push(nic, IBV_EVENT_DEVICE_FATAL);
  await([&] { return fabric->devices()[0]->dead(); });
  await([&] { return !Rail::is_up(fabric->rails()[1]->epoch()); });
  fabric->refresh();  // the ports say ACTIVE still
  for (int i : {0, 1}) {
    const Rail& rail = *fabric->rails()[static_cast<std::size_t>(i)];
    EXPECT_FALSE(Rail::is_up(rail.epoch()));
    EXPECT_EQ(rail.state().why_down, "device failed");
  }
  EXPECT_FALSE(fabric->devices()[1]->dead());
  EXPECT_TRUE(Rail::is_up(fabric->rails()[2]->epoch()));
}

TEST_F(FabricEventsTest, ADeviceWhoseKernelSideIsClosedIsDead) {
  StubDevice& nic = add_nic("mlx5_0", 1);
  auto fabric = open();
  nic.kernel_end.reset();
  await([&] { return fabric->devices()[0]->dead(); });
  await([&] { return fabric->rails()[0]->state().why_down == "device removed"; });
}

TEST_F(FabricEventsTest, APortThatCannotBeQueriedIsDownUntilItCan) {
  StubDevice& nic = add_nic("mlx5_0", 1);
  auto fabric = open();
  const Rail& rail = *fabric->rails()[0];
  set([&] { nic.ports[0].query_error = EIO; });
  fabric->refresh();
  EXPECT_FALSE(Rail::is_up(rail.epoch()));
  EXPECT_THAT(rail.state().why_down, HasSubstr("query port"));
  EXPECT_FALSE(fabric->devices()[0]->dead());
  set([&] { nic.ports[0].query_error = 0; });
  fabric->refresh();
  EXPECT_TRUE(Rail::is_up(rail.epoch()));
}

TEST_F(FabricEventsTest, EventsOfQueuePairsAreAcknowledged) {
  StubDevice& nic = add_nic("mlx5_0", 1);
  auto fabric = open();
  const std::uint32_t before = fabric->rails()[0]->epoch();
  for (const auto type : {IBV_EVENT_QP_FATAL, IBV_EVENT_CQ_ERR, IBV_EVENT_QP_ACCESS_ERR,
                          IBV_EVENT_SRQ_LIMIT_REACHED, IBV_EVENT_WQ_FATAL}) {
    api_.push(nic, type);
  }
  await([&] { return api_.acked == 5; });
  EXPECT_EQ(fabric->rails()[0]->epoch(), before);
}

// However many events are lost: a user that connected in an even epoch and finds the same number
// later has missed no loss that was noticed, and an odd epoch means down.
TEST_F(FabricEventsTest, AnEvenEpochNeverComesBack) {
  const auto seed = static_cast<std::uint32_t>(std::random_device{}());
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  StubDevice& nic = add_nic("mlx5_0", 1);
  auto fabric = open();
  const Rail& rail = *fabric->rails()[0];
  std::vector<std::thread> lookers;
  std::atomic<bool> stop = false;
  for (int i = 0; i < 2; ++i) {
    lookers.emplace_back([&] {
      while (!stop) fabric->refresh();
    });
  }
  Rail::State last = rail.state();
  for (int step = 0; step < 300; ++step) {
    set([&] {
      StubPort& port = nic.ports[0];
      switch (random() % 4) {
        case 0:
          port.attr.state = IBV_PORT_DOWN;
          break;
        case 1:
          port.attr.state = IBV_PORT_ACTIVE;
          break;
        case 2:
          port.gids = {roce(1, static_cast<std::uint8_t>(random() % 4))};
          break;
        default:
          port.query_error = random() % 2 == 0 ? EIO : 0;
      }
    });
    if (random() % 3 == 0) api_.push(nic, IBV_EVENT_PORT_ERR);
    fabric->refresh();
    const Rail::State now = rail.state();
    ASSERT_EQ(now.up, Rail::is_up(now.epoch)) << "step " << step;
    ASSERT_GE(now.epoch, last.epoch) << "step " << step;
    if (now.epoch == last.epoch && now.up) {
      ASSERT_EQ(now.address, last.address) << "step " << step;
    }
    last = now;
  }
  stop = true;
  for (std::thread& thread : lookers) thread.join();
}

}  // namespace
}  // namespace rekindle::transport::verbs
