#include "transport/verbs/host/topology.h"

#include <numeric>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/verbs/sysfs_tree.h"
#include "transport/verbs/host/gpu_direct.h"
#include "transport/verbs/host/sysfs.h"

namespace rekindle::transport::verbs {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr std::uint64_t k400G = 50'000'000'000;

class TopologyTest : public ::testing::Test {
 protected:
  // A training host: 2 sockets; each has 2 root complexes, each with one PCIe switch that holds 2
  // GPUs and 2 NICs. The storage NIC mlx5_8 (25 Gb/s) hangs on socket 0 without a switch.
  void build_big_host() {
    tree_.node(0, "0-31,64-95", "10 21");
    tree_.node(1, "32-63,96-127", "21 10");
    for (int i = 0; i < 8; ++i) {
      const int root = 0x10 + 0x10 * (i / 2);
      const int socket = i / 4;
      const auto hop = [&](int bus, int device) {
        return fmt::format("0000:{:02x}:{:02x}.0", bus, device);
      };
      const std::string top =
          fmt::format("pci0000:{:02x}/{}/{}", root, hop(root, 1), hop(root + 1, 0));
      const int slot = i % 2;
      tree_.gpu(fmt::format("{}/{}/{}", top, hop(root + 2, slot), hop(root + 3 + slot, 0)), socket);
      tree_.nic(fmt::format("mlx5_{}", i),
                fmt::format("{}/{}/{}", top, hop(root + 2, 4 + slot), hop(root + 8 + slot, 0)),
                socket);
    }
    tree_.nic("mlx5_8", "pci0000:00/0000:00:03.0/0000:01:00.0", 0);
  }

  std::vector<RailPlace> rails(const Topology& topology) {
    std::vector<RailPlace> places;
    for (const NicPlace& nic : topology.nics()) {
      places.push_back({nic.name, 1, nic.name == "mlx5_8" ? k400G / 16 : k400G});
    }
    return places;
  }

  Topology read() { return Topology::read(tree_.root()); }

  Distance between(const Topology& topology, const char* nic, const char* gpu) {
    return topology.distance(*topology.nic(nic), *topology.gpu(gpu));
  }

