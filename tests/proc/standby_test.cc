// `rekindle run --standby`: who takes over when, and what ends with whom. The program is
// standby_main.cc.
#include "src/ipc/standby.h"

#include <csignal>
#include <set>
#include <sstream>

#include <gmock/gmock.h>

#include "src/base/clock.h"
#include "tests/proc/supervised.h"

namespace rekindle::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// One `rekindle run --standby` with what its processes have said.
class Standbys : public ::testing::Test {
 protected:
  void start(std::vector<std::string> options, std::vector<std::string> words = {}) {
    words.insert(words.begin(), STANDBY_MAIN);
    options.insert(options.end(), {"--backoff", "1ms"});
    run_ = std::make_unique<Process>(supervised_program(std::move(options), std::move(words)));
    EXPECT_TRUE(have_said("turn", 1)) << run_->err();
  }

  // The rest of each line that begins with `word`.
  std::vector<std::string> said(const std::string& word) {
    std::vector<std::string> found;
    std::istringstream lines(run_->out());
    for (std::string line; std::getline(lines, line);) {
      if (line.starts_with(word + " ")) found.push_back(line.substr(word.size() + 1));
    }
    return found;
  }
  // Waits until so many have said it.
  bool have_said(const std::string& word, std::size_t times) {
    return eventually([&] { return said(word).size() >= times; });
  }
  pid_t worker() {
    const auto turns = said("turn");
    return turns.empty() ? -1 : std::stoi(turns.back());
  }
  std::set<pid_t> started() {
    std::set<pid_t> pids;
    for (const std::string& pid : said("started")) pids.insert(std::stoi(pid));
    return pids;
  }
  // The standbys of which `run` says that they wait.
  bool are_ready(std::size_t times) {
    return eventually([&] {
      const std::string err = run_->err();
      std::size_t found = 0;
      for (std::size_t at = 0; (at = err.find(" is ready after", at)) != std::string::npos; ++at) {
        ++found;
      }
      return found >= times;
    });
  }
  pid_t only_standby() {
    const pid_t serves = worker();
    std::set<pid_t> pids;
    EXPECT_TRUE(eventually([&] {
      pids = started();
      std::erase_if(pids, [&](pid_t pid) { return pid == serves || !alive(pid); });
      return pids.size() == 1;
    })) << run_->out();
    return pids.empty() ? -1 : *pids.begin();
  }
  // What is left of them when `run` has ended.
  bool all_are_gone() {
    return eventually([&] { return std::ranges::none_of(started(), alive); });
  }

  TempDir files_;
  std::unique_ptr<Process> run_;
};

TEST_F(Standbys, OneTakesOverAndAnotherIsStartedInItsPlace) {
  start({"--standby", "1"});
  ASSERT_TRUE(are_ready(1)) << run_->err();
  const pid_t first = worker(), standby = only_standby();
  ::kill(first, SIGKILL);
  ASSERT_TRUE(have_said("turn", 2)) << run_->out() << run_->err();
  EXPECT_EQ(said("turn").back(), std::to_string(standby) + " 1");
  EXPECT_TRUE(are_ready(2)) << run_->err();
  EXPECT_EQ(started().size(), 3u);
  EXPECT_THAT(run_->err(), HasSubstr("the standby pid " + std::to_string(standby) + " takes over"));
}

TEST_F(Standbys, OneThatWaitsTakesOverBeforeOneThatStillStarts) {
  write_file(files_ / "die", "");
  start({"--standby", "2"}, {"gate", (files_ / "gate").string()});
  ASSERT_TRUE(have_said("turn", 1));
  write_file(files_ / "gate", "");
  ASSERT_TRUE(are_ready(2)) << run_->err();
  std::filesystem::remove(files_ / "gate");
  ::kill(worker(), SIGKILL);
  ASSERT_TRUE(have_said("turn", 2));
  // The third standby does not come up. The one that waits is chosen, again without a start.
  ::kill(worker(), SIGKILL);
  ASSERT_TRUE(have_said("turn", 3)) << run_->err();
  EXPECT_EQ(started().size(), 3u);
}

TEST_F(Standbys, OneThatStillStartsTakesOverOnceItHasStartedUp) {
  start({"--standby", "1"}, {"gate", (files_ / "gate").string()});
  ASSERT_TRUE(have_said("turn", 1));
  ::kill(worker(), SIGKILL);
  ASSERT_TRUE(run_->wait_for_err("takes over, once it has started up")) << run_->err();
  EXPECT_EQ(said("turn").size(), 1u);
  write_file(files_ / "gate", "");
  ASSERT_TRUE(have_said("turn", 2)) << run_->err();
  EXPECT_THAT(said("turn").back(), ::testing::EndsWith(" 1"));
}

