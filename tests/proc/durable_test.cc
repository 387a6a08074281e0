// Rows 8, 26 and 52 on whole daemons: killed at each of their durable writes, they come back with
// the state before or after it, and the same command then succeeds.
#include <csignal>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/fleet.h"

namespace rekindle::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

// An agent or a coordinator that dies at a failpoint ("store.commit.start", "…after_create@2").
std::unique_ptr<Process> doomed(std::vector<std::string> arguments, const std::string& failpoint) {
  const auto at = failpoint.find('@');
  Spawn spawn;
  spawn.argv = std::move(arguments);
  spawn.argv.insert(spawn.argv.begin(), REKINDLE_BINARY);
  spawn.env = {{"REKINDLE_FAILPOINTS", failpoint.substr(0, at) + "=kill" +
                                           (at == std::string::npos ? "" : failpoint.substr(at))}};
  return std::make_unique<Process>(std::move(spawn));
}

std::string test_name(const ::testing::TestParamInfo<const char*>& info) {
  std::string name = info.param;
  for (char& c : name) {
    if (c == '.' || c == '@') c = '_';
  }
  return name;
}

class DurableStep : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    fleet_.start_coordinator();
    make_checkpoint(fleet_.dir("model"), 2, 1024, 5);
  }
  // The agent of store-x, registered, that dies at the step.
  std::unique_ptr<Process> doomed_agent() {
    auto agent = doomed({"agent", "--node-id", "x", "--listen", "127.0.0.1:0", "--store", store(),
                         "--coordinator", fleet_.coordinator_address()},
                        GetParam());
    EXPECT_TRUE(agent->wait_for_err("coordinator.connected")) << agent->err();
    return agent;
  }
  std::string store() const { return fleet_.dir("store-x").string(); }
  Fleet::Answer on_x(std::vector<std::string> arguments) {
    arguments.insert(arguments.end(), {"--store", store()});
    return fleet_.run_command(std::move(arguments));
  }
  // The command was told, by the end of its agent.
  static void expect_lost(Process& agent, const Fleet::Answer& answer) {
    const auto exit = agent.wait();
    ASSERT_TRUE(exit);
    EXPECT_EQ(exit->signal, SIGKILL) << agent.err();
    EXPECT_EQ(answer.exit_code, 5) << answer.err;
    EXPECT_EQ(answer.json["error"]["code"], "PEER_LOST") << answer.json;
  }
  void expect_served_by_x() {
    const auto pulled = fleet_.run_command(
        {"pull", "m@1", "--from", fleet_.agent("x").control, "--to", fleet_.dir("out").string()});
    ASSERT_EQ(pulled.exit_code, 0) << pulled.err;
    EXPECT_EQ(compare_checkpoints(fleet_.dir("model"), fleet_.dir("out")), "");
  }
  Fleet fleet_;
};

class PublishStep : public DurableStep {};
INSTANTIATE_TEST_SUITE_P(Agent, PublishStep,
                         ::testing::Values("store.stage.after_mkdir", "store.stage.after_create@1",
                                           "store.stage.after_create@2",
                                           "store.stage.before_manifest",
                                           "store.stage.after_manifest",
                                           "store.commit_staged.before_rename",
                                           "store.commit_staged.after_rename"),
                         test_name);

TEST_P(PublishStep, KilledThereTheAgentComesBackAndPublishingAgainSucceeds) {
  const std::vector<std::string> publish = {"publish", "m@1", fleet_.dir("model").string()};
  {
    const auto agent = doomed_agent();
    expect_lost(*agent, on_x(publish));
  }
  fleet_.start_agent("x");
  EXPECT_TRUE(fs::is_empty(fs::path(store()) / "staging"));
  const auto again = on_x(publish);
  ASSERT_EQ(again.exit_code, 0) << again.err;
  expect_served_by_x();
  // What the coordinator may have promised before the kill binds the version to these bytes.
  make_checkpoint(fleet_.dir("other"), 2, 1024, 6);
  EXPECT_EQ(on_x({"publish", "m@1", fleet_.dir("other").string()}).exit_code, 7);
}

