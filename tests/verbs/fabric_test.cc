#include "transport/verbs/fabric.h"

#include <chrono>
#include <functional>
#include <random>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/process.h"
#include "tests/verbs/stub_devices.h"

namespace rekindle::transport::verbs {
namespace {

using rekindle::testing::TempDir;
using rekindle::testing::write_file;
using ::testing::HasSubstr;

ibv_gid_entry roce(std::uint32_t index, std::uint8_t last_byte, bool v2 = true) {
  ibv_gid_entry entry{};
  entry.gid_index = index;
  entry.gid_type = v2 ? IBV_GID_TYPE_ROCE_V2 : IBV_GID_TYPE_ROCE_V1;
  const std::uint8_t raw[16] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, last_byte};
  std::copy(std::begin(raw), std::end(raw), entry.gid.raw);
  return entry;
}

class FabricTest : public ::testing::Test {
 protected:
  // A device with one RoCE port that is up, 10.0.0.`host`.
  StubDevice& add_nic(const std::string& name, std::uint8_t host, int ports = 1) {
    StubDevice& device = api_.add(name, ports);
    for (StubPort& port : device.ports) port.gids = {roce(0, host, false), roce(1, host)};
    return device;
  }

  std::unique_ptr<Fabric> open(const std::string& hca = "") {
    FabricOptions options;
    options.hca = hca;
    options.sysfs = sysfs_.path();
    return open_with(options);
  }

  std::unique_ptr<Fabric> open_with(const FabricOptions& options) {
    auto fabric = Fabric::open(api_, options);
    EXPECT_TRUE(fabric) << fabric.error().message();
    return fabric ? std::move(*fabric) : nullptr;
  }

  void set(const std::function<void()>& change) {
    const std::lock_guard lock(api_.mutex);
    change();
  }

