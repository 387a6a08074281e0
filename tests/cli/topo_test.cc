#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/verbs/sysfs_tree.h"
#include "tools/cli/doctor.h"
#include "tools/cli/rdma_view.h"

namespace rekindle::cli {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Two sockets; a GPU and a NIC behind one switch on each; the second NIC's cable is out.
class Topo : public ::testing::Test {
 protected:
  Topo() {
    tree_.node(0, "0-3", "10 21");
    tree_.node(1, "4-7", "21 10");
    tree_.gpu("pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:00.0/0000:13:00.0", 0);
    tree_.gpu("pci0000:80/0000:80:01.0/0000:81:00.0/0000:82:00.0/0000:83:00.0", 1);
    tree_.nic("mlx5_0", "pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:01.0/0000:14:00.0", 0);
    tree_.nic("mlx5_1", "pci0000:80/0000:80:01.0/0000:81:00.0/0000:82:01.0/0000:84:00.0", 1);
    tree_.port("mlx5_0", 1, "4: ACTIVE", "400 Gb/sec (4X NDR)");
    tree_.gid("mlx5_0", 1, 0, "fe80:0000:0000:0000:0000:0000:0000:0001", "RoCE v2", "eth0");
    tree_.gid("mlx5_0", 1, 3, "0000:0000:0000:0000:0000:ffff:0a00:0003", "RoCE v2", "eth0.7");
    tree_.port("mlx5_1", 1, "1: DOWN", "400 Gb/sec (4X NDR)");
    options_.sysfs = tree_.root();
  }

  RdmaView view() {
    auto view = look_at_sysfs(options_);
    EXPECT_TRUE(view) << view.error().message();
    return view ? std::move(*view) : RdmaView();
  }