  rekindle::testing::TempDir dir_;
  rekindle::testing::SysfsTree tree_{dir_.path()};
};

TEST_F(TopologyTest, ABigHostIsReadWhole) {
  build_big_host();
  const Topology topology = read();
  ASSERT_EQ(topology.gpus().size(), 8U);
  ASSERT_EQ(topology.nics().size(), 9U);
  ASSERT_EQ(topology.nodes().size(), 2U);
  EXPECT_EQ(topology.gpus()[0].bus_id, "0000:13:00.0");
  EXPECT_EQ(topology.nic("mlx5_5")->numa_node, 1);
  EXPECT_EQ(topology.nic("mlx5_5")->cpus.size(), 64U);
  EXPECT_THAT(topology.nic("mlx5_0")->pci, ElementsAre("pci0000:10", "0000:10:01.0", "0000:11:00.0",
                                                       "0000:12:04.0", "0000:18:00.0"));
  EXPECT_EQ(topology.nic("mlx5_9"), nullptr);
}

// The choice of each GPU on the big host, as a table: who registers dmabufs, what the file says.
TEST_F(TopologyTest, AGpuIsWrittenToByTheRailsBehindItsOwnSwitch) {
  build_big_host();
  // A GPU with no NIC behind its root.
  tree_.gpu("pci0000:00/0000:00:05.0/0000:05:00.0", 0);
  struct Row {
    const char* what;
    std::string file;
    std::vector<std::string> without_dmabuf;
    std::string gpu;
    std::vector<std::string> chosen;
    std::string why;
  };
  const std::vector<Row> rows{
      {"both NICs of the switch", "", {}, "0000:13:00.0", {"mlx5_0", "mlx5_1"}, ""},
      {"on the other socket", "", {}, "0000:44:00.0", {"mlx5_6", "mlx5_7"}, ""},
      {"one registers none", "", {"mlx5_0"}, "0000:13:00.0", {"mlx5_1"}, ""},
      {"none registers any", "", {"mlx5_0", "mlx5_1"}, "0000:13:00.0", {}, "registers no dmabufs"},
      {"no switch in common", "", {}, "0000:05:00.0", {}, "no rail shares a PCIe switch"},
      {"the file names a far one",
       R"({"gpus":{"0000:05:00.0":{"preferred":["mlx5_3"]}}})",
       {},
       "0000:05:00.0",
       {"mlx5_3"},
       ""},
      {"the file's rail registers none",
       R"({"gpus":{"0000:05:00.0":{"preferred":["mlx5_3"]}}})",
       {"mlx5_3"},
       "0000:05:00.0",
       {},
       "mlx5_3"},
  };
  for (const Row& row : rows) {
    Topology topology = read();
    if (!row.file.empty()) {
      const auto applied = topology.apply(row.file, "the test's file");
      ASSERT_TRUE(applied) << applied.error().message();
    }
    std::vector<GpuRail> all;
    for (const RailPlace& place : rails(topology)) {
      all.push_back({place, std::ranges::count(row.without_dmabuf, place.device) == 0});
    }
    ASSERT_NE(topology.gpu(row.gpu), nullptr) << row.what;
    const auto chosen = choose_gpu_rails(topology, all, *topology.gpu(row.gpu));
    std::vector<std::string> names;
    for (const std::size_t rail : chosen.value_or(std::vector<std::size_t>())) {
      names.push_back(all[rail].place.device);
    }
    EXPECT_EQ(names, row.chosen) << row.what;
    EXPECT_EQ(chosen.has_value(), row.why.empty()) << row.what;
    if (!chosen) {
      EXPECT_THAT(chosen.error().message(), HasSubstr(row.why)) << row.what;
    }
  }
}

TEST_F(TopologyTest, DistancesFollowThePciPaths) {
  build_big_host();
  // Behind the first switch, one more switch with a NIC; and one on the same root without any.
  tree_.nic(
      "deep",
      "pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:06.0/0000:1c:00.0/0000:1d:00.0/0000:1e:00.0",
      0);
  tree_.nic("root", "pci0000:10/0000:10:02.0/0000:1f:00.0", 0);
  const Topology topology = read();
  EXPECT_EQ(between(topology, "mlx5_0", "0000:13:00.0"), Distance::kPix);
  EXPECT_EQ(between(topology, "mlx5_1", "0000:13:00.0"), Distance::kPix);
  EXPECT_EQ(between(topology, "deep", "0000:13:00.0"), Distance::kPxb);
  EXPECT_EQ(between(topology, "root", "0000:13:00.0"), Distance::kPhb);
  EXPECT_EQ(between(topology, "mlx5_2", "0000:13:00.0"), Distance::kNode);
  EXPECT_EQ(between(topology, "mlx5_4", "0000:13:00.0"), Distance::kSys);
  EXPECT_EQ(topology.distance(*topology.nic("mlx5_4"), 1), Distance::kNode);
  EXPECT_EQ(topology.distance(*topology.nic("mlx5_4"), 0), Distance::kSys);
}

TEST_F(TopologyTest, FunctionsOfOneCardAreAsNearAsCanBe) {
  tree_.gpu("pci0000:17/0000:17:01.0/0000:18:00.0/0000:19:00.0/0000:1a:00.0", 0);
  tree_.nic("mlx5_0", "pci0000:17/0000:17:01.0/0000:18:00.0/0000:19:01.0/0000:1b:00.0", 0);
  tree_.nic("mlx5_1", "pci0000:17/0000:17:01.0/0000:18:00.0/0000:19:01.0/0000:1b:00.1", 0);
  // A virtual function: on the bus of its physical one.
  tree_.nic("mlx5_2", "pci0000:17/0000:17:01.0/0000:18:00.0/0000:19:01.0/0000:1b:01.2", 0);
  const Topology topology = read();
  for (const char* nic : {"mlx5_0", "mlx5_1", "mlx5_2"}) {
    EXPECT_EQ(between(topology, nic, "0000:1a:00.0"), Distance::kPix) << nic;
  }
}

TEST_F(TopologyTest, ALaptopHasNoNodesNoNicsAndMaybeAGpu) {
  tree_.pci("pci0000:00/0000:00:02.0", -1, "0x8086", "0x030000");  // its own graphics: not ours
  tree_.gpu("pci0000:00/0000:00:01.0/0000:01:00.0", -1);
  tree_.pci("pci0000:00/0000:00:01.0/0000:01:00.1", -1, "0x10de", "0x040300");  // its sound
  const Topology topology = read();
  EXPECT_THAT(topology.nics(), IsEmpty());
  EXPECT_THAT(topology.nodes(), IsEmpty());
  ASSERT_EQ(topology.gpus().size(), 1U);
  EXPECT_EQ(topology.gpus()[0].bus_id, "0000:01:00.0");
  const RailOrder order = order_rails(topology, {}, {.gpu = "0000:01:00.0"});
  EXPECT_THAT(order.preferred, IsEmpty());
}

TEST_F(TopologyTest, AGpuIsFoundByItsUuid) {
  build_big_host();
  const Topology topology = read();
  const auto proc = dir_ / "proc";
  using rekindle::testing::SysfsTree;
  SysfsTree::gpu_information(proc, "0000:13:00.0", "GPU-0000");
  SysfsTree::gpu_information(proc, "0000:44:00.0", "GPU-7777");
  SysfsTree::gpu_information(proc, "0000:23:00.0", "GPU-????????");  // nobody opened it
  SysfsTree::gpu_information(proc, "0000:ff:00.0", "GPU-ffff");      // not in sysfs
  EXPECT_EQ(node_of_gpu(topology, proc, "GPU-0000"), 0);
  EXPECT_EQ(node_of_gpu(topology, proc, "GPU-7777"), 1);
  for (const char* uuid : {"", "GPU-0", "GPU-00000", "GPU-ffff", "MIG-0000", "double:0"}) {
    EXPECT_EQ(node_of_gpu(topology, proc, uuid), -1) << uuid;
  }
  EXPECT_EQ(node_of_gpu(topology, dir_ / "nothing", "GPU-0000"), -1);
}

TEST_F(TopologyTest, AMachineWithNothingIsEmpty) {
  const Topology topology = Topology::read(dir_ / "nothing");
  EXPECT_TRUE(topology.nics().empty() && topology.gpus().empty() && topology.nodes().empty());
}

TEST_F(TopologyTest, ASoftwareDeviceIsWhereItsInterfaceIs) {
  tree_.node(0, "0-3", "10 21");
  tree_.node(1, "4-7", "21 10");
  tree_.pci("pci0000:80/0000:80:01.0/0000:81:00.0", 1, "0x8086", "0x020000");
  tree_.netdev("eth0", "pci0000:80/0000:80:01.0/0000:81:00.0");
  tree_.virtual_nic("rxe0", "eth0");
  tree_.virtual_nic("rxe1", "dummy0");  // a virtual interface: nowhere
  const Topology topology = read();
  EXPECT_EQ(topology.nic("rxe0")->numa_node, 1);
  EXPECT_THAT(topology.nic("rxe0")->cpus, ElementsAre(4, 5, 6, 7));
  EXPECT_EQ(topology.nic("rxe1")->numa_node, -1);
  EXPECT_THAT(topology.nic("rxe1")->pci, IsEmpty());
  EXPECT_EQ(topology.distance(*topology.nic("rxe1"), 0), Distance::kSys);
}

TEST_F(TopologyTest, AGpuGetsTheNicsOfItsSwitchThenNearOnesThenFarOnesThenSlowOnes) {
  build_big_host();
  const Topology topology = read();
  const RailOrder order = order_rails(topology, rails(topology), {.gpu = "00000000:23:00.0"});
  EXPECT_THAT(order.preferred, ElementsAre(2, 3));
  EXPECT_THAT(order.fallback, ElementsAre(0, 1, 4, 5, 6, 7, 8));
}

TEST_F(TopologyTest, ANumaNodeGetsItsOwnNicsFirst) {
  build_big_host();
  const Topology topology = read();
  const RailOrder order = order_rails(topology, rails(topology), {.numa_node = 1});
  EXPECT_THAT(order.preferred, ElementsAre(4, 5, 6, 7));
  EXPECT_THAT(order.fallback, ElementsAre(0, 1, 2, 3, 8));
}

TEST_F(TopologyTest, WithoutAPlaceAllFastRailsAreAlike) {
  build_big_host();
  const Topology topology = read();
  EXPECT_THAT(order_rails(topology, rails(topology), {}).preferred,
              ElementsAre(0, 1, 2, 3, 4, 5, 6, 7));
  EXPECT_THAT(order_rails(topology, rails(topology), {}).fallback, ElementsAre(8));
  // A GPU that sysfs does not know is no place.
  EXPECT_EQ(order_rails(topology, rails(topology), {.gpu = "0000:ff:00.0"}).preferred.size(), 8U);
  EXPECT_EQ(order_rails(topology, rails(topology), {.gpu = "nonsense"}).preferred.size(), 8U);
}

TEST_F(TopologyTest, ANodeWithoutNicsUsesTheNearestOthers) {
  tree_.node(0, "0-7", "10 12 32");
  tree_.node(1, "8-15", "12 10 32");
  tree_.node(2, "16-23", "32 32 10");
  tree_.nic("mlx5_0", "pci0000:10/0000:10:01.0/0000:11:00.0", 2);
  tree_.nic("mlx5_1", "pci0000:20/0000:20:01.0/0000:21:00.0", 1);
  const Topology topology = read();
  const RailOrder order = order_rails(topology, rails(topology), {.numa_node = 0});
  EXPECT_THAT(order.preferred, ElementsAre(1));
  EXPECT_THAT(order.fallback, ElementsAre(0));
}

TEST_F(TopologyTest, HalfOfTheFastestIsFastEnoughAndUnknownSpeedIs) {
  const std::vector<RailPlace> places = {{"a", 1, 100}, {"b", 1, 50}, {"c", 1, 49}, {"d", 1, 0}};
  const RailOrder order = order_rails(read(), places, {});
  EXPECT_THAT(order.preferred, ElementsAre(0, 1, 3));
  EXPECT_THAT(order.fallback, ElementsAre(2));
}

TEST_F(TopologyTest, EveryRailIsInTheOrderOnce) {
  build_big_host();
  const Topology topology = read();
  const auto places = rails(topology);
  for (const Place& place :
       {Place{}, Place{.gpu = "0000:13:00.0"}, Place{.numa_node = 1}, Place{.numa_node = 7}}) {
    const RailOrder order = order_rails(topology, places, place);
    std::vector<std::size_t> all = order.preferred;
    all.insert(all.end(), order.fallback.begin(), order.fallback.end());
    std::ranges::sort(all);
    std::vector<std::size_t> expected(places.size());
    std::iota(expected.begin(), expected.end(), 0U);
    EXPECT_EQ(all, expected);
    EXPECT_FALSE(order.preferred.empty());
  }
}

TEST_F(TopologyTest, TheFileWins) {
  build_big_host();
  Topology topology = read();
  const auto applied = topology.apply(R"({
    "nics": {"mlx5_0": {"numa_node": 1, "cpus": "40-43"}, "mlx5_1": {"numa_node": 1}, "other": {"numa_node": 0}},
    "gpus": {"0000:13:00.0": {"numa_node": 1, "preferred": ["mlx5_7:1", "mlx5_0", "not_here"]}},
    "nodes": {"0": {"preferred": ["mlx5_8"]}},
    "preferred": ["mlx5_3:2", "mlx5_4"]
  })",
                                      "t.json");
  ASSERT_TRUE(applied) << applied.error().message();
  EXPECT_EQ(topology.nic("mlx5_0")->numa_node, 1);
  EXPECT_THAT(topology.nic("mlx5_0")->cpus, ElementsAre(40, 41, 42, 43));
  EXPECT_EQ(topology.nic("mlx5_1")->cpus.front(), 32);  // those of its new node
  EXPECT_EQ(topology.gpu("0000:13:00.0")->numa_node, 1);
  const auto places = rails(topology);
  RailOrder order = order_rails(topology, places, {.gpu = "0000:13:00.0"});
  EXPECT_THAT(order.preferred, ElementsAre(7, 0));  // as written
  EXPECT_EQ(order.fallback.front(), 1U);            // still on its switch
  EXPECT_THAT(order_rails(topology, places, {.numa_node = 0}).preferred, ElementsAre(8));
  // A GPU without a list of its own has its node's.
  EXPECT_THAT(order_rails(topology, places, {.gpu = "0000:23:00.0"}).preferred, ElementsAre(8));
  EXPECT_THAT(order_rails(topology, places, {}).preferred, ElementsAre(4));  // port 1 is not 3:2
}

