// A host whose budget has room for one copy only moves on to a newer version. Real agents.
#include <filesystem>

#include <gmock/gmock.h>

#include "tests/proc/worker_fixture.h"

namespace rekindle::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int kMatrices = 4;  // of 1 MiB

class MakeRoom : public WithWorkers {
 protected:
  void SetUp() override {
    for (int version = 1; version <= 3; ++version) {
      bytes_ = make_checkpoint(model(version), kMatrices, 512, static_cast<std::uint64_t>(version));
    }
  }
  std::filesystem::path model(int version) { return fleet_.dir("model" + std::to_string(version)); }
  static std::string name(int version) { return "m@" + std::to_string(version); }
  // Room for so many half copies.
  std::vector<std::string> budget(std::uint64_t halves) const {
    return {"--budget", std::to_string(bytes_ * halves / 2)};
  }
  void publish(const std::string& agent, int version) {
    fleet_.publish(agent, name(version), model(version));
  }
  Fleet::Answer pull(const std::string& agent, int version, std::vector<std::string> more = {}) {
    std::vector<std::string> arguments{"pull", name(version), "--store",
                                       fleet_.agent(agent).store.string()};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return fleet_.run_command(std::move(arguments));
  }
  // a has m@1 and room for all; b has room for one, and m@1.
  void start_two_hosts() {
    fleet_.start_coordinator();
    fleet_.start_agent("a");
    fleet_.start_agent("b", budget(3));
    publish("a", 1);
    const auto first = pull("b", 1);
    ASSERT_EQ(first.exit_code, 0) << first.err;
  }
  // The directories of versions with a committed copy.
  std::vector<std::string> held_by(const std::string& agent) {
    std::vector<std::string> held;
    for (int version = 1; version <= 3; ++version) {
      const auto directory = fleet_.agent(agent).store / "models" / name(version);
      if (!std::filesystem::exists(directory)) continue;
      find_file(directory, "rekindle.manifest");
      held.push_back(name(version));
    }
    return held;
  }
  void expect_right(const std::string& agent, int version) {
    const auto copy =
        find_file(fleet_.agent(agent).store / "models" / name(version), "rekindle.manifest")
            .parent_path();
    EXPECT_EQ(fleet_.run_command({"verify", copy.string()}).exit_code, 0);
    EXPECT_EQ(compare_checkpoints(model(version), copy), "");
  }
  bool let_go(const std::string& agent) {
    return fleet_.agent(agent).process->err().find("version.let_go") != std::string::npos;
  }

  std::uint64_t bytes_ = 0;  // of one copy, without its header
};

TEST_F(MakeRoom, AHostWithRoomForOneCopyMovesOnToANewerVersion) {
  ASSERT_NO_FATAL_FAILURE(start_two_hosts());
  publish("a", 2);
  const auto second = pull("b", 2);
  ASSERT_EQ(second.exit_code, 0) << second.err;
  EXPECT_THAT(held_by("b"), ElementsAre("m@2"));
  EXPECT_THAT(held_by("a"), ElementsAre("m@1", "m@2"));
  expect_right("b", 2);
  EXPECT_TRUE(let_go("b")) << fleet_.agent("b").process->err();
  const auto back = pull("b", 1);
  EXPECT_NE(back.exit_code, 0) << "nothing newer goes for an older one";
  EXPECT_THAT(held_by("b"), ElementsAre("m@2"));
}

TEST_F(MakeRoom, WhatAKilledPullOfAnOlderVersionHasLeftIsRoom) {
  fleet_.start_coordinator();
  fleet_.start_agent("a");
  publish("a", 1);
  const auto store = fleet_.dir("store-b");
  Spawn killed = fleet_.command({"pull", name(1), "--store", store.string()});
  killed.env = {{"REKINDLE_FAILPOINTS", "store.commit.start=kill"}};
  ASSERT_EQ(run(std::move(killed)).exit.signal, SIGKILL);
  find_file(store / "models" / name(1), "rekindle.resume");
  ASSERT_EQ(fleet_.start_agent("b", budget(3)).store, store);
  publish("a", 2);
  const auto second = pull("b", 2);
  ASSERT_EQ(second.exit_code, 0) << second.err;
  expect_right("b", 2);
  EXPECT_FALSE(std::filesystem::exists(store / "models" / name(1)));
}

TEST_F(MakeRoom, OnlyAsManyGoAsAreNeededTheOldestFirst) {
  fleet_.start_coordinator();
  fleet_.start_agent("a");
  fleet_.start_agent("b", budget(5));
  for (int version = 1; version <= 3; ++version) {
    publish("a", version);
    const auto pulled = pull("b", version);
    ASSERT_EQ(pulled.exit_code, 0) << pulled.err;
  }
  EXPECT_THAT(held_by("b"), ElementsAre("m@2", "m@3"));
  expect_right("b", 3);
}

