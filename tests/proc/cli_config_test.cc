#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/proc/cluster.h"

// The command line wins, then the environment, then the file.
namespace rekindle::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class CliConfig : public ::testing::Test {
 protected:
  std::string config(std::string_view text) {
    write_file(dir_ / "rekindle.toml", text);
    return dir_ / "rekindle.toml";
  }
  // The store that an agent of these arguments and this REKINDLE_STORE uses.
  std::string store_of(std::vector<std::string> arguments, const std::string& environment) {
    arguments.insert(arguments.begin(), "agent");
    Spawn spawn = rekindle_spawn(std::move(arguments));
    if (!environment.empty()) spawn.env = {{"REKINDLE_STORE", environment}};
    Process agent(std::move(spawn));
    if (agent.value_after("agent listening on ").empty()) return "did not start: " + agent.err();
    for (const char* name : {"line", "env", "file"}) {
      if (std::filesystem::exists(dir_ / name)) return name;
    }
    return "none";
  }
  TempDir dir_;
};

TEST_F(CliConfig, TheFileIsTheLastToBeAsked) {
  const std::string file = config("store = \"" + (dir_ / "file").string() +
                                  "\"\n[agent]\nlisten = \"127.0.0.1:0\"\nnode-id = \"n\"\n");
  EXPECT_EQ(store_of({"--config", file, "--store", dir_ / "line"}, dir_ / "env"), "line");
  std::filesystem::remove_all(dir_ / "line");
  EXPECT_EQ(store_of({"--config", file}, dir_ / "env"), "env");
  std::filesystem::remove_all(dir_ / "env");
  EXPECT_EQ(store_of({"--config", file}, ""), "file");
}

TEST_F(CliConfig, EachDaemonTakesItsSection) {
  const std::string file =
      config("log-level = \"debug\"\n[coordinator]\nlisten = \"127.0.0.1:0\"\nstate = \"" +
             (dir_ / "state").string() + "\"\n[agent]\nlisten = \"256.0.0.1:0\"\n");
  const Daemon coordinator("coordinator", {"--config", file});
  EXPECT_TRUE(std::filesystem::exists(dir_ / "state"));
}

TEST_F(CliConfig, TheEnvironmentNamesAFile) {
  Spawn spawn = rekindle_spawn({"coordinator", "--state", dir_ / "state"});
  spawn.env = {{"REKINDLE_CONFIG", config("[coordinator]\nlisten = \"127.0.0.1:0\"\n")}};
  Process coordinator(std::move(spawn));
  EXPECT_THAT(coordinator.value_after("coordinator listening on "), HasSubstr("127.0.0.1:"));
}

TEST_F(CliConfig, AUnitsStateDirectoryIsTheDefaultOfACoordinator) {
  Spawn spawn = rekindle_spawn({"coordinator", "--listen", "127.0.0.1:0"});
  spawn.env = {{"STATE_DIRECTORY", dir_ / "unit"}};
  Process coordinator(std::move(spawn));
  EXPECT_FALSE(coordinator.value_after("coordinator listening on ").empty());
  EXPECT_TRUE(std::filesystem::exists(dir_ / "unit"));
}

TEST_F(CliConfig, WhatIsUnknownOrWrongIsRefused) {
  struct Case {
    const char* text;
    const char* says;
  };
  for (const Case& bad :
       {Case{"[agent]\nlistn = \"x\"\n", "agent.listn"}, Case{"colour = \"red\"\n", "colour"},
        Case{"[puller]\nlisten = \"x\"\n", "[puller]"},
        Case{"[coordinator]\nnonsense = 1\n", "coordinator.nonsense"},
        Case{"[agent]\nmax-pullers = \"many\"\n", "max-pullers"},
        Case{"quiet = \"maybe\"\n", "quiet"}}) {
    const std::string file = config(bad.text);
    const Finished done = rekindle({"agent", "--config", file, "--store", dir_ / "store"});
    EXPECT_EQ(done.exit.code, 2) << bad.text << done.err;
    EXPECT_THAT(done.err, AllOf(HasSubstr(bad.says), HasSubstr(file)));
  }
  const Finished absent = rekindle({"agent", "--config", dir_ / "absent"});
  EXPECT_EQ(absent.exit.code, 3);
  EXPECT_THAT(absent.err, HasSubstr((dir_ / "absent").string()));
}

}  // namespace
}  // namespace rekindle::testing
