// `rekindle bench fleet` on a live fleet: what it names, and what it leaves behind.
#include <csignal>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/fleet.h"

namespace rekindle::testing {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

using Lines = std::vector<std::string>;

class BenchFleet : public ::testing::Test {
 protected:
  void start(const Lines& names) {
    fleet_.start_coordinator();
    for (const auto& name : names) fleet_.start_agent(name, {"--allow-drills"});
  }
  Fleet::Answer bench(Lines more = {}) {
    more.insert(more.begin(), {"bench", "fleet", "--time", "300ms"});
    return fleet_.run_command(std::move(more));
  }
  // It takes minutes, unless something ends it.
  Spawn long_bench() {
    Spawn spawn = fleet_.command({"bench", "fleet", "--time", "30s", "--parallel", "2"});
    std::erase(spawn.argv, "--json");
    return spawn;
  }
  Process& agent(const std::string& name) { return *fleet_.agent(name).process; }
  // Neither as the source nor as the reader.
  bool has_bench_memory(const std::string& name) {
    return read_file(fmt::format("/proc/{}/maps", agent(name).pid())).find("rekindle-bench") !=
           std::string::npos;
  }
  void expect_nothing_is_left(const Lines& names) {
    for (const auto& name : names) {
      EXPECT_TRUE(eventually([&] { return !has_bench_memory(name); })) << agent(name).err();
    }
  }