TEST_F(Standbys, CrashesFasterThanStandbysComeUpUseThemUpAndThenStartWorkers) {
  start({"--standby", "2", "--crash-loop", "0"});
  ASSERT_TRUE(are_ready(2)) << run_->err();
  for (std::size_t crash = 1; crash <= 6; ++crash) {
    ASSERT_TRUE(have_said("turn", crash)) << run_->out() << run_->err();
    ASSERT_EQ(::kill(worker(), SIGKILL), 0);
  }
  EXPECT_TRUE(have_said("turn", 7)) << run_->out() << run_->err();
  EXPECT_THAT(said("turn").back(), ::testing::EndsWith(" 6"));
  EXPECT_TRUE(run_->running());
}

TEST_F(Standbys, ACrashLoopIsFoundAndEndsThemToo) {
  start({"--standby", "2", "--crash-loop", "4"}, {"fail"});
  const auto exit = run_->wait();
  ASSERT_TRUE(exit) << run_->err();
  EXPECT_EQ(exit->code, 8);
  EXPECT_EQ(said("turn").size(), 4u) << run_->out();
  EXPECT_THAT(run_->err(), HasSubstr("crash loop"));
  EXPECT_TRUE(all_are_gone());
}

TEST_F(Standbys, OneThatDiesWhileItWaitsIsReplacedAndIsNoFailureOfTheWorker) {
  start({"--standby", "1", "--crash-loop", "1"});
  ASSERT_TRUE(are_ready(1)) << run_->err();
  for (std::size_t death = 1; death <= 3; ++death) {
    ::kill(only_standby(), SIGKILL);
    ASSERT_TRUE(are_ready(1 + death)) << run_->err();
  }
  EXPECT_EQ(said("turn").size(), 1u);
  EXPECT_THAT(run_->err(), HasSubstr("died by SIGKILL while it waited"));
  EXPECT_TRUE(run_->running());
}

TEST_F(Standbys, OneThatEndsBeforeItWaitsIsNamedAndTheWorkerServesOn) {
  write_file(files_ / "die", "");
  start({"--standby", "1", "--crash-loop", "1"}, {"die", (files_ / "die").string()});
  ASSERT_TRUE(run_->wait_for_err("failure 3 in a row")) << run_->err();
  EXPECT_THAT(run_->err(), HasSubstr("ended with exit code 7 before it waited for its turn"));
  EXPECT_EQ(said("turn").size(), 1u);
  std::filesystem::remove(files_ / "die");
  EXPECT_TRUE(are_ready(1)) << run_->err();
}

TEST_F(Standbys, WithoutOneTheWorkerIsStartedAgain) {
  write_file(files_ / "die", "");
  start({"--standby", "1", "--max-backoff", "10min"}, {"die", (files_ / "die").string()});
  ASSERT_TRUE(run_->wait_for_err("before it waited")) << run_->err();
  const pid_t first = worker();
  ::kill(first, SIGKILL);
  ASSERT_TRUE(have_said("turn", 2)) << run_->err();
  EXPECT_NE(worker(), first);
}

TEST_F(Standbys, ASignalStopsThemAllAndTheExitCodeIsTheWorkers) {
  start({"--standby", "2"});
  ASSERT_TRUE(are_ready(2)) << run_->err();
  run_->signal(SIGTERM);
  const auto exit = run_->wait();
  ASSERT_TRUE(exit) << run_->err();
  EXPECT_EQ(exit->code, 128 + SIGTERM);
  EXPECT_EQ(started().size(), 3u);
  EXPECT_TRUE(all_are_gone());
}

TEST_F(Standbys, OnesThatWaitEndThoughTheyIgnoreTheSignal) {
  start({"--standby", "1"}, {"stubborn"});
  ASSERT_TRUE(are_ready(1)) << run_->err();
  run_->signal(SIGTERM);
  ::kill(worker(), SIGKILL);
  const auto exit = run_->wait();
  ASSERT_TRUE(exit) << run_->err();
  EXPECT_EQ(exit->code, 128 + SIGKILL);
  EXPECT_THAT(run_->err(), Not(HasSubstr("did not stop")));
  EXPECT_TRUE(all_are_gone());
}

