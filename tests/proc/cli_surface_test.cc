#include <filesystem>
#include <ostream>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/proc/cluster.h"

// What a user meets before anything runs: help, arguments, exit codes, errors of one line.
namespace rekindle::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr const char* kCommands[] = {
    "coordinator", "agent",  "publish", "pull",   "status",     "inspect", "verify", "retire",
    "bench",       "topo",   "doctor",  "drain",  "completion", "version", "update", "demo",
    "man",         "config", "release", "switch", "certs",      "keys"};

MATCHER(IsOneLine, "is one line") {
  return !arg.empty() && arg.back() == '\n' && std::ranges::count(arg, '\n') == 1;
}

TEST(CliSurface, HelpNamesCommandsExitCodesAndEnvironment) {
  const Finished done = rekindle({"--help"});
  EXPECT_EQ(done.exit.code, 0);
  EXPECT_EQ(done.err, "");
  for (const char* command : kCommands) EXPECT_THAT(done.out, HasSubstr(command));
  EXPECT_THAT(done.out, AllOf(HasSubstr("Exit codes:"), HasSubstr("REKINDLE_COORDINATOR"),
                              HasSubstr("REKINDLE_STORE"), HasSubstr("REKINDLE_SECRET_FILE"),
                              HasSubstr("REKINDLE_LOG"), HasSubstr("REKINDLE_CONFIG")));
}

TEST(CliSurface, EveryCommandHasHelp) {
  for (const char* command : kCommands) {
    const Finished done = rekindle({command, "--help"});
    EXPECT_EQ(done.exit.code, 0) << command;
    EXPECT_THAT(done.out, HasSubstr("Usage:")) << command;
    EXPECT_EQ(done.err, "") << command;
  }
}

TEST(CliSurface, WithoutACommandHelpGoesToStderr) {
  const Finished done = rekindle({});
  EXPECT_EQ(done.exit.code, 2);
  EXPECT_EQ(done.out, "");
  EXPECT_THAT(done.err, HasSubstr("Usage:"));
}

TEST(CliSurface, VersionsAgree) {
  const Finished flag = rekindle({"--version"});
  const Json json = json_of(rekindle({"version", "--json"}));
  ASSERT_TRUE(json.is_object());
  EXPECT_EQ(flag.out, "rekindle " + json["version"].get<std::string>() + "\n");
  EXPECT_THAT(rekindle({"version"}).out, StartsWith(flag.out));
}

struct BadCall {
  const char* name;
  std::vector<std::string> arguments;
  int code;
  const char* says;
  friend void PrintTo(const BadCall& what, std::ostream* out) { *out << what.name; }
};

class BadArguments : public ::testing::TestWithParam<BadCall> {};

TEST_P(BadArguments, EndInOneLineThatNamesThem) {
  const Finished done = rekindle(GetParam().arguments);
  EXPECT_EQ(done.exit.code, GetParam().code);
  EXPECT_EQ(done.out, "");
  EXPECT_THAT(done.err, AllOf(IsOneLine(), StartsWith("rekindle"), HasSubstr(GetParam().says)));
}

INSTANTIATE_TEST_SUITE_P(
    All, BadArguments,
    ::testing::Values(
        BadCall{"UnknownCommand", {"frobnicate"}, 2, "frobnicate"},
        BadCall{"UnknownOption", {"pull", "m@1", "--frob"}, 2, "--frob"},
        BadCall{"MissingValue", {"pull", "m@1", "--shard"}, 2, "--shard"},
        BadCall{"NoModel", {"pull"}, 2, "which model"},
        BadCall{"BadVersion", {"pull", "m@latest"}, 2, "m@latest"},
        BadCall{"BadModelName", {"pull", "../m@1"}, 2, "../m"},
        BadCall{"PublishWithoutVersion", {"publish", "m", "/tmp"}, 2, "names no version"},
        BadCall{"PublishNothing", {"publish", "m@1"}, 2, "PATH"},
        BadCall{"PublishWhatIsNotThere", {"publish", "m@1", "/nonexistent/x"}, 3, "/nonexistent/x"},
        BadCall{"ShardAndTensors",
                {"pull", "m@1", "--shard", "tp=0/2", "--tensors", "x"},
                2,
                "--shard"},
        BadCall{"SpecWithoutShard", {"pull", "m@1", "--spec", "/etc/hostname"}, 2, "--shard"},
        BadCall{"SpecNotThere",
                {"pull", "m@1", "--shard", "tp=0/2", "--spec", "/nonexistent"},
                3,
                "/nonexistent"},
        BadCall{"UnknownTransport", {"pull", "m@1", "--transport", "pigeon"}, 2, "pigeon"},
        BadCall{"BadLogLevel", {"version", "--log-level", "loud"}, 2, "loud"},
        BadCall{"BadLogFormat", {"version", "--log-format", "xml"}, 2, "xml"},
        BadCall{"BadDuration", {"coordinator", "--heartbeat", "5"}, 2, "--heartbeat"},
        BadCall{"DeadBeforeSuspect", {"coordinator", "--dead-after", "500ms"}, 2, "--dead-after"},
        BadCall{"BadBudget", {"agent", "--budget", "lots"}, 2, "--budget"},
        BadCall{"RetireEverywhereAlone", {"retire", "m@1", "--everywhere"}, 2, "--coordinator"},
        BadCall{"UpdateWithoutVersion", {"update", "m"}, 2, "names no version"},
        BadCall{"UpdateAlone", {"update", "m@1"}, 2, "--coordinator"},
        BadCall{"InspectNothing", {"inspect", "/nonexistent/x"}, 3, "/nonexistent/x"},
        BadCall{"VerifyNothing", {"verify", "/nonexistent/x"}, 3, "/nonexistent/x"},
        BadCall{"VerifyWithoutManifest", {"verify", "/etc"}, 2, "rekindle.manifest"},
        BadCall{"BenchOfNothing", {"bench"}, 2, "subcommand"},
        BadCall{"ControlCharacters", {"inspect", "/nonexistent/\x1b[2J"}, 3, "\\x1b[2J"}),
    [](const auto& call) { return call.param.name; });