  Fleet fleet_;
};

TEST_F(BenchFleet, EveryPairOfAWellFleetIsReadAndNothingIsLeft) {
  start({"a", "b"});
  const auto answer = bench({"--under", "0.01"});
  EXPECT_EQ(answer.exit_code, 0) << answer.json << answer.err;
  ASSERT_EQ(answer.json["pairs"].size(), 2u) << answer.json;
  for (const auto& pair : answer.json["pairs"]) {
    EXPECT_EQ(pair["transport"], "tcp");
    EXPECT_EQ(pair["error"], "");
    EXPECT_GT(pair["bytes_per_second"], 1e6);
  }
  EXPECT_THAT(answer.err, HasSubstr("2 pairs of 2 hosts, one at a time"));
  expect_nothing_is_left({"a", "b"});
}

TEST_F(BenchFleet, ASlowSourceIsNamedAndWhy) {
  start({"a", "b"});
  fleet_.start_agent("c", {"--allow-drills", "--max-rate", "4MB"});
  // On a busy machine the other reads differ by factors; the cap makes this one 1,000 times slower.
  const auto answer = bench({"--under", "0.02"});
  EXPECT_EQ(answer.exit_code, 1) << answer.json << answer.err;
  EXPECT_THAT(answer.json["slow_or_broken"].get<Lines>(),
              Contains(AllOf(HasSubstr("every read from c is slow"), HasSubstr("--max-rate"))))
      << answer.json;
  EXPECT_EQ(answer.json["pairs"].size(), 6u);
}

TEST_F(BenchFleet, AnAgentWithoutAllowDrillsTakesNoPart) {
  start({"a", "b"});
  fleet_.start_agent("c");
  const auto answer = bench({"--under", "0.01"});
  EXPECT_EQ(answer.exit_code, 5) << answer.json << answer.err;
  EXPECT_THAT(answer.json["not_read"].get<Lines>(),
              ElementsAre(AllOf(HasSubstr("c takes no part"), HasSubstr("--allow-drills"))));
  EXPECT_EQ(answer.json["pairs"].size(), 2u);
  const auto alone = bench({"--nodes", "a,c"});
  EXPECT_EQ(alone.exit_code, 5) << alone.json;
  EXPECT_THAT(alone.err, HasSubstr("a read takes two agents with --allow-drills, found 1"));
  EXPECT_EQ(bench({"--nodes", "a,z"}).exit_code, 3);
}

TEST_F(BenchFleet, AnAgentThatIsKilledInTheMiddleIsALineOfTheReport) {
  start({"a", "b", "c"});
  Process command(fleet_.command({"bench", "fleet", "--time", "2s", "--under", "0.01"}));
  ASSERT_TRUE(agent("b").wait_for_err("bench.read source=c")) << command.err();
  agent("c").kill();
  const auto done = command.wait(60s);
  ASSERT_TRUE(done) << command.err();
  EXPECT_EQ(done->code, 5) << command.out();
  const auto report = nlohmann::json::parse(command.out());
  EXPECT_THAT(report["not_read"].get<Lines>(),
              ElementsAre(AllOf(HasSubstr("no pair with c was read"), HasSubstr("not answer"))))
      << report;
  std::size_t read = 0;
  for (const auto& pair : report["pairs"]) read += pair["error"] == "" ? 1 : 0;
  EXPECT_EQ(read, 2u) << report;
  expect_nothing_is_left({"a", "b"});
}

TEST_F(BenchFleet, AnInterruptEndsTheReadsAtOnce) {
  start({"a", "b"});
  Process command(long_bench());
  ASSERT_TRUE(agent("a").wait_for_err("bench.read source=b")) << command.err();
  ASSERT_TRUE(eventually([&] { return has_bench_memory("a") && has_bench_memory("b"); }));
  command.signal(SIGINT);
  const auto done = command.wait();
  ASSERT_TRUE(done) << command.err();
  EXPECT_EQ(done->code, 128 + SIGINT);
  EXPECT_THAT(command.out(),
              HasSubstr("not read: 2 of 2 pairs, because the command was interrupted"));
  expect_nothing_is_left({"a", "b"});
  EXPECT_EQ(bench({"--under", "0.01"}).exit_code, 0);
}

// In the first round a reads from b, and b from c.
TEST_F(BenchFleet, AnInterruptKeepsTheReadsOfItsRoundThatHaveEnded) {
  start({"a", "b", "c"});
  Process command(fleet_.command({"bench", "fleet", "--time", "2s", "--parallel", "2"}));
  ASSERT_TRUE(agent("a").wait_for_err("bench.read source=b")) << command.err();
  agent("a").signal(SIGSTOP);
  ASSERT_TRUE(agent("b").wait_for_err("bench.has_read source=c")) << command.err();
  // Its answer to the benchmark is older than this one.
  EXPECT_EQ(fleet_.run_command({"status", "--agent", fleet_.agent("b").control}).exit_code, 0);
  command.signal(SIGINT);
  const auto done = command.wait();
  agent("a").signal(SIGCONT);
  ASSERT_TRUE(done) << command.err();
  EXPECT_EQ(done->code, 128 + SIGINT);
  const auto report = nlohmann::json::parse(command.out());
  ASSERT_EQ(report["pairs"].size(), 1u) << report;
  EXPECT_EQ(report["pairs"][0]["reader"], "b");
  EXPECT_EQ(report["pairs"][0]["error"], "");
}

TEST_F(BenchFleet, TheReadsOfACommandThatIsGoneEnd) {
  start({"a", "b"});
  Process command(long_bench());
  ASSERT_TRUE(agent("a").wait_for_err("bench.read source=b")) << command.err();
  ASSERT_TRUE(eventually([&] { return has_bench_memory("a") && has_bench_memory("b"); }));
  command.kill();
  expect_nothing_is_left({"a", "b"});
}

TEST_F(BenchFleet, ItWaitsForPullsUnlessItIsForced) {
  make_checkpoint(fleet_.dir("model"), 8, 2048, 9);
  start({"b"});
  fleet_.start_agent("a", {"--allow-drills", "--max-rate", "1MB"});
  fleet_.publish("a", "m@1", fleet_.dir("model"));
  Process pull(
      fleet_.command({"pull", "m@1", "--transport", "tcp", "--to", fleet_.dir("copy").string(),
                      "--store", fleet_.dir("store-p").string()}));
  const auto busy = [&] { return bench({"--dry-run"}).exit_code == 5; };
  ASSERT_TRUE(eventually(busy)) << pull.err();
  EXPECT_THAT(bench().err, HasSubstr("give --force")) << pull.err();
  EXPECT_EQ(bench({"--force", "--under", "0.01"}).json["pairs"].size(), 2u);
}

TEST_F(BenchFleet, WhatMakesNoSenseIsRefused) {
  start({"a"});
  EXPECT_EQ(fleet_.run_command({"bench", "fleet", "--time", "31s"}).exit_code, 2);
  EXPECT_EQ(bench({"--under", "1"}).exit_code, 2);
  EXPECT_EQ(bench({"--transport", "shm"}).exit_code, 2);
  EXPECT_EQ(bench().exit_code, 5);
}

}  // namespace
}  // namespace rekindle::testing