class PullStep : public DurableStep {};
INSTANTIATE_TEST_SUITE_P(Agent, PullStep,
                         ::testing::Values("store.begin.after_mkdir", "store.begin.after_manifest",
                                           "store.begin.after_segment@1",
                                           "store.begin.after_segments", "store.begin.after_resume",
                                           "store.commit.start", "store.commit.after_manifest",
                                           "store.commit.between_segments",
                                           "store.commit.before_manifest_rename",
                                           "store.commit.after_manifest_rename"),
                         test_name);

TEST_P(PullStep, KilledThereTheAgentComesBackAndThePullGoesOn) {
  fleet_.start_agent("a");
  fleet_.publish("a", "m@1", fleet_.dir("model"));
  {
    const auto agent = doomed_agent();
    expect_lost(*agent, on_x({"pull", "m@1"}));
  }
  fleet_.start_agent("x");
  const auto again = on_x({"pull", "m@1"});
  ASSERT_EQ(again.exit_code, 0) << again.err;
  if (std::string(GetParam()).starts_with("store.commit")) {
    EXPECT_EQ(again.json["fetched_bytes"], 0) << "everything had verified before";
  }
  EXPECT_EQ(fleet_.run_command({"verify", again.json["path"].get<std::string>()}).exit_code, 0);
  expect_served_by_x();
}

class RetireStep : public DurableStep {};
INSTANTIATE_TEST_SUITE_P(Agent, RetireStep,
                         ::testing::Values("store.remove.after_marker",
                                           "store.remove.between_files@1",
                                           "store.remove.before_rmdir"),
                         test_name);

TEST_P(RetireStep, KilledThereTheAgentComesBackWithoutTheVersion) {
  {
    const auto agent = doomed_agent();
    ASSERT_EQ(on_x({"publish", "m@1", fleet_.dir("model").string()}).exit_code, 0);
    expect_lost(*agent, on_x({"retire", "m@1"}));
  }
  fleet_.start_agent("x");
  const auto status = fleet_.run_command({"status", "--agent", fleet_.agent("x").control});
  EXPECT_EQ(status.json["holdings"].size(), 0u) << status.json;
  EXPECT_TRUE(fs::is_empty(fs::path(store()) / "models"));
}

// Each save of the coordinator: the epoch of its start, a claim, a retirement.
class CoordinatorStep : public ::testing::TestWithParam<std::tuple<const char*, int>> {
 protected:
  std::string step() const { return std::get<0>(GetParam()); }
  int save() const { return std::get<1>(GetParam()); }
};
std::string step_name(const ::testing::TestParamInfo<std::tuple<const char*, int>>& test) {
  return std::string(std::get<0>(test.param)) + "_" + std::to_string(std::get<1>(test.param));
}
INSTANTIATE_TEST_SUITE_P(Coordinator, CoordinatorStep,
                         ::testing::Combine(::testing::Values("half_written", "before_sync",
                                                              "saved"),
                                            ::testing::Values(1, 2, 3)),
                         step_name);
// The first save of a process begins a new log.
INSTANTIATE_TEST_SUITE_P(NewLog, CoordinatorStep,
                         ::testing::Combine(::testing::Values("before_rename",
                                                              "before_directory_sync"),
                                            ::testing::Values(1)),
                         step_name);

