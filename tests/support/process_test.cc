#include "tests/support/process.h"

#include <csignal>
#include <stdexcept>

#include <gtest/gtest.h>

namespace rekindle::testing {
namespace {

TEST(Process, GivesExitCodeAndBothStreams) {
  const Finished done = run({"sh", "-c", "echo out; echo err >&2; exit 3"});
  EXPECT_EQ(done.exit, (Exit{3, 0}));
  EXPECT_EQ(done.out, "out\n");
  EXPECT_EQ(done.err, "err\n");
}

TEST(Process, ReportsAProgramThatDoesNotExist) {
  EXPECT_THROW(run({"/nonexistent/program"}), std::runtime_error);
}

TEST(Process, PassesInputEnvironmentAndDirectory) {
  TempDir dir;
  Spawn spawn;
  spawn.argv = {"sh", "-c", "cat; echo $VALUE; pwd"};
  spawn.env = {{"VALUE", "set"}};
  spawn.cwd = dir.path();
  spawn.input = "in\n";
  EXPECT_EQ(run(std::move(spawn)).out, "in\nset\n" + dir.path().string() + "\n");
}

TEST(Process, OurOwnSettingsDoNotLeakIntoTheProgram) {
  ::setenv("REKINDLE_LEAK", "1", 1);
  EXPECT_EQ(run({"sh", "-c", "echo \"${REKINDLE_LEAK:-none}\""}).out, "none\n");
  ::unsetenv("REKINDLE_LEAK");
}

TEST(Process, KillsWhatOutlivesItsDeadline) {
  const Finished done = run({"sleep", "600"}, 20ms);
  EXPECT_TRUE(done.timed_out);
  EXPECT_EQ(done.exit, (Exit{-1, SIGKILL}));
}

TEST(Process, FindsOutputWhileTheProgramRuns) {
  Spawn spawn;
  spawn.argv = {"sh", "-c", "echo listening 127.0.0.1:5; exec sleep 600"};
  Process process(std::move(spawn));
  EXPECT_EQ(process.value_after("listening "), "127.0.0.1:5");
  EXPECT_TRUE(process.running());
  process.signal(SIGTERM);
  EXPECT_EQ(process.wait(), (Exit{-1, SIGTERM}));
  EXPECT_FALSE(process.wait_for_out("never said"));
}

TEST(Process, ATerminalIsATerminal) {
  Spawn spawn;
  spawn.argv = {"sh", "-c", "test -t 1 && test -t 2 && stty size <&1"};
  spawn.terminal = true;
  const Finished done = run(std::move(spawn));
  EXPECT_EQ(done.exit.code, 0);
  EXPECT_EQ(done.out, "30 100\r\n");
  EXPECT_EQ(run({"sh", "-c", "test -t 1"}).exit.code, 1);
}

TEST(Process, LimitsApplyToTheProgramAlone) {
  Spawn spawn;
  spawn.argv = {"sh", "-c", "ulimit -n"};
  spawn.limits = {{RLIMIT_NOFILE, {17, 17}}};
  EXPECT_EQ(run(std::move(spawn)).out, "17\n");
}

}  // namespace
}  // namespace rekindle::testing
