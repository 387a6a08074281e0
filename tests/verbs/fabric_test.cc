#include "transport/verbs/device/fabric.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/verbs/fabric_fixture.h"

// What Fabric::open finds.
namespace rekindle::transport::verbs {
namespace {

using rekindle::testing::write_file;
using ::testing::HasSubstr;

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

}  // namespace
}  // namespace rekindle::transport::verbs