TEST_P(CoordinatorStep, KilledThereItComesBackWithWhatItPromised) {
  Fleet fleet;
  make_checkpoint(fleet.dir("model"), 2, 256, 5);
  make_checkpoint(fleet.dir("other"), 2, 256, 6);
  bool published = false;
  bool retired = false;
  {
    const auto coordinator =
        doomed({"coordinator", "--listen", "127.0.0.1:0", "--state", fleet.dir("state").string()},
               "coordinator.state." + step() + "@" + std::to_string(save()));
    const std::string address = coordinator->value_after("coordinator listening on ");
    EXPECT_EQ(address.empty(), save() == 1) << coordinator->err();
    const auto command = [&](std::vector<std::string> arguments) {
      arguments.insert(arguments.begin(), REKINDLE_BINARY);
      arguments.insert(arguments.end(), {"--coordinator", address});
      return run(std::move(arguments)).exit.code == 0;
    };
    if (!address.empty()) {
      published = command(
          {"publish", "m@1", fleet.dir("model").string(), "--store", fleet.dir("store").string()});
      retired = published && command({"retire", "m@1", "--everywhere"});
    }
    const auto exit = coordinator->wait();
    ASSERT_TRUE(exit);
    EXPECT_EQ(exit->signal, SIGKILL);
  }
  EXPECT_EQ(published, save() > 2);
  EXPECT_FALSE(retired);
  fleet.start_coordinator();
  const auto other = fleet.run_command(
      {"publish", "m@1", fleet.dir("other").string(), "--store", fleet.dir("store2").string()});
  if (published) {
    EXPECT_EQ(other.exit_code, 7) << "it forgot a version that it had confirmed: " << other.err;
  } else {
    // The claim was lost, or it was made and nobody was told.
    EXPECT_TRUE(other.exit_code == 0 || other.exit_code == 7) << other.err;
  }
  const auto same = fleet.run_command(
      {"publish", "m@1", fleet.dir("model").string(), "--store", fleet.dir("store").string()});
  EXPECT_EQ(same.exit_code, other.exit_code == 0 ? 7 : 0) << same.err;
}

// An agent that is killed, or stopped for an upgrade, while it pulls.
class AgentAway : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Signals, AgentAway, ::testing::Values(SIGKILL, SIGTERM),
                         [](const auto& test) {
                           return std::string(test.param == SIGKILL ? "Killed" : "Upgraded");
                         });

TEST_P(AgentAway, Row52ThePullOfAnAgentThatWentAwayResumesFromItsBitmap) {
  Fleet fleet;
  fleet.start_coordinator();
  make_checkpoint(fleet.dir("model"), 12, 4096, 3);
  fleet.start_agent("a", {"--max-rate", "24MB"});
  fleet.publish("a", "m@1", fleet.dir("model"));
  fleet.start_agent("x");
  const std::vector<std::string> arguments = {"pull", "m@1",     "--transport",
                                              "tcp",  "--store", fleet.agent("x").store.string()};
  {
    Process pull(fleet.command(arguments));
    ASSERT_TRUE(eventually([&] {
      const auto status = fleet.run_command({"status"});
      for (const auto& running : status.json.value("pulls", nlohmann::json::array())) {
        // Tiles verify when the last of their slices is here: so many that some have.
        if (running["bytes_done"] > (32 << 20)) return true;
      }
      return false;
    }));
    fleet.agent("x").process->signal(GetParam());
    const auto gone = fleet.agent("x").process->wait();
    ASSERT_TRUE(gone) << "it did not stop";
    const auto exit = pull.wait();
    ASSERT_TRUE(exit);
    EXPECT_EQ(exit->code, 5) << pull.err();
    EXPECT_THAT(pull.err(), HasSubstr("rekindle pull"));
  }
  fleet.start_agent("x");
  const auto again = fleet.run_command(arguments);
  ASSERT_EQ(again.exit_code, 0) << again.err;
  EXPECT_GT(again.json["resumed_bytes"], 0);
  EXPECT_EQ(again.json["resumed_bytes"].get<std::uint64_t>() +
                again.json["fetched_bytes"].get<std::uint64_t>(),
            again.json["bytes"].get<std::uint64_t>());
  fleet.agent("a").process->kill();
  const auto served = fleet.run_command(
      {"pull", "m@1", "--from", fleet.agent("x").control, "--to", fleet.dir("out").string()});
  ASSERT_EQ(served.exit_code, 0) << served.err;
  EXPECT_EQ(compare_checkpoints(fleet.dir("model"), fleet.dir("out")), "");
}

}  // namespace
}  // namespace rekindle::testing
