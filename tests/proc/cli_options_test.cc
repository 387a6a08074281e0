#include <ostream>
#include <set>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "src/base/unique_fd.h"
#include "tests/proc/cluster.h"

// Every option does what its help says, or says what is wrong with it; every report is JSON when
// asked for.
namespace rekindle::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

MATCHER(IsOneLine, "is one line") {
  return !arg.empty() && arg.back() == '\n' && std::ranges::count(arg, '\n') == 1;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    lines.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}

const std::vector<std::vector<std::string>> kCommands = {{"coordinator"},
                                                         {"agent"},
                                                         {"publish"},
                                                         {"pull"},
                                                         {"status"},
                                                         {"inspect"},
                                                         {"verify"},
                                                         {"retire"},
                                                         {"bench"},
                                                         {"bench", "transfer"},
                                                         {"bench", "fleet"},
                                                         {"topo"},
                                                         {"doctor"},
                                                         {"drain"},
                                                         {"whoami"},
                                                         {"auth", "check"},
                                                         {"audit", "verify"},
                                                         {"drill", "kill"},
                                                         {"drill", "kill-agent"},
                                                         {"drill", "kill-source"},
                                                         {"drill", "freeze"},
                                                         {"drill", "cut-link"},
                                                         {"drill", "leader"},
                                                         {"run"},
                                                         {"wait-ready"},
                                                         {"artifacts", "publish"},
                                                         {"artifacts", "fetch"},
                                                         {"artifacts", "list"},
                                                         {"artifacts", "remove"},
                                                         {"events"},
                                                         {"top"},
                                                         {"support-bundle"},
                                                         {"version"},
                                                         {"completion", "bash"},
                                                         {"config", "example"},
                                                         {"config", "check"},
                                                         {"config", "show"},
                                                         {"certs", "init"},
                                                         {"certs", "issue"},
                                                         {"certs", "rotate"},
                                                         {"certs", "revoke"},
                                                         {"certs", "list"},
                                                         {"update"}};

std::string help_of(std::vector<std::string> command) {
  command.emplace_back("--help");
  return rekindle(std::move(command)).out;
}

// The long names in a help text, "-n,--dry-run" included.
std::set<std::string> options_in(const std::string& help) {
  std::set<std::string> names;
  for (const std::string& line : lines_of(help)) {
    if (!line.starts_with("  -")) continue;
    const auto at = line.find("--");
    if (at == std::string::npos) continue;
    names.insert(line.substr(at, line.find_first_of(" :[", at) - at));
  }
  return names;
}

TEST(CliOptions, TheExampleOfAConfigurationFileExplainsEveryKeyAndSetsNone) {
  const std::string example = rekindle({"config", "example"}).out;
  const auto agent = example.find("\n[agent]\n");
  const auto coordinator = example.find("\n[coordinator]\n");
  ASSERT_LT(coordinator, agent);
  EXPECT_THAT(example.substr(0, coordinator), HasSubstr("\n#coordinator = \"HOST:PORT\"\n"));
  EXPECT_THAT(example.substr(coordinator, agent - coordinator), HasSubstr("\n#recopy-rate = "));
  for (const char* daemon : {"agent", "coordinator"}) {
    for (const std::string& option : options_in(help_of({daemon}))) {
      if (option == "--config" || option == "--help" || option == "--version") continue;
      EXPECT_THAT(example, HasSubstr("\n#" + option.substr(2) + " = ")) << daemon;
      std::string variable = "REKINDLE_" + std::string(daemon) + "_" + option.substr(2);
      for (char& c : variable) c = c == '-' ? '_' : static_cast<char>(std::toupper(c));
      if (!options_in(help_of({"version"})).contains(option)) {
        EXPECT_THAT(example, HasSubstr("# Environment: " + variable + "."));
      }
    }
  }
  for (const std::string& line : lines_of(example)) {
    EXPECT_TRUE(line.empty() || line.front() == '#' || line.front() == '[') << line;
  }
  const TempDir dir;
  write_file(dir / "rekindle.toml", example);
  const Daemon started("coordinator", {"--config", dir / "rekindle.toml", "--listen", "127.0.0.1:0",
                                       "--state", dir / "state"});
}