TEST_F(MakeRoom, AVersionThatAWorkerUsesStays) {
  ASSERT_NO_FATAL_FAILURE(start_two_hosts());
  const auto attached = worker("b", {}, {{"REKINDLE_MODEL", "m@1"}});
  ASSERT_EQ(sum_of(*attached).size(), 32u) << attached->out() << attached->err();
  publish("a", 2);
  const auto refused = pull("b", 2);
  EXPECT_NE(refused.exit_code, 0);
  EXPECT_THAT(refused.err, AllOf(HasSubstr("are missing"),
                                 HasSubstr("m@1 must stay on b: 1 worker session there uses it")));
  EXPECT_THAT(held_by("b"), ElementsAre("m@1"));
  expect_right("b", 1);
  attached->kill();
  EXPECT_TRUE(eventually([&] { return pull("b", 2).exit_code == 0; }));
  EXPECT_THAT(held_by("b"), ElementsAre("m@2"));
}

TEST_F(MakeRoom, TheLastCopyInTheFleetStays) {
  fleet_.start_coordinator();
  fleet_.start_agent("a");
  fleet_.start_agent("b", budget(3));
  publish("b", 1);
  publish("a", 2);
  const auto refused = pull("b", 2);
  EXPECT_NE(refused.exit_code, 0);
  EXPECT_THAT(refused.err, AllOf(HasSubstr("are missing"),
                                 HasSubstr("m@1 must stay on b: it is the last copy")));
  EXPECT_THAT(held_by("b"), ElementsAre("m@1"));
  EXPECT_FALSE(let_go("b"));
}

TEST_F(MakeRoom, WithoutACoordinatorNothingGoes) {
  fleet_.start_agent("a");
  fleet_.start_agent("b", budget(3));
  publish("a", 1);
  publish("a", 2);
  const std::vector<std::string> from{"--from", fleet_.agent("a").control};
  ASSERT_EQ(pull("b", 1, from).exit_code, 0);
  const auto refused = pull("b", 2, from);
  EXPECT_NE(refused.exit_code, 0);
  EXPECT_THAT(refused.err, HasSubstr("retire it by hand"));
  EXPECT_THAT(held_by("b"), ElementsAre("m@1"));
}

TEST_F(MakeRoom, WhoReadsTheOldCopyEndsWithTheRightBytes) {
  fleet_.start_coordinator();
  fleet_.start_agent("a", {"--max-rate", "2MB"});
  std::vector<std::string> options = budget(3);
  options.insert(options.end(), {"--max-rate", "500KB"});
  fleet_.start_agent("b", options);
  fleet_.start_agent("c");
  publish("a", 1);
  ASSERT_EQ(pull("b", 1).exit_code, 0);
  publish("a", 2);
  Process reader(fleet_.command(
      {"pull", "m@1", "--transport", "tcp", "--store", fleet_.agent("c").store.string()}));
  ASSERT_TRUE(fleet_.agent("b").process->wait_for_err("session.open"));
  const auto second = pull("b", 2);
  EXPECT_EQ(second.exit_code, 0) << second.err;
  EXPECT_THAT(held_by("b"), ElementsAre("m@2"));
  const auto exit = reader.wait(60'000ms);
  ASSERT_TRUE(exit.has_value());
  EXPECT_EQ(exit->code, 0) << reader.err();
  expect_right("c", 1);
}

// The budget lacks only the header, so that the coordinator takes b for one that has room.
TEST_F(MakeRoom, ACopyThatTheCoordinatorWantsMadePushesNothingOut) {
  fleet_.start_coordinator();
  fleet_.start_agent("a");
  fleet_.start_agent("b");
  publish("a", 1);
  ASSERT_EQ(pull("b", 1).exit_code, 0);
  const auto held = status("b")["store_bytes"].get<std::uint64_t>();
  const auto fleet = fleet_.run_command({"status"});
  const auto checkpoint = fleet.json["versions"][0]["checkpoint_bytes"].get<std::uint64_t>();
  fleet_.agent("b").process->kill();
  fleet_.start_agent(
      "b", {"--failure-domain", "elsewhere", "--budget", std::to_string(held + checkpoint)});
  const auto published = fleet_.run_command({"publish", "m@2", model(2).string(), "--replicas", "2",
                                             "--store", fleet_.agent("a").store.string()});
  ASSERT_EQ(published.exit_code, 0) << published.err;
  ASSERT_TRUE(fleet_.agent("b").process->wait_for_err("replica.failed", 60'000ms))
      << fleet_.agent("b").process->err();
  EXPECT_THAT(held_by("b"), ElementsAre("m@1"));
  EXPECT_THAT(fleet_.agent("b").process->err(),
              AllOf(HasSubstr("are missing"), Not(HasSubstr("version.let_go"))));
}

}  // namespace
}  // namespace rekindle::testing
