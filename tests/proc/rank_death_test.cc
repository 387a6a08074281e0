// `rekindle run` and the death of a rank below the worker. The worker is a front end: a shell that
// starts its ranks (worker_main.cc) and says on stdout: front PID, rank PID.
#include <csignal>
#include <fstream>
#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/proc/supervised.h"
#include "tests/proc/worker_fixture.h"

namespace rekindle::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// Starts a rank, whose pid is in $!.
const std::string kRank = "echo front $$; \"$WORKER\" & echo rank $!; ";
const std::string kForEver = "while :; do sleep 0.05; done";

class RankDeaths : public WithWorkers {
 protected:
  void SetUp() override {
    make_checkpoint(fleet_.dir("model"), 2, 64, 5);
    fleet_.start_agent("a");
    fleet_.publish("a", "m@1", fleet_.dir("model"));
  }
  void start(std::vector<std::string> options, const std::string& script) {
    options.emplace_back("--always");
    start_job(std::move(options), script);
  }
  void start_job(std::vector<std::string> options, const std::string& script) {
    options.insert(options.end(), {"--instance", "i", "--backoff", "1ms", "--kill-after", "200ms",
                                   "--store", fleet_.agent("a").store.string()});
    Spawn spawn = supervised(std::move(options), script, "m@1");
    spawn.env.emplace_back("WORKER", worker_program());
    spawn.env.emplace_back("REKINDLE_FAILPOINTS", failpoints_);
    run_ = std::make_unique<Process>(std::move(spawn));
  }
  // The pids in the lines that begin with `word`.
  std::vector<pid_t> said(const std::string& word) {
    std::vector<pid_t> pids;
    std::istringstream lines(run_->out());
    for (std::string line; std::getline(lines, line);) {
      if (line.starts_with(word + " ")) pids.push_back(std::stoi(line.substr(word.size())));
    }
    return pids;
  }
  // Waits until so many ranks have loaded.
  bool are_ready(std::size_t ranks) {
    return eventually([&] {
      const std::string out = run_->out();
      std::size_t found = 0;
      for (std::size_t at = 0; (at = out.find("ready m@1", at)) != std::string::npos; ++at) ++found;
      return found >= ranks;
    });
  }
  // A process that nobody waits for is gone too.
  static bool is_gone(pid_t pid) {
    std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
    std::string stat;
    return !std::getline(file, stat) || stat.find(") Z ") != std::string::npos;
  }
  static bool are_gone(const std::vector<pid_t>& pids) {
    return eventually([&] { return std::ranges::all_of(pids, is_gone); });
  }
  static std::string rank_at(pid_t pid) { return "rank 0 (pid " + std::to_string(pid) + ")"; }

  // Of the supervisor.
  std::string failpoints_;
  std::unique_ptr<Process> run_;
};

struct FrontEnd {
  const char* name;
  std::string after_start;
  const char* grace;
};

class RankDeathUnder : public RankDeaths, public ::testing::WithParamInterface<FrontEnd> {};

TEST_P(RankDeathUnder, IsAFailureOfTheWorker) {
  start({"--rank-grace", GetParam().grace}, kRank + GetParam().after_start);
  ASSERT_TRUE(are_ready(1)) << run_->err();
  const pid_t front = said("front").front(), rank = said("rank").front();
  ::kill(rank, SIGKILL);
  ASSERT_TRUE(are_ready(2)) << run_->out() << run_->err();
  EXPECT_THAT(run_->err(), HasSubstr("lost " + rank_at(rank)));
  EXPECT_TRUE(are_gone({front}));
  // The successor's rank is watched as well.
  ::kill(said("rank").back(), SIGKILL);
  EXPECT_TRUE(are_ready(3)) << run_->out() << run_->err();
  EXPECT_TRUE(run_->running());
}

INSTANTIATE_TEST_SUITE_P(FrontEnds, RankDeathUnder,
                         ::testing::Values(FrontEnd{"ThatEndsWith0", "wait $!; exit 0", "10min"},
                                           FrontEnd{"ThatEndsWith1", "wait $!; exit 1", "10min"},
                                           FrontEnd{"ThatHangs", kForEver, "100ms"},
                                           FrontEnd{"ThatIgnoresSignals",
                                                    "trap '' TERM INT HUP; " + kForEver, "100ms"}),
                         [](const auto& test) { return test.param.name; });

// The agent may say no more than that its session has failed.
TEST_F(RankDeaths, OneThatHasDiedBeforeAnybodyLookedIsNoticed) {
  start({"--rank-grace", "100ms"}, kRank + kForEver);
  ASSERT_TRUE(eventually([&] { return said("rank").size() == 1; })) << run_->err();
  ::kill(run_->pid(), SIGSTOP);
  ASSERT_TRUE(are_ready(1)) << run_->err();
  const pid_t rank = said("rank").front();
  ::kill(rank, SIGKILL);
  EXPECT_TRUE(are_gone({rank}));
  ::kill(run_->pid(), SIGCONT);
  ASSERT_TRUE(are_ready(2)) << run_->out() << run_->err();
  EXPECT_THAT(run_->err(), HasSubstr("lost " + rank_at(rank)));
}