TEST_F(Standbys, OnesThatDoNotStopAreKilled) {
  start({"--standby", "1", "--kill-after", "300ms"},
        {"stubborn", "gate", (files_ / "gate").string()});
  ASSERT_TRUE(have_said("deaf", 2)) << run_->err();
  // The worker dies while `run` stops, and the standby stays.
  run_->signal(SIGTERM);
  ::kill(worker(), SIGKILL);
  const auto exit = run_->wait();
  ASSERT_TRUE(exit) << run_->err();
  EXPECT_EQ(exit->code, 128 + SIGKILL);
  EXPECT_THAT(run_->err(), HasSubstr("a standby did not stop"));
  for (const std::string& pid : said("deaf")) EXPECT_FALSE(alive(std::stoi(pid)));
}

TEST_F(Standbys, SignalsThatInformReachOnlyTheWorker) {
  start({"--standby", "1"});
  ASSERT_TRUE(are_ready(1)) << run_->err();
  const pid_t standby = only_standby();
  // It ends the worker, which has no handler.
  run_->signal(SIGUSR1);
  ASSERT_TRUE(have_said("turn", 2)) << run_->err();
  EXPECT_EQ(worker(), standby);
}

TEST_F(Standbys, TheyDieWithTheirSupervisor) {
  start({"--standby", "2"}, {"stubborn"});
  ASSERT_TRUE(are_ready(2)) << run_->err();
  run_->kill();
  EXPECT_TRUE(all_are_gone());
}

TEST_F(Standbys, AChildOfAStandbyMayWaitAndAskAgain) {
  start({"--standby", "1"}, {"child"});
  ASSERT_TRUE(are_ready(1)) << run_->err();
  ::kill(worker(), SIGKILL);
  ASSERT_TRUE(have_said("again", 2)) << run_->out() << run_->err();
  EXPECT_EQ(said("again").back(), said("turn").back());
}

TEST_F(Standbys, NoProcessInheritsADescriptorOfAnother) {
  start({"--standby", "3"}, {"fds"});
  ASSERT_TRUE(are_ready(3)) << run_->err();
  ::kill(worker(), SIGKILL);
  ASSERT_TRUE(are_ready(4)) << run_->err();
  // The worker was started before there was any socket of a standby.
  const auto counts = said("descriptors");
  ASSERT_EQ(counts.size(), 5u) << run_->out();
  EXPECT_EQ(std::set<std::string>(counts.begin(), counts.end()), std::set{counts.front()});
}

TEST_F(Standbys, TheSupervisorKeepsNoDescriptorOfThoseThatAreGone) {
  const auto descriptors = [&] {
    const auto directory = "/proc/" + std::to_string(run_->pid()) + "/fd";
    return std::distance(std::filesystem::directory_iterator(directory),
                         std::filesystem::directory_iterator());
  };
  start({"--standby", "1", "--crash-loop", "0"});
  ASSERT_TRUE(are_ready(1)) << run_->err();
  ::kill(worker(), SIGKILL);
  ASSERT_TRUE(are_ready(2)) << run_->err();
  const auto before = descriptors();
  for (std::size_t crash = 2; crash <= 5; ++crash) {
    ::kill(worker(), SIGKILL);
    ASSERT_TRUE(are_ready(1 + crash)) << run_->err();
  }
  EXPECT_TRUE(eventually([&] { return descriptors() == before; })) << descriptors();
}

TEST_F(Standbys, WithoutTheOptionNoProcessIsOne) {
  const auto done = run(supervised({}, "echo \"standby ${REKINDLE_STANDBY-unset}\""));
  EXPECT_EQ(done.out, "standby unset\n");
  EXPECT_EQ(run(supervised({"--standby", "17"}, "echo ran")).exit.code, 2);
  EXPECT_EQ(run(supervised({"--standby", "-1"}, "echo ran")).exit.code, 2);
}

TEST(StandbyWait, ADeadlineAndALostSupervisorEndIt) {
  const auto nobody = ipc::wait_for_turn("rekindle-standby-nobody", steady_now() + 1s);
  ASSERT_FALSE(nobody);
  EXPECT_EQ(nobody.error().code(), ErrorCode::kUnavailable);
  EXPECT_EQ(ipc::wait_for_turn(std::string(108, 'x'), steady_now()).error().code(),
            ErrorCode::kInvalid);

  const auto address = ipc::abstract_address("rekindle-standby-silent");
  ASSERT_TRUE(address);
  UniqueFd listener(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  ASSERT_EQ(::bind(listener.get(), address->generic(), address->size), 0);
  ASSERT_EQ(::listen(listener.get(), 4), 0);
  EXPECT_EQ(ipc::wait_for_turn("rekindle-standby-silent", steady_now() + 10ms).error().code(),
            ErrorCode::kTimeout);
}

}  // namespace
}  // namespace rekindle::testing
