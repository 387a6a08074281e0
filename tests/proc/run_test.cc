// `rekindle run`: restarts, signals, crash loops.
#include <algorithm>
#include <atomic>
#include <csignal>
#include <filesystem>
#include <thread>

#include <sys/socket.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "src/ipc/unix_socket.h"
#include "tests/proc/supervised.h"

namespace rekindle::testing {
namespace {

using ::testing::HasSubstr;

TEST(RunCommand, TellsTheWorkerWhatToAttachTo) {
  const auto done =
      run(supervised({"--instance", "i", "--rank", "3/8", "--generation", "7", "--shard", "tp=3/8",
                      "--store", "/tmp/s"},
                     "echo $REKINDLE_MODEL $REKINDLE_INSTANCE $REKINDLE_RANK $REKINDLE_WORLD "
                     "$REKINDLE_GENERATION $REKINDLE_SHARD $REKINDLE_STORE $REKINDLE_FAILURES",
                     "qwen3@41"));
  EXPECT_EQ(done.exit.code, 0) << done.err;
  EXPECT_EQ(done.out, "qwen3@41 i 3 8 7 tp=3/8 /tmp/s 0\n");
}

TEST(RunCommand, StartsAFailedWorkerAgainAndEndsWithItsSuccess) {
  const auto done =
      run(supervised({"--backoff", "1ms"}, "test $REKINDLE_FAILURES = 3 && exit 0; kill -9 $$"));
  EXPECT_EQ(done.exit.code, 0) << done.err;
  EXPECT_NE(done.err.find("died by SIGKILL"), std::string::npos) << done.err;
}

TEST(RunCommand, SaysThatItEndsBecauseTheWorkerHasEndedWithCode0) {
  const auto done = run(supervised({}, "exit 0"));
  EXPECT_EQ(done.exit.code, 0) << done.err;
  EXPECT_THAT(done.err, HasSubstr("ended with exit code 0"));
  EXPECT_EQ(std::ranges::count(done.err, '\n'), 1) << done.err;
}

TEST(RunCommand, AlwaysTakesCode0ForAFailureUntilASignalStopsIt) {
  const auto loop =
      run(supervised({"--always", "--backoff", "1ms", "--crash-loop", "3"}, "echo x"));
  EXPECT_EQ(loop.exit.code, 8) << loop.err;
  EXPECT_EQ(loop.out, "x\nx\nx\n");

  Process stopped(
      supervised({"--always"}, "trap 'exit 0' TERM; echo up; while :; do sleep 0.05; done"));
  ASSERT_TRUE(stopped.wait_for_out("up"));
  stopped.signal(SIGTERM);
  const auto exit = stopped.wait();
  ASSERT_TRUE(exit) << stopped.err();
  EXPECT_EQ(exit->code, 0);
  EXPECT_EQ(stopped.out(), "up\n");
}

TEST(RunCommand, CrashLoopEndsItWithOneLineAndItsOwnCode) {
  const auto done = run(supervised({"--backoff", "1ms", "--crash-loop", "3"}, "echo x; exit 9"));
  EXPECT_EQ(done.exit.code, 8);
  EXPECT_EQ(done.out, "x\nx\nx\n");
  const auto last = done.err.substr(done.err.rfind('\n', done.err.size() - 2) + 1);
  EXPECT_NE(last.find("crash loop"), std::string::npos) << done.err;
  EXPECT_NE(last.find("exit code 9"), std::string::npos) << done.err;
}

TEST(RunCommand, AWorkerThatFailsWhileNoAgentListensIsNoCrashLoopAndCanBeStopped) {
  const TempDir nobody;
  Process supervisor(
      supervised({"--crash-loop", "1", "--store", nobody.path().string()}, "echo x; exit 9"));
  ASSERT_TRUE(supervisor.wait_for_err("no agent listens"));
  EXPECT_TRUE(supervisor.running());
  supervisor.signal(SIGTERM);
  const auto exit = supervisor.wait();
  ASSERT_TRUE(exit);
  EXPECT_EQ(exit->code, 128 + SIGTERM);
  EXPECT_EQ(supervisor.out(), "x\n");
}

TEST(RunCommand, AnAgentThatHangsUpUnansweredIsTakenForOneThatDies) {
  const TempDir directory;
  std::filesystem::create_directory(directory / "agent");
  std::filesystem::permissions(directory / "agent", std::filesystem::perms::owner_all);
  const auto listener = ipc::listen_unix_socket((directory / "agent/worker.sock").string());
  ASSERT_TRUE(listener) << listener.error().message();
  std::atomic<bool> over = false;
  std::thread hangs_up([&] {
    while (!over) UniqueFd(::accept4(listener->get(), nullptr, nullptr, SOCK_CLOEXEC));
  });
  Process supervisor(
      supervised({"--crash-loop", "1", "--store", directory.path().string()}, "exit 9"));
  EXPECT_TRUE(supervisor.wait_for_err("no agent listens")) << supervisor.err();
  EXPECT_TRUE(supervisor.running());
  over = true;
  hangs_up.join();
}

TEST(RunCommand, PassesSignalsOnAndDoesNotStartAStoppedWorkerAgain) {
  Process supervisor(supervised({},
                                "trap 'echo got; exit 5' TERM; echo up; "
                                "while :; do sleep 0.05; done"));
  ASSERT_TRUE(supervisor.wait_for_out("up"));
  supervisor.signal(SIGTERM);
  const auto exit = supervisor.wait();
  ASSERT_TRUE(exit);
  EXPECT_EQ(exit->code, 5);
  EXPECT_NE(supervisor.out().find("got"), std::string::npos);
}

TEST(RunCommand, OtherSignalsReachTheWorkerAndChangeNothing) {
  Process supervisor(supervised({},
                                "trap 'echo usr1' USR1; echo up; "
                                "while :; do sleep 0.05; done"));
  ASSERT_TRUE(supervisor.wait_for_out("up"));
  supervisor.signal(SIGUSR1);
  EXPECT_TRUE(supervisor.wait_for_out("usr1"));
  EXPECT_TRUE(supervisor.running());
}

TEST(RunCommand, KillsAWorkerThatDoesNotStop) {
  Process supervisor(supervised({"--kill-after", "200ms"},
                                "trap '' TERM; echo up; "
                                "while :; do sleep 0.05; done"));
  ASSERT_TRUE(supervisor.wait_for_out("up"));
  supervisor.signal(SIGTERM);
  const auto exit = supervisor.wait();
  ASSERT_TRUE(exit);
  EXPECT_EQ(exit->code, 128 + SIGKILL);
}

TEST(RunCommand, TakesTheWorkerAlongWhenItDies) {
  Process supervisor(supervised({}, "echo pid $$; while :; do sleep 0.05; done"));
  const std::string pid = supervisor.value_after("pid ");
  ASSERT_FALSE(pid.empty());
  supervisor.kill();
  EXPECT_TRUE(eventually([&] { return !alive(std::stoi(pid)); }));
}

TEST(RunCommand, StopsInItsPauseBetweenTwoStarts) {
  Process supervisor(supervised({"--backoff", "20s"}, "exit 1"));
  ASSERT_TRUE(supervisor.wait_for_err("in a row"));
  supervisor.signal(SIGINT);
  const auto exit = supervisor.wait();
  ASSERT_TRUE(exit);
  EXPECT_EQ(exit->code, 128 + SIGINT);
}

TEST(RunCommand, WrongUseIsRefusedBeforeAnythingRuns) {
  const auto refused = [](std::vector<std::string> options) {
    return run(supervised(std::move(options), "echo ran"));
  };
  for (const auto& options :
       std::vector<std::vector<std::string>>{{"--rank", "8/8", "--instance", "i"},
                                             {"--rank", "1"},
                                             {"--rank", "0/2"},
                                             {"--instance", "../i"},
                                             {"--backoff", "soon"}}) {
    const auto done = refused(options);
    EXPECT_EQ(done.exit.code, 2) << options.front() << ' ' << done.err;
    EXPECT_EQ(done.out, "");
  }
  const auto missing = run({REKINDLE_BINARY, "run", "--model", "m", "--", "/no/such/program"});
  EXPECT_EQ(missing.exit.code, 3) << missing.err;
}

}  // namespace
}  // namespace rekindle::testing