// On a busy machine the supervisor may come to look at its worker after all this.
TEST_F(RankDeaths, OneThatHasDiedBeforeItsWorkerWasFollowedIsNoticed) {
  failpoints_ = "run.worker_started=sleep:3000@1";
  start({"--rank-grace", "100ms"}, kRank + kForEver);
  ASSERT_TRUE(are_ready(1)) << run_->err();
  const pid_t rank = said("rank").front();
  ::kill(rank, SIGKILL);
  ASSERT_TRUE(are_ready(2)) << run_->out() << run_->err();
  EXPECT_THAT(run_->err(), HasSubstr("lost " + rank_at(rank)));
}

// The agent still tells of it.
TEST_F(RankDeaths, ThatOfAFormerRunIsNoFailureOfThisOne) {
  start({}, kRank + kForEver);
  ASSERT_TRUE(are_ready(1)) << run_->err();
  const pid_t former = said("rank").front();
  run_->kill();
  ::kill(former, SIGKILL);
  ASSERT_TRUE(are_gone({former}));
  ASSERT_TRUE(eventually([&] {
    return std::ranges::any_of(events_of("a"), [](const auto& event) {
      return event["event"] == "died" || event["event"] == "failed";
    });
  }));
  start({"--rank-grace", "1ms"}, kRank + kForEver);
  ASSERT_TRUE(are_ready(1)) << run_->err();
  const pid_t rank = said("rank").front();
  ::kill(rank, SIGKILL);
  ASSERT_TRUE(are_ready(2)) << run_->out() << run_->err();
  EXPECT_EQ(said("rank").size(), 2u) << run_->err();
  EXPECT_THAT(run_->err(), HasSubstr("lost " + rank_at(rank)));
  EXPECT_THAT(run_->err(), Not(HasSubstr(rank_at(former))));
}

TEST_F(RankDeaths, AStandbyTakesOver) {
  start({"--standby", "1"},
        "\"$WORKER\" & [ -n \"$REKINDLE_STANDBY\" ] || echo rank $!; wait $!; exit 0");
  ASSERT_TRUE(are_ready(1)) << run_->err();
  ASSERT_TRUE(run_->wait_for_err("is ready after")) << run_->err();
  ::kill(said("rank").front(), SIGKILL);
  ASSERT_TRUE(are_ready(2)) << run_->out() << run_->err();
  EXPECT_THAT(run_->err(), HasSubstr("takes over"));
}

TEST_F(RankDeaths, AProcessOfAHungFrontEndIsKilledWithIt) {
  start({"--rank-grace", "100ms"}, "sleep 600 & echo helper $!; " + kRank + kForEver);
  ASSERT_TRUE(are_ready(1)) << run_->err();
  const auto helper = said("helper");
  ::kill(said("rank").front(), SIGKILL);
  ASSERT_TRUE(are_ready(2)) << run_->err();
  EXPECT_THAT(run_->err(), HasSubstr("did not end within 0.1 s of the death of rank 0"));
  EXPECT_TRUE(are_gone(helper));
}

TEST_F(RankDeaths, TheOtherRanksOfAFrontEndThatHasEndedAreKilled) {
  const std::string rank = "REKINDLE_WORLD=2 REKINDLE_RANK=";
  start({}, "echo front $$; " + rank + "0 \"$WORKER\" & echo rank $!; first=$!; " + rank +
                "1 \"$WORKER\" & echo rank $!; wait $first; exit 0");
  ASSERT_TRUE(are_ready(2)) << run_->err();
  const auto ranks = said("rank");
  ::kill(ranks.front(), SIGKILL);
  ASSERT_TRUE(are_ready(4)) << run_->out() << run_->err();
  EXPECT_TRUE(are_gone(ranks));
}

TEST_F(RankDeaths, ARankThatOutlivesItsFrontEndEndsBeforeTheNextOneStarts) {
  start({"--rank-grace", "100ms"}, kRank + kForEver);
  ASSERT_TRUE(are_ready(1)) << run_->err();
  const pid_t rank = said("rank").front();
  ::kill(said("front").front(), SIGKILL);
  ASSERT_TRUE(eventually([&] { return said("front").size() == 2; })) << run_->err();
  EXPECT_TRUE(is_gone(rank));
  EXPECT_THAT(run_->err(), HasSubstr("killed 1 process that pid"));
  EXPECT_TRUE(are_ready(2)) << run_->out() << run_->err();
}