// The page of the configuration: `--name` for each setting of the section, and the list of those
// that SIGHUP applies.
TEST(CliOptions, TheReferenceHasEachSettingOfTheDaemons) {
  const std::string page = read_file(CONFIG_PAGE);
  const auto section = [&](const std::string& title) {
    const auto begin = page.find("\n## " + title);
    return begin == std::string::npos ? ""
                                      : page.substr(begin, page.find("\n## ", begin + 1) - begin);
  };
  const std::string reload = section("SIGHUP");
  std::size_t settings = 0;
  for (const std::string daemon : {"agent", "coordinator"}) {
    const Json shown = json_of(rekindle({"config", "show", daemon, "--json"}));
    const std::string own =
        section((daemon == "agent" ? "Settings of an " : "Settings of a ") + daemon);
    for (const Json& setting : shown["settings"]) {
      const std::string name = "`--" + setting["setting"].get<std::string>();
      const std::string places = section("Environment") + own;
      EXPECT_TRUE(places.find(name + "`") != std::string::npos ||
                  places.find(name + " ") != std::string::npos)
          << daemon << " " << name;
      EXPECT_EQ(reload.find(name + "` |") != std::string::npos ||
                    reload.find(name + "` of the " + daemon) != std::string::npos,
                setting["reload"].get<bool>())
          << daemon << " " << name;
      ++settings;
    }
  }
  EXPECT_GT(settings, 40u);
}

TEST(CliOptions, TheHelpOfEachCommandIsComplete) {
  for (const auto& command : kCommands) {
    const std::string help = help_of(command);
    EXPECT_THAT(help, AllOf(HasSubstr("Exit codes:"), HasSubstr("REKINDLE_STORE"),
                            HasSubstr("--log-format"), HasSubstr("--coordinator")))
        << command.front();
    for (const std::string& line : lines_of(help)) EXPECT_LE(line.size(), 130u) << line;
  }
}

TEST(CliOptions, CompletionKnowsEachOptionOfEachHelp) {
  std::string script =
      "source <(\"$1\" completion bash) || exit 9\n"
      "try() { COMP_WORDS=(\"$@\"); COMP_CWORD=$(($# - 1)); _rekindle 2>/dev/null;"
      " echo \"${COMPREPLY[*]}\"; }\n";
  std::vector<std::string> expected;
  for (const auto& command : kCommands) {
    for (const std::string& option : options_in(help_of(command))) {
      std::string words = "try rekindle";
      for (const std::string& word : command) words += " " + word;
      script += words + " " + option + "\n";
      expected.push_back(option);
    }
  }
  const Finished done = run({"bash", "-c", script, "bash", rekindle_binary()});
  EXPECT_EQ(done.exit.code, 0) << done.err;
  const auto offered = lines_of(done.out);
  ASSERT_EQ(offered.size(), expected.size());
  EXPECT_GT(expected.size(), 100u);
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_THAT(" " + offered[i] + " ", HasSubstr(" " + expected[i] + " "));
  }
}

// A hyphen is an escape in roff.
TEST(CliOptions, ManualPagesKnowEachOptionOfEachHelp) {
  std::size_t options = 0;
  for (const auto& command : kCommands) {
    std::string page = rekindle({"man", "--command", command.front()}).out;
    std::erase(page, '\\');
    for (const std::string& option : options_in(help_of(command))) {
      EXPECT_THAT(page, HasSubstr("fB" + option + "fR")) << command.front();
      ++options;
    }
  }
  EXPECT_GT(options, 100u);
}

struct BadOption {
  const char* name;
  std::vector<std::string> arguments;
  const char* says;
  friend void PrintTo(const BadOption& what, std::ostream* out) { *out << what.name; }
};

class BadOptions : public ::testing::TestWithParam<BadOption> {};

TEST_P(BadOptions, AreNamedInOneLineBeforeAnythingRuns) {
  const TempDir dir;
  std::vector<std::string> arguments = GetParam().arguments;
  arguments.insert(arguments.end(), {"--store", dir / "store"});
  const Finished plain = rekindle(arguments);
  EXPECT_EQ(plain.exit.code, 2) << plain.err;
  EXPECT_THAT(plain.err, AllOf(IsOneLine(), StartsWith("rekindle"), HasSubstr(GetParam().says)));
  EXPECT_FALSE(fs::exists(dir / "store"));
  arguments.emplace_back("--json");
  const Finished json = rekindle(arguments);
  EXPECT_EQ(json.exit.code, 2);
  EXPECT_EQ(json.err, plain.err);
  ASSERT_TRUE(json_of(json).is_object()) << json.out;
  EXPECT_EQ(json_of(json)["error"]["code"], "INVALID");
}