TEST_F(TopologyTest, PreferencesThatNameNothingHereAreAsIfNotWritten) {
  build_big_host();
  Topology topology = read();
  ASSERT_TRUE(topology.apply(R"({"preferred": ["elsewhere"]})", "t.json"));
  EXPECT_EQ(order_rails(topology, rails(topology), {}).preferred.size(), 8U);
}

TEST_F(TopologyTest, WithOneNodeEverythingIsOnIt) {
  tree_.node(0, "0-15", "10");
  tree_.gpu("pci0000:00/0000:00:06.0", -1);
  tree_.virtual_nic("rxe0", "dummy0");
  const Topology topology = read();
  EXPECT_EQ(topology.gpus()[0].numa_node, 0);
  EXPECT_EQ(topology.nic("rxe0")->cpus.size(), 16U);
  EXPECT_EQ(between(topology, "rxe0", "0000:00:06.0"), Distance::kNode);
}

TEST_F(TopologyTest, InAVirtualMachineTheFileTellsNodesApart) {
  tree_.gpu("pci0000:00/0000:00:05.0", -1);
  tree_.nic("mlx5_0", "pci0000:00/0000:00:06.0", -1);
  Topology topology = read();
  EXPECT_EQ(between(topology, "mlx5_0", "0000:00:05.0"), Distance::kPhb);
  ASSERT_TRUE(topology.apply(
      R"({"nics": {"mlx5_0": {"numa_node": 0}}, "gpus": {"0000:00:05.0": {"numa_node": 1}}})", ""));
  EXPECT_EQ(between(topology, "mlx5_0", "0000:00:05.0"), Distance::kSys);
}