TEST_F(RankDeaths, ARankThatOutlivesItsFrontEndAtAStopIsKilled) {
  start({}, "trap 'exit 3' TERM; " + kRank + kForEver);
  ASSERT_TRUE(are_ready(1)) << run_->err();
  const pid_t rank = said("rank").front();
  run_->signal(SIGTERM);
  const auto exit = run_->wait();
  ASSERT_TRUE(exit) << run_->err();
  EXPECT_EQ(exit->code, 3) << run_->err();
  EXPECT_TRUE(is_gone(rank));
}

TEST_F(RankDeaths, WithoutGraceTheFrontEndIsLeftAloneUntilItEnds) {
  const auto gate = fleet_.dir("gate");
  start({"--rank-grace", "0"},
        kRank + "while [ ! -e '" + gate.string() + "' ]; do sleep 0.05; done; exit 0");
  ASSERT_TRUE(are_ready(1)) << run_->err();
  ::kill(said("rank").front(), SIGKILL);
  ASSERT_TRUE(run_->wait_for_err(" died")) << run_->err();
  EXPECT_TRUE(alive(said("front").front()));
  write_file(gate, "");
  EXPECT_TRUE(are_ready(2)) << run_->err();
  EXPECT_THAT(run_->err(), Not(HasSubstr("killed")));
}

TEST_F(RankDeaths, ARankThatDetachesMayEnd) {
  start({"--rank-grace", "1ms"},
        "\"$WORKER\" leave & echo rank $!; wait $!; sleep 0.3; echo went on; " + kForEver);
  ASSERT_TRUE(run_->wait_for_out("left")) << run_->err();
  ASSERT_TRUE(eventually([&] {
    return std::ranges::any_of(events_of("a"),
                               [](const auto& event) { return event["event"] == "detached"; });
  }));
  ::kill(said("rank").front(), SIGKILL);
  EXPECT_TRUE(run_->wait_for_out("went on")) << run_->err();
  EXPECT_THAT(run_->err(), Not(HasSubstr("died")));
}

// Its engine ends with it, often without a detach.
TEST_F(RankDeaths, AJobIsDoneWithExitCode0WhateverItsRanksDid) {
  start_job({}, kRank + "wait $!; exit 0");
  ASSERT_TRUE(are_ready(1)) << run_->err();
  ::kill(said("rank").front(), SIGKILL);
  const auto exit = run_->wait();
  ASSERT_TRUE(exit) << run_->err();
  EXPECT_EQ(exit->code, 0) << run_->err();
  EXPECT_THAT(run_->err(), HasSubstr("its work is done"));
  EXPECT_EQ(said("rank").size(), 1u);
}

TEST_F(RankDeaths, AWorkerThatIsItsOwnRankIsJudgedByItsExitCode) {
  start({}, "exec \"$WORKER\" once '" + fleet_.dir("once").string() + "'");
  ASSERT_TRUE(are_ready(2)) << run_->err();
  EXPECT_THAT(run_->err(), HasSubstr("died by SIGABRT"));
  EXPECT_THAT(run_->err(), Not(HasSubstr("lost")));
}

TEST_F(RankDeaths, ARankThatEndsAtASignalIsNoFailure) {
  start({}, "trap 'kill -9 $rank; exit 0' TERM; " + kRank + "rank=$!; " + kForEver);
  ASSERT_TRUE(are_ready(1)) << run_->err();
  run_->signal(SIGTERM);
  const auto exit = run_->wait();
  ASSERT_TRUE(exit) << run_->err();
  EXPECT_EQ(said("rank").size(), 1u);
  EXPECT_THAT(run_->err(), Not(HasSubstr("lost")));
}

TEST_F(RankDeaths, NoWorkerInheritsTheConnectionToTheAgent) {
  start({}, "echo sockets $(ls -l /proc/$$/fd | grep -c socket:); " + kRank + "wait $!; exit 0");
  ASSERT_TRUE(are_ready(1)) << run_->err();
  ::kill(said("rank").front(), SIGKILL);
  ASSERT_TRUE(are_ready(2)) << run_->err();
  EXPECT_EQ(said("sockets").back(), 0) << run_->out();
}

// worker_main ends when its agent is gone.
TEST_F(RankDeaths, AreSeenWithoutTheAgent) {
  start({"--crash-loop", "2"}, kRank + "wait $!; exit 0");
  ASSERT_TRUE(are_ready(1)) << run_->err();
  fleet_.agent("a").process->kill();
  ASSERT_TRUE(run_->wait_for_err("no agent listens")) << run_->err();
  EXPECT_THAT(run_->err(), HasSubstr("lost " + rank_at(said("rank").front())));
  fleet_.start_agent("a");
  EXPECT_TRUE(are_ready(2)) << run_->out() << run_->err();
}

}  // namespace
}  // namespace rekindle::testing
