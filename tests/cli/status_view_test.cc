#include "tools/cli/status_view.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace rekindle::cli {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

proto::ClusterStatusResponse cluster() {
  proto::ClusterStatusResponse status;
  status.set_epoch(4);
  status.set_uptime_ms(61'000);
  auto& node = *status.add_nodes();
  node.mutable_node()->set_node_id("host-a");
  node.mutable_node()->set_control_endpoint("10.0.0.3:7400");
  node.set_state("alive");
  auto& holding = *node.add_holdings();
  holding.mutable_id()->set_model("qwen3");
  holding.mutable_id()->set_version(41);
  holding.set_payload_bytes(1 << 20);
  holding.set_checkpoint_bytes(8 << 20);
  holding.set_complete(true);
  auto& version = *status.add_versions();
  *version.mutable_id() = holding.id();
  version.set_state("ready");
  version.set_whole_copies(2);
  auto& pull = *status.add_pulls();
  pull.set_puller("host-b");
  *pull.mutable_id() = holding.id();
  pull.set_bytes_done(3);
  pull.set_bytes_total(4);
  pull.add_sources()->set_node_id("host-a");
  return status;
}

TEST(StatusView, ShowsNodesVersionsAndPulls) {
  const std::string text = to_text(cluster());
  EXPECT_THAT(text, HasSubstr("coordinator up 1 min, epoch 4\n"));
  EXPECT_THAT(text, ::testing::ContainsRegex("host-a +alive +10.0.0.3:7400"));
  EXPECT_THAT(text, HasSubstr("qwen3@41 12 %"));  // an eighth
  EXPECT_THAT(text, ::testing::ContainsRegex("host-b +qwen3@41 +whole +75 % +4 B"));
}

TEST(StatusView, SaysWhatIsLeftOnADrainedNodeAndWhereACopyIsMade) {
  proto::ClusterStatusResponse status = cluster();
  auto& node = *status.mutable_nodes(0);
  node.set_drained(true);
  node.set_pullers(2);
  *node.add_sole_copies() = status.versions(0).id();
  auto& version = *status.mutable_versions(0);
  version.set_replicas(3);
  version.set_copying_to("host-c");
  version.set_checkpoint_bytes(8);
  version.set_copying_bytes_done(2);
  auto& instance = *status.add_instances();
  instance.set_instance("chat");
  *instance.mutable_id() = version.id();
  instance.set_state("unfit");
  instance.set_loaded(1);
  instance.set_world(2);
  instance.set_why("rank 1 on b: the node died");
  const std::string text = to_text(status);
  EXPECT_THAT(text, HasSubstr("alive, draining: 2 readers, only copy of qwen3@41"));
  EXPECT_THAT(text, HasSubstr("2 of 3, 25 % to host-c"));
  EXPECT_THAT(text, HasSubstr("rank 1 on b: the node died"));
  version.clear_copying_to();
  version.set_short_of_copies("no node with room for it in another failure domain");
  EXPECT_THAT(to_text(status), HasSubstr("2 of 3: no node with room"));
  const Json json = to_json(status);
  EXPECT_EQ(json["nodes"][0]["sole_copies"][0]["version"], 41);
  EXPECT_EQ(json["instances"][0]["loaded"], 1);
}

TEST(StatusView, JsonHasTheSameFigures) {
  const Json json = to_json(cluster());
  EXPECT_EQ(json["epoch"], 4);
  EXPECT_EQ(json["nodes"][0]["holdings"][0]["payload_bytes"], 1 << 20);
  EXPECT_EQ(json["versions"][0]["whole_copies"], 2);
  EXPECT_EQ(json["pulls"][0]["bytes_done"], 3);
}

TEST(StatusView, NamesOfPeersCannotDriveTheTerminal) {
  proto::ClusterStatusResponse status = cluster();
  status.mutable_nodes(0)->mutable_node()->set_node_id("evil\x1b[2J");
  EXPECT_THAT(to_text(status), Not(HasSubstr("\x1b")));
}

TEST(StatusView, BrokenTileRangesDoNotBreakTheReport) {
  proto::AgentStatusResponse status;
  auto& holding = *status.add_holdings();
  holding.mutable_held()->add_begin(5);
  holding.mutable_held()->add_begin(9);
  holding.mutable_held()->add_end(3);
  EXPECT_EQ(to_json(status)["holdings"][0]["held_tiles"], 0);
  EXPECT_THAT(to_text(status), HasSubstr("coordinator  none"));
}

TEST(StatusView, ShowsInstancesAndTheirWorkers) {
  proto::AgentStatusResponse status;
  EXPECT_THAT(to_text(status), Not(HasSubstr("INSTANCE")));
  auto& instance = *status.add_instances();
  instance.set_name("i");
  instance.set_state("UNFIT");
  instance.set_world(2);
  instance.set_why("rank 1 died\x1b[2J");
  auto& session = *instance.add_sessions();
  session.set_pid(77);
  session.set_state("loaded");
  session.set_rung("peers");
  session.set_bytes_done(1);
  session.set_bytes_total(4);
  auto& phase = *session.add_phases();
  phase.set_name("wire");
  phase.set_elapsed_us(1500);
  const std::string text = to_text(status);
  EXPECT_THAT(text, ::testing::ContainsRegex("i +UNFIT +- +0 +2 +rank 1 died"));
  EXPECT_THAT(text, ::testing::ContainsRegex("i +0 +77 +loaded +peers +25 % of 4 B +wire 1.5 ms"));
  EXPECT_THAT(text, Not(HasSubstr("\x1b")));
  const Json json = to_json(status)["instances"][0];
  EXPECT_EQ(json["why"], "rank 1 died\x1b[2J");
  EXPECT_EQ(json["version"], nullptr);
  EXPECT_EQ(json["sessions"][0]["phases_us"]["wire"], 1500);
}

}  // namespace
}  // namespace rekindle::cli