INSTANTIATE_TEST_SUITE_P(
    All, BadOptions,
    ::testing::Values(
        BadOption{"Command", {"frob"}, "'frob'"}, BadOption{"Option", {"pull", "--frob"}, "--frob"},
        BadOption{"Coordinator", {"pull", "m", "--coordinator", "foo"}, "--coordinator: 'foo'"},
        BadOption{"From", {"pull", "m", "--from", "10.0.0.3"}, "--from: '10.0.0.3'"},
        BadOption{"FromPort", {"pull", "m", "--from", "h:1,h:99999"}, "--from: 'h:99999'"},
        BadOption{"EmptySpec", {"pull", "m", "--shard", "tp=0/2", "--spec", "/dev/null"}, "--spec"},
        BadOption{"Agent", {"status", "--agent", "[::1]"}, "--agent: '[::1]'"},
        BadOption{"Interval", {"status", "--watch", "--interval", "0s"}, "--interval"},
        BadOption{"Gather", {"update", "m@1", "--gather", "0s"}, "--gather"},
        BadOption{"GatherForHours", {"update", "m@1", "--gather", "11min"}, "--gather"},
        BadOption{"UpdateTimeout", {"update", "m@1", "--timeout", "long"}, "--timeout"},
        BadOption{"AgentListen", {"agent", "--listen", "7400"}, "--listen: '7400'"},
        BadOption{"DataListen", {"agent", "--data-listen", "x"}, "--data-listen: 'x'"},
        BadOption{"DataAdvertise", {"agent", "--data-advertise", "x"}, "--data-advertise: 'x'"},
        BadOption{"Advertise", {"agent", "--advertise", "10.0.0.3:7400"}, "--advertise"},
        BadOption{"NodeId", {"agent", "--node-id", "a b"}, "--node-id 'a b'"},
        BadOption{"LongNodeId", {"agent", "--node-id", std::string(256, 'n')}, "--node-id"},
        BadOption{"NoPullers", {"agent", "--max-pullers", "0"}, "--max-pullers"},
        BadOption{"NoSuchCongestion",
                  {"agent", "--tcp-congestion", "carrier-pigeon"},
                  "--tcp-congestion"},
        BadOption{"NoSuchHugePages", {"agent", "--huge-pages", "some"}, "--huge-pages"},
        BadOption{"BadReserve", {"agent", "--reserve", "much"}, "--reserve"},
        BadOption{"NegativePullers", {"agent", "--max-pullers", "-1"}, "--max-pullers"},
        BadOption{"NoBudget", {"agent", "--budget", "0"}, "--budget"},
        BadOption{"Numa", {"agent", "--numa", "near"}, "--numa: 'near'"},
        BadOption{"NumaNode", {"agent", "--numa", "4095"}, "--numa: NUMA node 4095"},
        BadOption{"GpuHelpers", {"agent", "--gpu-helpers", "many"}, "--gpu-helpers: 'many'"},
        BadOption{"MaxRate", {"agent", "--max-rate", "fast"}, "--max-rate"},
        BadOption{"CoordinatorListen", {"coordinator", "--listen", ":1"}, "--listen: ':1'"},
        BadOption{"CoordinatorPullers", {"coordinator", "--max-pullers", "0"}, "--max-pullers"},
        BadOption{"Suspect", {"coordinator", "--suspect-after", "now"}, "--suspect-after"},
        BadOption{"Block", {"bench", "transfer", "--block", "many"}, "--block"},
        BadOption{"Streams", {"bench", "transfer", "--streams", "-1"}, "streams"},
        BadOption{"Hca", {"topo", "--hca", "mlx5_0:x"}, "--hca: 'mlx5_0:x': 'x' is no port"},
        BadOption{"GidIndex", {"topo", "--gid-index", "256"}, "--gid-index"},
        BadOption{
            "Topology", {"topo", "--topology", "/etc/passwd"}, "/etc/passwd: not JSON at line 1"}),
    [](const auto& test) { return test.param.name; });

