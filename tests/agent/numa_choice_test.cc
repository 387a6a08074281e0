#include "recovery/agent/numa_choice.h"

#include <gtest/gtest.h>

#include "tests/support/process.h"
#include "tests/verbs/sysfs_tree.h"

namespace rekindle::agent {
namespace {

using rekindle::testing::SysfsTree;
using transport::verbs::Topology;

// Two nodes; GPUs 0 and 1 are on node 0, GPU 2 is on node 1.
class NumaChoiceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    tree_.node(0, "0-3", "10 21");
    tree_.node(1, "4-7", "21 10");
    for (int i = 0; i < 3; ++i) {
      const std::string bus_id = fmt::format("0000:1{}:00.0", i);
      tree_.gpu(fmt::format("pci0000:1{}/{}", i, bus_id), i / 2);
      SysfsTree::gpu_information(proc_, bus_id, fmt::format("GPU-{}", i));
    }
  }
  NumaChoice choice() const { return {Topology::read(tree_.root()), proc_}; }
  static pull::PullRequest shard(std::vector<std::string> devices) {
    pull::PullRequest request;
    request.shard = "tp=0/2";
    request.devices = std::move(devices);
    return request;
  }

  rekindle::testing::TempDir dir_;
  SysfsTree tree_{dir_ / "sys"};
  const std::filesystem::path proc_ = dir_ / "proc";
};

TEST_F(NumaChoiceTest, APartLiesOnTheNodeOfTheGpuThatReadsIt) {
  EXPECT_EQ(choice().node_for(shard({"GPU-0"})), 0);
  EXPECT_EQ(choice().node_for(shard({"GPU-2"})), 1);
  EXPECT_EQ(choice().node_for(shard({"GPU-0", "GPU-1"})), 0);
  pull::PullRequest boxes;
  boxes.boxes = {{"w", {}, {}}};
  boxes.devices = {"GPU-2"};
  EXPECT_EQ(choice().node_for(boxes), 1);
}

TEST_F(NumaChoiceTest, WithoutOneKnownNodeThereIsNoChoice) {
  EXPECT_EQ(choice().node_for(shard({"GPU-0", "GPU-2"})), -1) << "on both nodes";
  EXPECT_EQ(choice().node_for(shard({"GPU-0", ""})), -1) << "a worker without a GPU";
  EXPECT_EQ(choice().node_for(shard({"GPU-9"})), -1);
  EXPECT_EQ(choice().node_for(shard({})), -1) << "rekindle pull";
}

TEST_F(NumaChoiceTest, AWholeVersionBelongsToNoGpu) {
  pull::PullRequest whole;
  whole.devices = {"GPU-0"};
  EXPECT_EQ(choice().node_for(whole), -1);
}

TEST_F(NumaChoiceTest, TheTopologyFileCounts) {
  Topology topology = Topology::read(tree_.root());
  ASSERT_TRUE(topology.apply(R"({"gpus": {"0000:10:00.0": {"numa_node": 1}}})", "t.json"));
  EXPECT_EQ(NumaChoice(topology, proc_).node_for(shard({"GPU-0"})), 1);
}

}  // namespace
}  // namespace rekindle::agent