TEST_F(TopologyTest, MistakesInTheFileAreFoundAndPlaced) {
  build_big_host();
  struct Mistake {
    const char* json;
    const char* message;
  };
  for (const Mistake& c : std::initializer_list<Mistake>{
           {"", "t.json: not JSON at line 1, column 1"},
           {"{\n  \"nics\": {,}\n}", "t.json: not JSON at line 2, column 12"},
           {"[]", "t.json: must be an object"},
           {R"({"nic": {}})", "t.json: nic is not known; use nics, gpus, nodes or preferred"},
           {R"({"nics": []})", "t.json: nics must be an object"},
           {R"({"nics": {"mlx5_0": 1}})", "t.json: nics.mlx5_0 must be an object"},
           {R"({"nics": {"mlx5_0": {"numa": 1}}})", "nics.mlx5_0.numa is not known"},
           {R"({"nics": {"mlx5_0": {"numa_node": -1}}})", "nics.mlx5_0.numa_node must be"},
           {R"({"nics": {"mlx5_0": {"numa_node": 4294967296}}})", "must be the number"},
           {R"({"nics": {"mlx5_0": {"numa_node": 1.0}}})", "must be the number"},
           {R"({"nics": {"absent": {"cpus": "x"}}})", "nics.absent.cpus must be a list"},
           {R"({"nics": {"mlx5_0": {"cpus": "0-99999999999"}}})", "must be a list of CPUs"},
           {R"({"gpus": {"13:0.0": {}}})", "gpus.13:0.0 must be a PCI bus id"},
           {R"({"gpus": {"0000:13:00.0": {"preferred": []}}})", "must be a list of ports"},
           {R"({"nodes": {"one": {}}})", "nodes.one must be the number"},
           {R"({"nodes": {"0": {"preferred": [1]}}})", "nodes.0.preferred must be a list"},
           {R"({"preferred": "mlx5_0"})", "preferred must be a list"},
       }) {
    Topology topology = read();
    const auto applied = topology.apply(c.json, "t.json");
    ASSERT_FALSE(applied) << c.json;
    EXPECT_EQ(applied.error().code(), ErrorCode::kInvalid);
    EXPECT_THAT(applied.error().message(), HasSubstr(c.message)) << c.json;
    EXPECT_THAT(applied.error().message(), ::testing::Not(HasSubstr("\n")));
  }
}

