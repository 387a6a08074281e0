#include <csignal>
#include <fstream>
#include <map>

#include <sys/stat.h>
#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/proc/cluster.h"

// The command line wins, then the environment, then the file.
namespace rekindle::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

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
  // By name, as `config show` prints them.
  static std::map<std::string, Json> shown(
      const std::string& daemon, const std::string& file,
      std::vector<std::pair<std::string, std::string>> environment = {}) {
    Spawn spawn = rekindle_spawn({"config", "show", daemon, file, "--json"});
    spawn.env = std::move(environment);
    const Finished done = run(std::move(spawn));
    EXPECT_EQ(done.exit.code, 0) << done.err;
    std::map<std::string, Json> settings;
    const Json json = json_of(done);
    for (const Json& setting : json["settings"]) settings[setting["setting"]] = setting;
    return settings;
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

TEST_F(CliConfig, AVariableOfADaemonIsBeforeTheFile) {
  const std::string file = config("[coordinator]\nlisten = \"127.0.0.1:0\"\nstate = \"" +
                                  (dir_ / "file").string() + "\"\n");
  Spawn spawn = rekindle_spawn({"coordinator", "--config", file});
  spawn.env = {{"REKINDLE_COORDINATOR_STATE", dir_ / "env"},
               {"REKINDLE_COORDINATOR_FROB", "1"},
               {"REKINDLE_COORDINATOR_PORT_7300_TCP", "tcp://10.0.0.1:7300"},
               {"REKINDLE_AGENT_MAX_RATE", "of the other daemon"}};
  Process coordinator(std::move(spawn));
  ASSERT_FALSE(coordinator.value_after("coordinator listening on ").empty()) << coordinator.err();
  EXPECT_TRUE(std::filesystem::exists(dir_ / "env"));
  EXPECT_FALSE(std::filesystem::exists(dir_ / "file"));
  EXPECT_THAT(coordinator.err(),
              HasSubstr("config.unknown_variable variable=REKINDLE_COORDINATOR_FROB"));
  EXPECT_THAT(coordinator.err(), Not(HasSubstr("7300_TCP"))) << "Kubernetes sets it";
}

TEST_F(CliConfig, AWrongVariableIsNamed) {
  Spawn spawn = rekindle_spawn({"agent", "--store", dir_ / "store"});
  spawn.env = {{"REKINDLE_AGENT_MAX_RATE", "fast"}};
  const Finished done = run(std::move(spawn));
  EXPECT_EQ(done.exit.code, 2);
  EXPECT_THAT(done.err, HasSubstr("REKINDLE_AGENT_MAX_RATE: --max-rate: 'fast'"));
}

// An empty name would silently turn off what the file is for.
TEST_F(CliConfig, FilesOfSecurityMustHaveAName) {
  const std::vector<std::string> shared{"secret-file", "tls-cert", "tls-key", "tls-ca", "tls-crl"};
  const std::vector<std::string> own{"rights", "audit", "http-token-file", "etcd-state-key"};
  std::string top;
  std::string section = "[coordinator]\n";
  for (const std::string& name : shared) top += name + " = \"\"\n";
  for (const std::string& name : own) section += name + " = \"\"\n";
  const Finished check = rekindle({"config", "check", config(top + section)});
  EXPECT_EQ(check.exit.code, 1) << check.err;
  const auto refused = [](const std::string& name) {
    return "--" + name + ": it is empty; name the file, or leave the option out";
  };
  for (const auto* names : {&shared, &own}) {
    for (const std::string& name : *names) {
      EXPECT_THAT(check.out, HasSubstr(refused(name)));
      const Finished done = rekindle({"coordinator", "--" + name, ""});
      EXPECT_EQ(done.exit.code, 2) << name;
      EXPECT_THAT(done.err, HasSubstr(refused(name)));
    }
  }
  Spawn spawn = rekindle_spawn({"coordinator"});
  spawn.env = {{"REKINDLE_COORDINATOR_RIGHTS", ""}};
  const Finished done = run(std::move(spawn));
  EXPECT_EQ(done.exit.code, 2);
  EXPECT_THAT(done.err, HasSubstr("REKINDLE_COORDINATOR_RIGHTS: " + refused("rights")));
}

TEST_F(CliConfig, AnEmptyVariableOfAnotherFileCountsAsNotGiven) {
  write_file(dir_ / "topology.json", "{}");
  const std::string file =
      config("[agent]\ntopology = \"" + (dir_ / "topology.json").string() + "\"\n");
  EXPECT_EQ(shown("agent", file, {{"REKINDLE_AGENT_TOPOLOGY", ""}})["topology"]["origin"],
            file + ":2");
}

// It would wait for somebody who writes to the FIFO.
TEST_F(CliConfig, AFifoIsNoFileOfSettings) {
  const std::string fifo = dir_ / "fifo";
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  const std::vector<std::vector<std::string>> starts{
      {"coordinator", "--config", fifo},
      {"coordinator", "--rights", fifo},
      {"coordinator", "--trust-publisher", fifo},
      {"agent", "--topology", fifo},
  };
  for (const auto& words : starts) {
    const Finished done = rekindle(words);
    EXPECT_EQ(done.exit.code, 2) << words[1];
    EXPECT_THAT(done.err, HasSubstr(fifo + " is not a regular file")) << words[1];
  }
}

TEST_F(CliConfig, WhatSaysWhoIsTrustedBelongsToUsAndNobodyElseWritesIt) {
  const std::string file = dir_ / "rights.json";
  write_file(file, R"({"rights": []})");
  ASSERT_EQ(::chmod(file.c_str(), 0646), 0);
  for (const char* option : {"--rights", "--trust-publisher"}) {
    const Finished done = rekindle({"coordinator", option, file});
    EXPECT_EQ(done.exit.code, 7) << option;
    EXPECT_THAT(done.err, HasSubstr("every user can change the file " + file + " (mode 646)"));
  }
  if (::geteuid() != 0) GTEST_SKIP() << "only root gives a file to another user";
  ASSERT_EQ(::chmod(file.c_str(), 0644), 0);
  ASSERT_EQ(::chown(file.c_str(), 12345, 12345), 0);
  EXPECT_THAT(rekindle({"coordinator", "--rights", file}).err,
              HasSubstr("belongs to another user (uid 12345)"));
}

TEST_F(CliConfig, TheKeyOfTheStateIsForEtcd) {
  const std::string file = config("[coordinator]\netcd-state-key = \"/key\"\n");
  const Finished check = rekindle({"config", "check", file});
  EXPECT_EQ(check.exit.code, 1);
  EXPECT_THAT(check.out, AllOf(HasSubstr(":2: --etcd-state-key /key"), HasSubstr("no --etcd")));
}

TEST_F(CliConfig, CheckPrintsEachProblemWithItsLine) {
  const std::string file =
      config("log-level = \"loud\"\nsecret-file = \"" + (dir_ / "none").string() +
             "\"\n[coordinator]\nlisten = \"7300\"\nstate = \"/s\"\netcd = \"http://e:1\"\n"
             "dead-after = \"1ms\"\n[agent]\nfrob = 1\n\nmax-rate = \"fast\"\ntopology = \"" +
             (dir_ / "topology").string() + "\"\n");
  const Finished done = rekindle({"config", "check", file});
  EXPECT_EQ(done.exit.code, 1) << done.err;
  for (const char* says :
       {":1: ", ":2: --secret-file", ":4: --listen: '7300'", ":5: --state and --etcd",
        ":7: --heartbeat 250 ms", ":9: unknown setting 'agent.frob'", ":11: --max-rate: 'fast'",
        ":12: --topology"}) {
    EXPECT_THAT(done.out, HasSubstr(says));
  }
  EXPECT_EQ(std::ranges::count(done.out, '\n'), 8) << done.out;
  const Finished one = rekindle({"config", "check", file, "--daemon", "agent", "--json"});
  EXPECT_EQ(one.exit.code, 1);
  EXPECT_EQ(json_of(one)["problems"].size(), 5u) << one.out;
  EXPECT_FALSE(std::filesystem::exists("/s"));
}

TEST_F(CliConfig, CheckAcceptsWhatTheDaemonsAccept) {
  const std::string file = config("[agent]\nmax-rate = \"1GB\"\n[coordinator]\nreplicas = 2\n");
  EXPECT_EQ(rekindle({"config", "check", file}).exit.code, 0);
  EXPECT_EQ(rekindle({"config", "check"}).exit.code, 2);
  EXPECT_EQ(rekindle({"config", "check", dir_ / "absent"}).exit.code, 1);
}

TEST_F(CliConfig, AKeyOfASectionWinsOverTheTopLevel) {
  const std::string file = config("log-level = \"debug\"\n[agent]\nlog-level = \"warn\"\n");
  EXPECT_EQ(shown("agent", file)["log-level"]["value"], "warn");
  EXPECT_EQ(shown("agent", file)["log-level"]["origin"], file + ":3");
  EXPECT_EQ(shown("coordinator", file)["log-level"]["value"], "debug");
  const Finished done = rekindle({"config", "check", file});
  EXPECT_EQ(done.exit.code, 0) << done.out;
  EXPECT_THAT(done.out, AllOf(HasSubstr(file + ":1: 'log-level' has no effect on the agent"),
                              HasSubstr(file + ":3 sets it in [agent]")));
}

TEST_F(CliConfig, AKeyThatIsGivenTwiceIsRefused) {
  for (const char* text : {"log-level = \"debug\"\nlog-level = \"warn\"\n",
                           "log-level = \"debug\"\njson = true\nlog-level = \"warn\"\n",
                           "[agent]\nmax-rate = \"1GB\"\nmax-pullers = 3\nmax-rate = \"2GB\"\n"}) {
    const std::string file = config(text);
    const Finished done = rekindle({"config", "check", file});
    EXPECT_EQ(done.exit.code, 1) << text << done.out;
    EXPECT_THAT(done.out, AllOf(HasSubstr("is given again at " + file + ":"),
                                HasSubstr("keep one of them"), Not(HasSubstr("has no effect"))));
    EXPECT_EQ(std::ranges::count(done.out, '\n'), 1) << done.out;
  }
}

TEST_F(CliConfig, AKeyWithoutAnEffectIsCheckedToo) {
  const std::string file = config(
      "log-level = \"loud\"\nmax-rate = \"fast\"\n[agent]\nlog-level = \"warn\"\nmax-rate = "
      "\"1GB\"\n[coordinator]\nlog-level = \"warn\"\n");
  const Finished done = rekindle({"config", "check", file});
  EXPECT_EQ(done.exit.code, 1);
  EXPECT_THAT(done.out,
              AllOf(HasSubstr(":1: "), HasSubstr("loud"), HasSubstr(":2: --max-rate: 'fast'")));
  EXPECT_EQ(rekindle({"agent", "--config", file}).exit.code, 2);
}

TEST_F(CliConfig, ASwitchIsWrittenAsInOtherTools) {
  const std::string file = config("[agent]\nallow-drills = \"YES\"\nverify-gpu = 1\n");
  EXPECT_EQ(shown("agent", file)["allow-drills"]["value"], "true");
  EXPECT_EQ(shown("agent", file)["verify-gpu"]["value"], "true");
  for (const char* off : {"0", "no", "Off", "FALSE"}) {
    const auto setting =
        shown("agent", file, {{"REKINDLE_AGENT_ALLOW_DRILLS", off}})["allow-drills"];
    EXPECT_EQ(setting["value"], "false") << off;
    EXPECT_EQ(setting["origin"], "REKINDLE_AGENT_ALLOW_DRILLS");
  }
  for (const char* on : {"1", "Yes", "on", "True"}) {
    const std::string none = config("");
    EXPECT_EQ(shown("agent", none, {{"REKINDLE_AGENT_ALLOW_DRILLS", on}})["allow-drills"]["value"],
              "true")
        << on;
  }
  const Finished wrong = rekindle({"config", "check", config("[agent]\nallow-drills = 2\n")});
  EXPECT_EQ(wrong.exit.code, 1);
  EXPECT_THAT(wrong.out, HasSubstr("--allow-drills '2': write true or false"));
}

TEST_F(CliConfig, ShowNamesTheOriginOfEachSetting) {
  const std::string file = config("[agent]\n\nmax-rate = \"1GB\"\nmax-pullers = 3\n");
  auto settings = shown("agent", file, {{"REKINDLE_AGENT_MAX_PULLERS", "7"}});
  EXPECT_EQ(settings["max-rate"]["origin"], file + ":3");
  EXPECT_EQ(settings["max-rate"]["value"], "1GB");
  EXPECT_EQ(settings["max-pullers"]["origin"], "REKINDLE_AGENT_MAX_PULLERS");
  EXPECT_EQ(settings["max-pullers"]["value"], "7");
  EXPECT_EQ(settings["scrub"]["origin"], "default");
  EXPECT_EQ(settings["scrub"]["value"], "24h");
}

class Reload : public CliConfig {
 protected:
  // Starts a coordinator, and sends it SIGHUP after the file has changed.
  void start(const std::string& settings) {
    write(settings);
    coordinator_ = std::make_unique<Daemon>(
        "coordinator", std::vector<std::string>{"--config", dir_ / "rekindle.toml", "--listen",
                                                "127.0.0.1:0", "--state", dir_ / "state"});
  }
  void write(const std::string& settings) { config("[coordinator]\n" + settings); }
  bool says_after_hangup(const std::string& text) {
    coordinator_->process().signal(SIGHUP);
    return coordinator_->process().wait_for_err(text);
  }
  Json version() {
    const Json json =
        json_of(rekindle({"status", "--json", "--coordinator", coordinator_->address()}));
    return json["versions"][0];
  }
  std::unique_ptr<Daemon> coordinator_;
};

TEST_F(Reload, ACoordinatorTakesNewLimits) {
  start("replicas = 0\n");
  const auto agent = start_agent("a", dir_ / "a", coordinator_->address());
  write_safetensors(dir_ / "in/model.safetensors", {{"w", DType::kBF16, {8, 8}}}, 3);
  ASSERT_EQ(rekindle({"publish", "m@1", dir_ / "in", "--store", dir_ / "a"}).exit.code, 0);
  ASSERT_TRUE(eventually([&] { return version()["replicas"] == 0; })) << version();
  write("replicas = 3\n");
  ASSERT_TRUE(says_after_hangup("config.reloaded"));
  EXPECT_TRUE(eventually([&] { return version()["replicas"] == 3; })) << version();
  EXPECT_THAT(coordinator_->process().err(),
              HasSubstr("config.changed setting=replicas value=3 before=0"));
}

TEST_F(Reload, AWrongFileChangesNothing) {
  start("replicas = 0\n");
  write("replicas = 3\nfrob = 1\n");
  ASSERT_TRUE(says_after_hangup("config.refused"));
  EXPECT_THAT(coordinator_->process().err(),
              AllOf(HasSubstr("rekindle.toml:3: unknown setting 'coordinator.frob'"),
                    Not(HasSubstr("config.changed"))));
  write("replicas = 3\n");
  EXPECT_TRUE(says_after_hangup("config.changed setting=replicas value=3 before=0"));
}

// The setting itself needs a restart, and the log says so.
TEST_F(Reload, RightsHoldUntilARestartWithoutThem) {
  const auto file_for = [&](const std::string& name, const std::string& verb) {
    std::ofstream(dir_ / name) << R"({"rights": [{"principals": ["unproven"], "verbs": [")" << verb
                               << "\"]}]}";
    return "rights = \"" + (dir_ / name).string() + "\"\n";
  };
  const auto drains = [&] {
    return rekindle({"drain", "nobody", "--coordinator", coordinator_->address()}).exit.code;
  };
  start(file_for("first.json", "read"));
  EXPECT_EQ(drains(), 7);
  write("replicas = 1\n");
  ASSERT_TRUE(says_after_hangup("setting=replicas value=1"));
  ASSERT_TRUE(coordinator_->process().wait_for_err("config.reloaded"));
  EXPECT_THAT(coordinator_->process().err(), HasSubstr("config.needs_restart setting=rights"));
  EXPECT_EQ(drains(), 7) << "no file";
  write(file_for("second.json", "drain") + "replicas = 2\n");
  ASSERT_TRUE(says_after_hangup("setting=replicas value=2"));
  EXPECT_EQ(drains(), 7) << "another file";
  (void)file_for("first.json", "drain");
  write("replicas = 3\n");
  ASSERT_TRUE(says_after_hangup("setting=replicas value=3"));
  EXPECT_TRUE(eventually([&] { return drains() != 7; })) << "its own file changed";
}