TEST(CliSurface, PeersThatAreNotThereAreUnavailable) {
  const std::string nobody = "127.0.0.1:1";
  for (const std::vector<std::string>& call :
       {std::vector<std::string>{"status", "--agent", nobody},
        {"status", "--coordinator", nobody},
        {"update", "m@1", "--coordinator", nobody},
        {"retire", "m@1", "--everywhere", "--coordinator", nobody}}) {
    const Finished done = rekindle(call);
    EXPECT_EQ(done.exit.code, 5) << done.err;
    EXPECT_THAT(done.err, AllOf(IsOneLine(), HasSubstr(nobody)));
  }
}

TEST(CliSurface, WithoutAnySourceAPullSaysWhatToGive) {
  const TempDir dir;
  const Finished done = rekindle({"pull", "m@1", "--store", dir / "store"});
  EXPECT_NE(done.exit.code, 0);
  EXPECT_THAT(done.err, AllOf(IsOneLine(), HasSubstr("--coordinator"), HasSubstr("--from")));
}

TEST(CliSurface, ErrorsAreJsonWhenAskedFor) {
  const Finished done = rekindle({"inspect", "/nonexistent/x", "--json"});
  EXPECT_EQ(done.exit.code, 3);
  EXPECT_EQ(json_of(done)["error"]["code"], "NOT_FOUND");
  EXPECT_THAT(json_of(done)["error"]["message"].get<std::string>(), HasSubstr("/nonexistent/x"));
}

TEST(CliSurface, AFullDiskUnderStdoutIsAnError) {
  Spawn spawn;
  spawn.argv = {"sh", "-c", rekindle_binary() + " version > /dev/full"};
  const Finished done = run(std::move(spawn));
  EXPECT_EQ(done.exit.code, 6);
  EXPECT_THAT(done.err, HasSubstr("standard output"));
}

TEST(CliSurface, AReaderThatLeavesIsNoError) {
  Spawn spawn;
  spawn.argv = {"bash", "-c",
                "set -o pipefail; for i in 1 2 3; do " + rekindle_binary() +
                    " --help | true || exit 9; done"};
  EXPECT_EQ(run(std::move(spawn)).exit.code, 0);
}

TEST(CliSurface, TheDemoShowsEachOfItsSteps) {
  const Finished done = rekindle({"demo", "--gib", "0.02"}, 3 * kPatience);
  EXPECT_EQ(done.exit.code, 0) << done.err;
  EXPECT_THAT(done.out, AllOf(HasSubstr("scale-out: a worker on c is ready: demo@1"),
                              HasSubstr("SIGKILL to the worker on b; it is ready again"),
                              HasSubstr("SIGKILL to the agent of b, started again"),
                              HasSubstr("update: the worker on c follows: demo@2"),
                              HasSubstr("All of it worked")));
}

TEST(CliSurface, TheDemoWithoutItsWorkerSaysWhereItLooked) {
  TempDir elsewhere;
  std::filesystem::copy(rekindle_binary(), elsewhere / "rekindle");
  const Finished done = run({(elsewhere / "rekindle").string(), "demo"});
  EXPECT_EQ(done.exit.code, 3);
  EXPECT_THAT(done.err, AllOf(IsOneLine(), HasSubstr("example worker"),
                              HasSubstr(elsewhere.path().string())));
}

TEST(CliSurface, DoctorJsonNamesEveryCheck) {
  const TempDir dir;
  const Finished done = rekindle({"doctor", "--json", "--store", dir / "store"});
  const Json json = json_of(done);
  ASSERT_TRUE(json.is_object()) << done.out;
  std::vector<std::string> names;
  for (const Json& check : json["checks"]) {
    names.push_back(check["name"]);
    EXPECT_THAT(check["level"].get<std::string>(), ::testing::AnyOf("ok", "warn", "fail"));
    EXPECT_NE(check["found"], "");
  }
  for (const char* name : {"memlock", "store", "huge pages", "network", "rdma", "gpu", "numa",
                           "port 7300", "port 7400", "open files", "build", "identity"}) {
    EXPECT_THAT(names, ::testing::Contains(name));
  }
}