TEST_F(TopologyTest, AFileWithAMistakeChangesNothing) {
  build_big_host();
  Topology topology = read();
  EXPECT_FALSE(topology.apply(R"({"nics": {"mlx5_0": {"numa_node": 1}}, "zzz": 1})", "t.json"));
  EXPECT_EQ(topology.nic("mlx5_0")->numa_node, 0);
}

TEST_F(TopologyTest, PortsAreReadWithTheirGids) {
  build_big_host();
  tree_.port("mlx5_0", 1, "4: ACTIVE", "400 Gb/sec (4X NDR)");
  tree_.gid("mlx5_0", 1, 0, "fe80:0000:0000:0000:0000:0000:0000:0001", "IB/RoCE v1", "eth0");
  tree_.gid("mlx5_0", 1, 1, "0000:0000:0000:0000:0000:0000:0000:0000", "RoCE v2", "eth0");
  tree_.gid("mlx5_0", 1, 10, "0000:0000:0000:0000:0000:ffff:0a00:0003", "RoCE v2", "eth0");
  tree_.port("mlx5_1", 1, "1: DOWN", "2.5 Gb/sec (1X SDR)", "InfiniBand");
  const auto ports = read_ports(tree_.root());
  ASSERT_EQ(ports.size(), 2U);
  EXPECT_EQ(ports[0].state, "ACTIVE");
  EXPECT_EQ(ports[0].bytes_per_second, k400G);
  EXPECT_EQ(ports[0].netdevs.at(10), "eth0");
  ASSERT_EQ(ports[0].gids.size(), 2U);
  EXPECT_EQ(ports[0].gids[0].type, GidType::kRoceV1);
  EXPECT_EQ(ports[0].gids[1].index, 10U);
  EXPECT_EQ(ports[1].link, LinkLayer::kInfiniBand);
  EXPECT_EQ(ports[1].bytes_per_second, 312'500'000U);
}

