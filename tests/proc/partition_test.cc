// Rows 27, 31, 32, 35 and 55 as the fleet's processes live through them: partitions, pauses, clocks
// that jump, everybody at once.
#include <csignal>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/fault_proxy.h"
#include "tests/support/fleet.h"

namespace rekindle::testing {
namespace {

using ::testing::HasSubstr;

std::uint16_t port_of(const std::string& address) {
  return static_cast<std::uint16_t>(std::stoi(address.substr(address.rfind(':') + 1)));
}

class Partition : public ::testing::Test {
 protected:
  void SetUp() override {
    fleet_.start_coordinator();
    link_ = std::make_unique<FaultProxy>(port_of(fleet_.coordinator_address()));
    make_checkpoint(fleet_.dir("model"), 12, 1024, 3);  // 24 MiB
  }

  // Its only way to the coordinator is link_.
  AgentProcess& start_behind_link(const std::string& name, std::vector<std::string> more = {}) {
    more.insert(more.end(), {"--coordinator", link_->address()});
    return fleet_.start_agent(name, std::move(more));
  }

  std::unique_ptr<Process> begin_pull(const std::string& to) {
    auto pull = std::make_unique<Process>(
        fleet_.command({"pull", "m@1", "--to", fleet_.dir(to).string(), "--transport", "tcp"}));
    EXPECT_TRUE(eventually([&] { return fleet_.agent("a").sessions_opened() > 0; }));
    return pull;
  }
  void expect_complete(Process& pull, const std::string& to) {
    const auto exit = pull.wait(milliseconds(60'000));
    ASSERT_TRUE(exit);
    EXPECT_EQ(exit->code, 0) << pull.err();
    EXPECT_EQ(compare_checkpoints(fleet_.dir("model"), fleet_.dir(to)), "");
  }

  std::string state_of(const std::string& name) {
    const auto status = fleet_.run_command({"status"}).json;
    if (!status.is_object() || !status.contains("nodes")) return "unknown";
    for (const auto& node : status["nodes"]) {
      if (node.value("node", "") == name) return node.value("state", "unknown");
    }
    return "absent";
  }
  // By the only pull.
  std::uint64_t bytes_reported() {
    const auto status = fleet_.run_command({"status"}).json;
    if (!status.is_object() || status.value("pulls", nlohmann::json::array()).empty()) return 0;
    return status["pulls"][0].value("bytes_done", std::uint64_t{0});
  }
  bool eventually_state(const std::string& name, const std::string& state) {
    return eventually([&] { return state_of(name) == state; });
  }

  Fleet fleet_;
  std::unique_ptr<FaultProxy> link_;
};

TEST_F(Partition, Row27APullGoesOnWhileItsSourceNoLongerHearsTheCoordinator) {
  start_behind_link("a", {"--max-rate", "6MB"});
  fleet_.publish("a", "m@1", fleet_.dir("model"));
  const auto pull = begin_pull("out");
  link_->stall(true);
  ASSERT_NO_FATAL_FAILURE(expect_complete(*pull, "out"));
  link_->stall(false);
  EXPECT_TRUE(eventually_state("a", "alive"));
  const auto again = fleet_.run_command({"pull", "m@1", "--to", fleet_.dir("again").string()});
  EXPECT_EQ(again.exit_code, 0) << again.err;
}

TEST_F(Partition, Row27ASourceThatIsOnlyCutOffFromTheCoordinatorIsNotTakenForDead) {
  start_behind_link("a", {"--max-rate", "3MB"});
  fleet_.publish("a", "m@1", fleet_.dir("model"));
  const auto pull = begin_pull("out");
  ASSERT_TRUE(eventually([&] { return bytes_reported() > 0; })) << "its puller vouches for it";
  link_->stall(true);
  link_->stall_requests(true);
  ASSERT_TRUE(eventually_state("a", "suspect"));
  while (pull->running()) {
    const std::string state = state_of("a");
    if (!pull->running()) break;
    ASSERT_EQ(state, "suspect");
  }
  ASSERT_NO_FATAL_FAILURE(expect_complete(*pull, "out"));
  link_->stall(false);
  link_->stall_requests(false);
  EXPECT_TRUE(eventually_state("a", "alive"));
}

TEST_F(Partition, Row55AConnectionThatSilentlyStoppedIsFoundByBothEnds) {
  auto& agent = start_behind_link("a");
  fleet_.publish("a", "m@1", fleet_.dir("model"));
  link_->stall(true);
  link_->stall_requests(true);
  EXPECT_TRUE(agent.process->wait_for_err("coordinator.lost")) << agent.process->err();
  EXPECT_TRUE(eventually_state("a", "dead"));
  const auto nobody = fleet_.run_command({"pull", "m@1", "--to", fleet_.dir("out").string()});
  EXPECT_EQ(nobody.exit_code, 3) << nobody.err;
  link_->stall(false);
  link_->stall_requests(false);
  EXPECT_TRUE(eventually_state("a", "alive"));
  EXPECT_TRUE(eventually([&] {
    return fleet_.run_command({"pull", "m@1", "--to", fleet_.dir("out").string()}).exit_code == 0;
  }));
}

TEST_F(Partition, Row31NobodyDiesOfACoordinatorThatWasStoppedForTenSeconds) {
  for (const char* name : {"a", "b", "c"}) fleet_.start_agent(name);
  fleet_.publish("a", "m@1", fleet_.dir("model"));
  fleet_.coordinator().signal(SIGSTOP);
  std::this_thread::sleep_for(10s);
  fleet_.coordinator().signal(SIGCONT);
  // From its first word on: nobody is dead, the version has its holder.
  const auto status = fleet_.run_command({"status"}).json;
  ASSERT_TRUE(status.contains("nodes")) << status;
  ASSERT_EQ(status["nodes"].size(), 3u) << status;
  for (const auto& node : status["nodes"]) EXPECT_NE(node["state"], "dead") << status;
  const auto pulled = fleet_.run_command({"pull", "m@1", "--to", fleet_.dir("out").string()});
  EXPECT_EQ(pulled.exit_code, 0) << pulled.err;
  for (const char* name : {"a", "b", "c"}) EXPECT_TRUE(eventually_state(name, "alive")) << name;
}

TEST_F(Partition, Row32AWallClockThatJumpsByAnHourHasNoEffect) {
  // AddressSanitizer wants to come first, unless it is told that it need not.
  const std::string asan = "verify_asan_link_order=0";
  const std::vector<std::string> jumping = {"env", "LD_PRELOAD=" CLOCK_JUMP,
                                            "ASAN_OPTIONS=" + asan};
  fleet_.start_agent("a", {"--max-rate", "12MB"}, "127.0.0.1:0", jumping);
  fleet_.publish("a", "m@1", fleet_.dir("model"));
  Spawn command =
      fleet_.command({"pull", "m@1", "--to", fleet_.dir("out").string(), "--transport", "tcp"});
  command.env.emplace_back("LD_PRELOAD", CLOCK_JUMP);
  command.env.emplace_back("ASAN_OPTIONS", asan);
  Process pull(std::move(command));
  while (pull.running()) {
    EXPECT_EQ(state_of("a"), "alive");
  }
  ASSERT_NO_FATAL_FAILURE(expect_complete(pull, "out"));
}

TEST_F(Partition, Row35HalfAFleetOfFiftyRestartsAtOnceWhileOthersPull) {
  constexpr int kAgents = 50;
  fleet_.start_agent("a", {"--max-rate", "6MB"});
  fleet_.publish("a", "m@1", fleet_.dir("model"));
  std::vector<std::unique_ptr<Process>> agents;
  const auto start = [&](int number) {
    const std::string name = "n" + std::to_string(number);
    auto& agent = agents.emplace_back(std::make_unique<Process>(
        Spawn{.argv = {REKINDLE_BINARY, "agent", "--node-id", name, "--listen", "127.0.0.1:0",
                       "--store", fleet_.dir("store-" + name).string(), "--coordinator",
                       fleet_.coordinator_address()}}));
    return agent.get();
  };
  for (int i = 0; i < kAgents; ++i) start(i);
  const auto count_alive = [&] {
    const auto status = fleet_.run_command({"status"}).json;
    int alive = 0;
    if (!status.is_object() || !status.contains("nodes")) return alive;
    for (const auto& node : status["nodes"]) alive += node["state"] == "alive" ? 1 : 0;
    return alive;
  };
  ASSERT_TRUE(eventually([&] { return count_alive() == kAgents + 1; }, milliseconds(60'000)));

  const auto pull = begin_pull("out");
  for (int i = 0; i < kAgents / 2; ++i) agents[static_cast<std::size_t>(i)]->signal(SIGKILL);
  // Its store is a dying agent's until it is gone.
  for (int i = 0; i < kAgents / 2; ++i) {
    ASSERT_TRUE(agents[static_cast<std::size_t>(i)]->wait());
  }
  for (int i = 0; i < kAgents / 2; ++i) start(i);
  ASSERT_NO_FATAL_FAILURE(expect_complete(*pull, "out"));
  EXPECT_TRUE(eventually([&] { return count_alive() == kAgents + 1; }, milliseconds(60'000)));
}

}  // namespace
}  // namespace rekindle::testing