class CliReports : public ::testing::Test {
 protected:
  void SetUp() override {
    coordinator_ = start_coordinator(dir_ / "state");
    agent_ = start_agent("a", dir_ / "a", coordinator_->address());
    write_safetensors(dir_ / "in/model.safetensors",
                      {{"w", DType::kBF16, {512, 1024}}, {"x", DType::kF32, {7}}}, 3);
    write_file(dir_ / "in/config.json", "{\"model_type\": \"none\"}");
  }
  Json report(std::vector<std::string> arguments, int code = 0) {
    arguments.emplace_back("--json");
    const Finished done = rekindle(arguments);
    EXPECT_EQ(done.exit.code, code) << arguments.front() << ": " << done.err;
    EXPECT_EQ(std::ranges::count(done.out, '\n'), 1) << done.out;
    const Json json = json_of(done);
    EXPECT_TRUE(json.is_object()) << arguments.front() << ": " << done.out;
    return json;
  }
  TempDir dir_;
  std::unique_ptr<Daemon> coordinator_, agent_;
};

TEST(CliOptions, TokensWithoutACertificateAreRefused) {
  const TempDir dir;
  write_file(dir / "token", "the token of a prometheus");
  fs::permissions(dir / "token", fs::perms(0600));
  for (const char* const daemon : {"agent", "coordinator"}) {
    const Finished done = rekindle({daemon, "--store", dir / "store", "--metrics", "127.0.0.1:0",
                                    "--http-token-file", dir / "token"});
    EXPECT_EQ(done.exit.code, 2) << daemon;
    EXPECT_THAT(done.err,
                AllOf(IsOneLine(), HasSubstr("--http-token-file " + (dir / "token").string()),
                      HasSubstr("--tls-cert")));
  }
}

TEST(CliOptions, AStoreThatCannotBeReadIsNamed) {
  const TempDir dir;
  // Root may read every directory, but nobody follows this link.
  fs::create_symlink("loop", dir / "loop");
  const Finished done = rekindle({"whoami", "--store", dir / "loop"});
  EXPECT_EQ(done.exit.code, 7) << done.err;
  EXPECT_THAT(done.err, AllOf(IsOneLine(), HasSubstr((dir / "loop").string()), HasSubstr("--store"),
                              HasSubstr("symbolic links")));
}

TEST_F(CliReports, AllOfThemAreOneJsonDocument) {
  const std::string cluster = coordinator_->address();
  EXPECT_EQ(report({"publish", "m@1", dir_ / "in", "--store", dir_ / "a"})["version"], 1);
  EXPECT_EQ(report({"pull", "m", "--dry-run", "--coordinator", cluster, "--store",
                    dir_ / "b"})["complete"],
            true);
  EXPECT_EQ(report({"pull", "m", "--to", dir_ / "out", "--coordinator", cluster})["model"], "m");
  EXPECT_EQ(report({"inspect", dir_ / "out"})["tensor_count"], 2);
  EXPECT_EQ(report({"verify", dir_ / "out"})["ok"], true);
  EXPECT_EQ(report({"status", "--coordinator", cluster})["nodes"].size(), 1u);
  EXPECT_EQ(report({"status", "--agent", agent_->address()})["node"], "a");
  EXPECT_EQ(report({"status", "--store", dir_ / "a"})["holdings"].size(), 1u);
  EXPECT_TRUE(report({"doctor", "--store", dir_ / "a"}).contains("checks"));
  EXPECT_TRUE(report({"topo"})["rails"].is_array());
  EXPECT_TRUE(report({"version"}).contains("version"));
  EXPECT_EQ(report({"bench", "transfer", "--total", "4M", "--block", "1M", "--rounds", "1"})["rows"]
                .size(),
            4u);
  EXPECT_EQ(report({"retire", "m@1", "--everywhere", "--coordinator", cluster})["nodes"], 1);
  EXPECT_EQ(report({"publish", "m@2", dir_ / "in", "--store", dir_ / "a"})["version"], 2);
  EXPECT_GT(report({"retire", "m@2", "--store", dir_ / "a"})["freed_bytes"], 0);
  EXPECT_EQ(report({"retire", "m@2", "--store", dir_ / "a"}, 3)["error"]["code"], "NOT_FOUND");
  EXPECT_EQ(
      report({"pull", "m@7", "--coordinator", cluster, "--to", dir_ / "no"}, 3)["error"]["code"],
      "NOT_FOUND");
}