TEST(Sysfs, CpuListsAreParsedWhollyOrNot) {
  EXPECT_THAT(parse_cpu_list("0-3,8"), ElementsAre(0, 1, 2, 3, 8));
  EXPECT_THAT(parse_cpu_list("8,0-1,1"), ElementsAre(0, 1, 8));
  for (const char* text :
       {"", "a", "3-1", "1,", ",1", "-1", "1--2", "1-", "0-99999999999", "70000", "1 2"}) {
    EXPECT_THAT(parse_cpu_list(text), IsEmpty()) << text;
  }
}

TEST(Sysfs, BusIdsAreWrittenInManyWays) {
  EXPECT_EQ(normalize_bus_id("0000:1b:00.0"), "0000:1b:00.0");
  EXPECT_EQ(normalize_bus_id("00000000:1B:00.0"), "0000:1b:00.0");  // nvidia-smi
  EXPECT_EQ(normalize_bus_id("1B:00.0"), "0000:1b:00.0");
  EXPECT_EQ(normalize_bus_id("00010009:01:00.0"), "10009:01:00.0");
  for (const char* text : {"", "1b:00", "0000:1b:00", "0000:1b:0.0", "000:1b:00.0", "0000:1b:00.0 ",
                           "zzzz:1b:00.0", "0000:1b:00:0", "0000000000:1b:00.0x"}) {
    EXPECT_EQ(normalize_bus_id(text), std::nullopt) << text;
  }
}

}  // namespace
}  // namespace rekindle::transport::verbs