TEST(CliSurface, DoctorFailsOnWhatMustBeFixed) {
  const TempDir dir;
  write_file(dir / "secret", "0123456789abcdef0123456789abcdef");
  std::filesystem::permissions(dir / "secret", std::filesystem::perms(0644));
  const Finished done = rekindle({"doctor", "--secret-file", dir / "secret"});
  EXPECT_EQ(done.exit.code, 1);
  EXPECT_THAT(done.out, HasSubstr("fail  identity"));
}

TEST(CliSurface, CompletionCompletesCommandsOptionsAndValues) {
  const std::string script = R"(
    source <("$1" completion bash) || exit 9
    try() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _rekindle 2>/dev/null; echo "${COMPREPLY[*]}"; }
    try rekindle pu
    try rekindle pull --sh
    try rekindle pull --transport ''
    try rekindle --log-level e
    try rekindle bench tr
    try rekindle pull --coor
  )";
  const Finished done = run({"bash", "-c", script, "bash", rekindle_binary()});
  EXPECT_EQ(done.exit.code, 0) << done.err;
  EXPECT_EQ(done.out, "publish pull\n--shard\ntcp shm verbs\nerror\ntransfer\n--coordinator\n");
}

TEST(CliSurface, CompletionWorksInFish) {
  const std::string script = R"(
    $argv[1] completion fish | source
    for line in 'rekindle pu' 'rekindle pull --sh' 'rekindle pull --transport ' \
        'rekindle --log-level e' 'rekindle bench tr' 'rekindle pull --coor'
      string join -- ' ' (complete -C $line | string replace -r '\t.*' '')
    end
    true
  )";
  const Finished done = run({"fish", "--no-config", "-c", script, rekindle_binary()});
  EXPECT_EQ(done.exit.code, 0) << done.err;
  EXPECT_EQ(done.out, "publish pull\n--shard\nshm tcp verbs\nerror\ntransfer\n--coordinator\n");
}

// In a shell on a terminal, which gets each line and a tab.
TEST(CliSurface, CompletionWorksInZsh) {
  const std::string script = R"zsh(
    zmodload zsh/zpty || exit 9
    zpty -b shell zsh -f -i
    zpty -w shell "PROMPT= RPROMPT=; autoload -U compinit; compinit -u -D"
    zpty -w shell "source <($1 completion zsh)"
    try() {
      zpty -w -n shell "$1"$'\t'
      local said= more=
      until [[ $said == *"$2"* ]]; do zpty -r shell more && said+=$more || sleep 0.02; done
      print -r -- "$2"
      zpty -w -n shell $'\x15'
    }
    try 'rekindle pub' 'rekindle publish'
    try 'rekindle pull --sh' 'pull --shard'
    try 'rekindle pull --transport ve' '--transport verbs'
    try 'rekindle --log-level e' 'level error'
    try 'rekindle bench tr' 'bench transfer'
    try 'rekindle bench transfer --blo' 'transfer --block'
    try 'rekindle pull --coor' 'pull --coordinator'
  )zsh";
  const Finished done = run({"zsh", "-f", "-c", script, "zsh", rekindle_binary()});
  EXPECT_EQ(done.exit.code, 0) << done.err;
  EXPECT_EQ(done.out,
            "rekindle publish\npull --shard\n--transport verbs\nlevel error\nbench transfer\n"
            "transfer --block\npull --coordinator\n");
}

TEST(CliSurface, EachCommandHasAManualPage) {
  const TempDir dir;
  EXPECT_EQ(rekindle({"man", "--to", dir.path()}).exit.code, 0);
  for (const char* command : kCommands) {
    const std::filesystem::path page = dir / (std::string("rekindle-") + command + ".1");
    ASSERT_TRUE(std::filesystem::exists(page)) << command;
    const Finished done = run({"groff", "-man", "-ww", "-z", "-K", "utf8", page});
    EXPECT_EQ(done.exit.code, 0);
    EXPECT_EQ(done.err, "") << command;
  }
  EXPECT_TRUE(std::filesystem::exists(dir / "rekindle.1"));
  const Finished one = rekindle({"man", "--command", "pull"});
  EXPECT_THAT(one.out, AllOf(HasSubstr("MODEL[@VERSION]"), HasSubstr("tcp|shm|verbs"),
                             HasSubstr("REKINDLE_COORDINATOR"), HasSubstr("EXIT STATUS")));
  const Finished none = rekindle({"man", "--command", "pul"});
  EXPECT_EQ(none.exit.code, 2);
  EXPECT_THAT(none.err, AllOf(IsOneLine(), HasSubstr("'pul'")));
}

}  // namespace
}  // namespace rekindle::testing