  rekindle::testing::TempDir dir_;
  rekindle::testing::SysfsTree tree_{dir_.path()};
  transport::verbs::FabricOptions options_;
};

TEST_F(Topo, JsonHasRailsDistancesAndOrder) {
  const Json json = topo_json(view());
  ASSERT_EQ(json["rails"].size(), 2U);
  const Json& up = json["rails"][0];
  EXPECT_EQ(up["rail"], "mlx5_0:1");
  EXPECT_EQ(up["state"], "up");
  EXPECT_EQ(up["gid_index"], 3);
  EXPECT_EQ(up["address"], "10.0.0.3");
  EXPECT_EQ(up["netdev"], "eth0.7");  // of that GID, not of the port's first one
  EXPECT_EQ(up["bytes_per_second"], 50'000'000'000U);
  EXPECT_EQ(up["numa_node"], 0);
  EXPECT_EQ(up["memory_windows"], nullptr);  // only the device could tell
  EXPECT_EQ(json["rails"][1]["state"], "down");
  EXPECT_EQ(json["rails"][1]["why"], "port DOWN");
  EXPECT_EQ(json["rails"][1]["gid_index"], nullptr);
  ASSERT_EQ(json["gpus"].size(), 2U);
  EXPECT_EQ(json["gpus"][1]["gpu"], "0000:83:00.0");
  EXPECT_EQ(json["gpus"][1]["distances"]["mlx5_1:1"], "PIX");
  EXPECT_EQ(json["gpus"][1]["distances"]["mlx5_0:1"], "SYS");
  EXPECT_EQ(json["gpus"][1]["preferred"], Json::array({"mlx5_1:1"}));
  EXPECT_EQ(json["gpus"][1]["fallback"], Json::array({"mlx5_0:1"}));
  ASSERT_EQ(json["nodes"].size(), 2U);
  EXPECT_EQ(json["nodes"][0]["distances"]["mlx5_0:1"], "NODE");
  EXPECT_EQ(json["preferred"].size(), 2U);
}

TEST_F(Topo, TextHasTheSame) {
  const std::string text = topo_text(view());
  EXPECT_THAT(text, AllOf(HasSubstr("mlx5_0:1"), HasSubstr("400 Gb/s"), HasSubstr("10.0.0.3"),
                          HasSubstr("RoCE v2, IPv4"), HasSubstr("port DOWN"),
                          HasSubstr("gpu 0000:83:00.0"), HasSubstr("PIX: at most one")));
}

TEST_F(Topo, TheFilterTheIndexAndTheFileAreFollowed) {
  options_.hca = "mlx5_0";
  options_.gid_index = 0;
  options_.topology_file = dir_ / "topology.json";
  rekindle::testing::write_file(options_.topology_file,
                                R"({"nics": {"mlx5_0": {"numa_node": 1}}})");
  const Json json = topo_json(view());
  ASSERT_EQ(json["rails"].size(), 1U);
  EXPECT_EQ(json["rails"][0]["address"], "fe80::1");
  EXPECT_EQ(json["rails"][0]["why"], "--gid-index, IPv6 link-local");
  EXPECT_EQ(json["rails"][0]["numa_node"], 1);
  options_.gid_index = 9;
  EXPECT_THAT(topo_text(view()), HasSubstr("GID index 9 is empty"));
  options_.hca = "=mlx4_0";
  EXPECT_THAT(topo_text(view()), HasSubstr("note: --hca '=mlx4_0' matches none"));
  options_.hca = "^";
  EXPECT_EQ(look_at_sysfs(options_).error().code(), ErrorCode::kInvalid);
}

TEST_F(Topo, AHostWithoutAnythingSaysSo) {
  options_.sysfs = dir_ / "empty";
  EXPECT_EQ(topo_text(view()), "note: no RDMA device\n");
  EXPECT_TRUE(topo_json(view())["rails"].empty());
}

TEST_F(Topo, NamesFromTheKernelReachTheTerminalPrintable) {
  tree_.port("mlx5_0", 1, "4: ACTIVE\x1b[31m", "400 Gb/sec (4X NDR)");
  EXPECT_THAT(topo_text(view()), AllOf(HasSubstr("\\x1b[31m"), ::testing::Not(HasSubstr("\x1b"))));
}

TEST_F(Topo, DoctorSaysWhatEachPortNeeds) {
  const RdmaView seen = view();
  const doctor::Check up = doctor::check_rail(seen.rails[0]);
  EXPECT_EQ(up.level, doctor::Level::kOk);
  EXPECT_THAT(up.found,
              AllOf(HasSubstr("up, 400 Gb/s Ethernet"), HasSubstr("GID 3 10.0.0.3 (RoCE v2, IPv4)"),
                    HasSubstr("memory windows unknown")));
  const doctor::Check down = doctor::check_rail(seen.rails[1]);
  EXPECT_EQ(down.level, doctor::Level::kWarn);
  EXPECT_THAT(down.advice, HasSubstr("check cable"));

  RailView rail = seen.rails[0];
  rail.mtu_bytes = 1024;
  rail.memory_windows = false;
  rail.dmabuf = true;
  const doctor::Check small = doctor::check_rail(rail);
  EXPECT_THAT(small.found, AllOf(HasSubstr("one key for all pullers"), HasSubstr("dmabuf yes")));
  EXPECT_THAT(small.advice, HasSubstr("ip link set eth0.7 mtu 9000"));
  rail.up = false;
  rail.why = "no RoCE v2 GID: give the network interface an address";
  EXPECT_THAT(doctor::check_rail(rail).advice, HasSubstr("give eth0.7 an IP address"));
}

TEST_F(Topo, DoctorShowsHowGpuMemoryIsReached) {
  RdmaView seen = view();
  EXPECT_THAT(doctor::check_gpu_direct(seen, {.gpu = true, .driver_dmabuf = true}).found,
              HasSubstr("host staging: not every NIC"));
  EXPECT_THAT(
      doctor::check_gpu_direct(seen, {.gpu = true, .driver_dmabuf = true, .nic_dmabuf = true})
          .found,
      HasSubstr("dmabuf: "));
  EXPECT_THAT(doctor::check_gpu_direct(seen, {}).found, HasSubstr("no GPU"));
  seen.rails.clear();
  EXPECT_THAT(doctor::check_gpu_direct(seen, {.gpu = true}).found, HasSubstr("no RDMA device"));
}

}  // namespace
}  // namespace rekindle::cli
