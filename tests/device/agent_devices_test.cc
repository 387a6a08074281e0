// An agent with doubles continues to serve after its device process is killed.
#include <csignal>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tests/support/fleet.h"

namespace rekindle::testing {
namespace {

class AgentDevices : public ::testing::Test {
 protected:
  AgentProcess& start(const std::string& gpu, std::vector<std::string> more = {}) {
    fleet_.start_coordinator();
    more.insert(more.end(), {"--gpu", gpu});
    return fleet_.start_agent("a", std::move(more));
  }
  nlohmann::json devices() {
    const auto answer = fleet_.run_command({"status", "--agent", fleet_.agent("a").control});
    return answer.json.is_object() ? answer.json["devices"] : nlohmann::json();
  }
  bool eventually_is(const std::string& state, int restarts) {
    return eventually([&] {
      const auto now = devices();
      return now.is_object() && now["state"] == state && now["restarts"] == restarts;
    });
  }
  Fleet fleet_;
};

TEST_F(AgentDevices, AreHeldServedAndBackAfterTheirProcessWasKilled) {
  auto& agent = start("double:1");
  ASSERT_TRUE(eventually_is("serving", 0)) << devices().dump();
  make_checkpoint(fleet_.dir("m"), 2, 256, 1);
  fleet_.publish("a", "m@1", fleet_.dir("m"));
  const auto all_pinned = [&] {
    const auto now = devices();
    return now["held_bytes"] > 0 && now["pinned_bytes"] == now["held_bytes"];
  };
  ASSERT_TRUE(eventually(all_pinned)) << devices().dump();
  ASSERT_EQ(::kill(devices()["pid"].get<pid_t>(), SIGKILL), 0);
  ASSERT_TRUE(eventually_is("serving", 1)) << devices().dump();
  EXPECT_TRUE(eventually(all_pinned)) << devices().dump();
  EXPECT_TRUE(agent.process->running());
  EXPECT_EQ(fleet_.run_command({"retire", "m@1", "--store", agent.store.string()}).exit_code, 0);
  // Files that the store keeps for the next version stay pinned.
  for (const auto& file : std::filesystem::directory_iterator(agent.store / "pool")) {
    std::filesystem::remove(file.path());
  }
  EXPECT_TRUE(eventually([&] { return devices()["pinned_bytes"] == 0; })) << devices().dump();
  agent.process->signal(SIGTERM);
  const auto exit = agent.process->wait();
  ASSERT_TRUE(exit);
  EXPECT_EQ(exit->code, 0);
}

TEST_F(AgentDevices, TheReserveIsPinnedBeforeAVersionComes) {
  constexpr std::uint64_t kReserve = 64 << 20;
  start("double:1", {"--reserve", "64M"});
  const auto reserve_is_pinned = [&] {
    const auto now = devices();
    return now["held_bytes"] == kReserve && now["pinned_bytes"] == kReserve;
  };
  ASSERT_TRUE(eventually(reserve_is_pinned)) << devices().dump();
  ASSERT_EQ(::kill(devices()["pid"].get<pid_t>(), SIGKILL), 0);
  ASSERT_TRUE(eventually_is("serving", 1)) << devices().dump();
  EXPECT_TRUE(eventually(reserve_is_pinned)) << devices().dump();
}

TEST_F(AgentDevices, GoWithTheirAgentHoweverItEnds) {
  auto& agent = start("double:1");
  ASSERT_TRUE(eventually_is("serving", 0));
  const auto pid = devices()["pid"].get<pid_t>();
  agent.process->kill();
  EXPECT_TRUE(eventually([&] { return ::kill(pid, 0) != 0; }));
}

TEST_F(AgentDevices, WithoutThemTheAgentSaysWhy) {
  start("none");
  EXPECT_EQ(devices()["state"], "off");
  EXPECT_EQ(devices()["problem"], "this agent was started with --gpu none");
}

}  // namespace
}  // namespace rekindle::testing