TEST_F(CliReports, APullIntoADirectoryLeavesTheAgentOfTheStoreAlone) {
  ASSERT_EQ(rekindle({"publish", "m@1", dir_ / "in", "--store", dir_ / "a"}).exit.code, 0);
  const auto other = start_agent("b", dir_ / "b", coordinator_->address());
  const Json pulled = report({"pull", "m", "--to", dir_ / "out", "--store", dir_ / "b",
                              "--coordinator", coordinator_->address()});
  EXPECT_EQ(pulled["path"], (dir_ / "out").string());
  EXPECT_EQ(pulled["embedded"], true);
  EXPECT_EQ(rekindle({"verify", dir_ / "out"}).exit.code, 0);
  EXPECT_EQ(report({"status", "--store", dir_ / "b"})["holdings"].size(), 0u);
}

TEST_F(CliReports, TheWrongKindOfPeerIsNamed) {
  const Finished agent = rekindle({"status", "--coordinator", agent_->address()});
  EXPECT_EQ(agent.exit.code, 2);
  EXPECT_THAT(agent.err, AllOf(IsOneLine(), HasSubstr("agent does not serve COORDINATOR_STATUS")));
  const Finished coordinator = rekindle({"status", "--agent", coordinator_->address()});
  EXPECT_THAT(coordinator.err,
              AllOf(IsOneLine(), HasSubstr("coordinator does not serve AGENT_STATUS")));
}

TEST_F(CliReports, ErrorsOfPullAndPublishAreOneLine) {
  fs::create_directories(dir_ / "empty");
  for (const std::vector<std::string>& call :
       {std::vector<std::string>{"publish", "m@1", dir_ / "empty", "--store", dir_ / "a"},
        {"publish", "m@1", dir_ / "empty", "--store", dir_ / "c"},
        {"pull", "m@9", "--store", dir_ / "a"},
        {"pull", "m@9", "--coordinator", "127.0.0.1:1", "--store", dir_ / "c"},
        {"pull", "m@9", "--from", agent_->address(), "--store", dir_ / "c"}}) {
    const Finished done = rekindle(call);
    EXPECT_NE(done.exit.code, 0);
    EXPECT_THAT(done.err, AllOf(IsOneLine(), StartsWith("rekindle " + call[0] + " " + call[1])));
    EXPECT_EQ(done.err.find(call[1] + ": " + call[0]), std::string::npos) << done.err;
  }
}

// Frames of the fuzz corpus: whatever a stranger sends, a log line stays a JSON object.
TEST(CliLogs, StayStructuredWhateverStrangersSend) {
  const TempDir dir;
  const auto agent =
      start_agent("a", dir / "a", "", {"--log-format", "json", "--log-level", "debug"});
  const auto colon = agent->address().rfind(':');
  sockaddr_in target{};
  target.sin_family = AF_INET;
  target.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  target.sin_port =
      htons(static_cast<std::uint16_t>(std::stoi(agent->address().substr(colon + 1))));
  int sent = 0;
  for (const auto& seed : fs::directory_iterator(FRAME_CORPUS)) {
    const UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    ASSERT_EQ(::connect(fd.get(), reinterpret_cast<const sockaddr*>(&target), sizeof target), 0);
    const std::string bytes = read_file(seed.path());
    (void)!::send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    ::shutdown(fd.get(), SHUT_WR);
    char sink[4096];
    while (::recv(fd.get(), sink, sizeof sink, 0) > 0) {
    }
    ++sent;
  }
  EXPECT_GE(sent, 40);
  EXPECT_EQ(agent->stop(), 0);
  const auto lines = lines_of(agent->process().err());
  EXPECT_GE(lines.size(), 3u);
  bool protobuf = false;
  for (const std::string& line : lines) {
    const Json entry = Json::parse(line, nullptr, false);
    ASSERT_TRUE(entry.is_object()) << line;
    for (const char* key : {"ts", "level", "event"}) EXPECT_TRUE(entry.contains(key)) << line;
    protobuf |= entry["event"] == "protobuf";
  }
  EXPECT_TRUE(protobuf) << "malformed strings were not among them";
}

}  // namespace
}  // namespace rekindle::testing