  // The monitor thread gets there by itself.
  static void await(const std::function<bool()>& done) {
    const auto deadline = std::chrono::steady_clock::now() + rekindle::testing::kPatience;
    while (!done()) {
      ASSERT_LT(std::chrono::steady_clock::now(), deadline) << "it never happened";
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  void TearDown() override {
    EXPECT_EQ(api_.lists, 0);
    for (const auto& device : api_.devices) {
      EXPECT_EQ(device->contexts, 0) << device->name << " is left open";
      EXPECT_EQ(device->pds, 0);
    }
  }

  StubApi api_;
  TempDir sysfs_;
};

TEST_F(FabricTest, NoDeviceIsNoErrorAndSaysSo) {
  auto fabric = open();
  EXPECT_TRUE(fabric->rails().empty());
  EXPECT_EQ(fabric->why_empty(), "no RDMA device");
  fabric->refresh();
  api_.list_error = ENOSYS;
  EXPECT_THAT(open()->why_empty(), HasSubstr("no RDMA device: the kernel"));
}

TEST_F(FabricTest, AFilterThatMatchesNothingNamesWhatIsThere) {
  add_nic("mlx5_0", 1);
  add_nic("mlx5_1", 2);
  auto fabric = open("=mlx5_9");
  EXPECT_TRUE(fabric->rails().empty());
  EXPECT_TRUE(fabric->devices().empty());
  EXPECT_EQ(fabric->why_empty(), "--hca '=mlx5_9' matches none of mlx5_0, mlx5_1");
}

TEST_F(FabricTest, ExcludedDevicesAreNotEvenOpened) {
  StubDevice& broken = add_nic("mlx5_0", 1);
  add_nic("mlx5_1", 2);
  auto fabric = open("^mlx5_0");
  EXPECT_EQ(broken.opened, 0);
  ASSERT_EQ(fabric->rails().size(), 1U);
  EXPECT_EQ(fabric->rails()[0]->name(), "mlx5_1:1");
  EXPECT_EQ(fabric->devices()[0]->index(), 0U);
}

TEST_F(FabricTest, OnePortOfADeviceCanBeChosen) {
  add_nic("mlx5_0", 1, 2);
  auto fabric = open("mlx5_0:2");
  ASSERT_EQ(fabric->rails().size(), 1U);
  EXPECT_EQ(fabric->rails()[0]->port(), 2);
  fabric.reset();
  EXPECT_THAT(open("mlx5_0:7")->why_empty(), HasSubstr("matches none of mlx5_0"));
}

TEST_F(FabricTest, WhatCannotBeUnderstoodIsInvalid) {
  FabricOptions options;
  options.hca = "mlx5_0:x";
  EXPECT_EQ(Fabric::open(api_, options).error().code(), ErrorCode::kInvalid);
  options = {};
  options.gid_index = 256;
  EXPECT_EQ(Fabric::open(api_, options).error().code(), ErrorCode::kInvalid);
  options = {};
  options.topology_file = sysfs_ / "topology.json";
  EXPECT_EQ(Fabric::open(api_, options).error().code(), ErrorCode::kNotFound);
  write_file(options.topology_file, "{\n  \"nics\": [}\n");
  const auto bad = Fabric::open(api_, options);
  EXPECT_EQ(bad.error().code(), ErrorCode::kInvalid);
  EXPECT_THAT(bad.error().message(), HasSubstr("line 2, column 12"));
}

TEST_F(FabricTest, ADeviceThatCannotBeOpenedDoesNotStopTheOthers) {
  add_nic("mlx5_0", 1).open_error = EACCES;
  EXPECT_THAT(open()->why_empty(), HasSubstr("no usable RDMA device: mlx5_0: open it"));
  add_nic("mlx5_1", 2);
  auto fabric = open();
  ASSERT_EQ(fabric->rails().size(), 1U);
  EXPECT_EQ(fabric->why_empty(), "");
}

TEST_F(FabricTest, IwarpIsRefusedWithAReason) {
  add_nic("siw0", 1).device.node_type = IBV_NODE_RNIC;
  EXPECT_THAT(open()->why_empty(), HasSubstr("siw0: iWARP"));
}

TEST_F(FabricTest, LimitsAreThoseOfReads) {
  StubDevice& nic = add_nic("mlx5_0", 1);
  nic.attr.max_sge = 30;
  nic.attr.max_sge_rd = 20;
  nic.attr.max_qp_rd_atom = 4096;
  nic.attr.max_qp_init_rd_atom = 0;
  nic.attr.device_cap_flags = IBV_DEVICE_MEM_WINDOW_TYPE_2B;
  auto fabric = open();
  const DeviceLimits& limits = fabric->devices()[0]->limits();
  EXPECT_EQ(limits.max_sge, 20U);
  EXPECT_EQ(limits.max_rd_atomic, 255);
  EXPECT_EQ(limits.max_init_rd_atomic, 1);
  EXPECT_TRUE(limits.memory_windows_2b);
}

TEST_F(FabricTest, SpeedMtuAndAddressOfAPortAreFound) {
  StubDevice& nic = add_nic("mlx5_0", 7, 2);
  nic.ports[0].attr.active_mtu = IBV_MTU_1024;
  nic.ports[1].attr.active_speed = 0;  // newer than the eight bits of this field
  write_file(sysfs_ / "class/infiniband/mlx5_0/ports/2/rate", "800 Gb/sec (4X XDR)\n");
  auto fabric = open();
  const Rail::State state = fabric->rails()[0]->state();
  EXPECT_TRUE(state.up);
  EXPECT_EQ(state.epoch, fabric->rails()[0]->epoch());
  EXPECT_EQ(state.bytes_per_second, 50'000'000'000U);  // 4 × NDR
  EXPECT_EQ(state.mtu_bytes, 1024U);
  EXPECT_EQ(state.address.gid_index, 1);
  EXPECT_EQ(format_gid(state.address.gid), "10.0.0.7");
  EXPECT_EQ(fabric->rails()[1]->state().bytes_per_second, 100'000'000'000U);
}

TEST_F(FabricTest, APortThatIsDownAtTheStartComesUpLater) {
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

TEST_F(FabricTest, AnEventThatWasLostIsMadeUpFor) {
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

TEST_F(FabricTest, AFlapThatIsOverBeforeAnybodyLookedMovesTheEpoch) {
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

TEST_F(FabricTest, AStormOfEventsIsTakenWholeAndCostsFewLooks) {
  StubDevice& nic = add_nic("mlx5_0", 1);
  StubDevice& calm = add_nic("mlx5_1", 2);
  auto fabric = open();
  const std::uint32_t before = fabric->rails()[0]->epoch();
  constexpr std::uint64_t kFlaps = 20'000;
  const std::uint64_t looks = nic.looks;
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

TEST_F(FabricTest, AnEndlessStormOnOneDeviceHidesNothingOnAnother) {
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

TEST_F(FabricTest, AnAddressThatChangesMovesTheEpochThoughThePortStaysUp) {
  StubDevice& nic = add_nic("mlx5_0", 1);
  auto fabric = open();
  const Rail& rail = *fabric->rails()[0];
  const std::uint32_t before = rail.epoch();
  set([&] { nic.ports[0].gids = {roce(1, 9)}; });
  api_.push(nic, IBV_EVENT_GID_CHANGE);
  await([&] { return rail.epoch() == before + 2; });
  EXPECT_EQ(format_gid(rail.state().address.gid), "10.0.0.9");
}

TEST_F(FabricTest, FurtherAddressesBreakNothing) {
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

TEST_F(FabricTest, AGidIndexThatIsEmptyKeepsTheRailDownAndSaysWhy) {
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

TEST_F(FabricTest, AnotherLidOnInfinibandMovesTheEpoch) {
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

TEST_F(FabricTest, OnlyASmallerMtuMovesTheEpoch) {
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

TEST_F(FabricTest, AFatalDeviceIsDeadForGood) {
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

TEST_F(FabricTest, ADeviceWhoseKernelSideIsClosedIsDead) {
  StubDevice& nic = add_nic("mlx5_0", 1);
  auto fabric = open();
  nic.kernel_end.reset();
  await([&] { return fabric->devices()[0]->dead(); });
  await([&] { return fabric->rails()[0]->state().why_down == "device removed"; });
}

TEST_F(FabricTest, APortThatCannotBeQueriedIsDownUntilItCan) {
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

TEST_F(FabricTest, EventsOfQueuePairsAreAcknowledged) {
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

TEST_F(FabricTest, NumaAndCpusComeFromSysfsUnlessAFileSaysOtherwise) {
  add_nic("mlx5_0", 1);
  const auto device = sysfs_ / "class/infiniband/mlx5_0/device";
  write_file(device / "numa_node", "1\n");
  write_file(sysfs_ / "devices/system/node/node0/cpulist", "0-3\n");
  write_file(sysfs_ / "devices/system/node/node1/cpulist", "4-7\n");
  auto fabric = open();
  EXPECT_EQ(fabric->devices()[0]->numa_node(), 1);
  EXPECT_EQ(fabric->devices()[0]->cpus(), (std::vector<int>{4, 5, 6, 7}));
  fabric.reset();
  FabricOptions options;
  options.sysfs = sysfs_.path();
  options.topology_file = sysfs_ / "topology.json";
  write_file(options.topology_file, R"({"nics": {"mlx5_0": {"numa_node": 0}}})");
  fabric = open_with(options);
  EXPECT_EQ(fabric->devices()[0]->numa_node(), 0);
  EXPECT_EQ(fabric->devices()[0]->cpus(), (std::vector<int>{0, 1, 2, 3}));
}

// Whatever happens, and however much of it goes unnoticed: a user that connected in an even epoch
// and finds the same number later has lost nothing that was noticed, and down is odd.
TEST_F(FabricTest, AnEvenEpochNeverComesBack) {
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