TEST_F(Reload, TheCommandLineStillWins) {
  start("heartbeat = \"250ms\"\n");
  write("heartbeat = \"300ms\"\nlisten = \"127.0.0.1:1\"\n");
  ASSERT_TRUE(says_after_hangup("config.reloaded"));
  EXPECT_THAT(coordinator_->process().err(),
              AllOf(HasSubstr("config.needs_restart setting=heartbeat value=300ms running=250ms"),
                    Not(HasSubstr("setting=listen"))));
}

// At `warn` the last line of a reload would not appear.
TEST_F(Reload, AnAgentTakesANewLogLevel) {
  const std::string file = config("log-level = \"warn\"\n");
  Spawn spawn = rekindle_spawn(
      {"agent", "--config", file, "--listen", "127.0.0.1:0", "--store", dir_ / "store"});
  Process agent(std::move(spawn));
  ASSERT_FALSE(agent.value_after("agent listening on ").empty()) << agent.err();
  config("log-level = \"info\"\n[agent]\nmax-pullers = 5\nscrub = \"off\"\n");
  agent.signal(SIGHUP);
  EXPECT_TRUE(agent.wait_for_err("config.reloaded")) << agent.err();
  EXPECT_TRUE(agent.running());
}

}  // namespace
}  // namespace rekindle::testing
