// Bytes of a committed copy go wrong at rest while somebody reads it: a pull by a peer over tcp or
// shm, or a worker. The agent finds and mends them; readers get the published bytes or an error.
#include <csignal>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <gmock/gmock.h>

#include "tests/proc/worker_fixture.h"
#include "tests/support/rot.h"

namespace rekindle::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::Contains;
using ::testing::HasSubstr;

class WithRot : public WithWorkers {
 protected:
  // Holds m@1.
  void start_holder(const std::string& name, std::vector<std::string> more,
                    std::vector<std::string> under = {}) {
    fleet_.start_agent(name, std::move(more), "127.0.0.1:0", std::move(under));
    fleet_.publish(name, "m@1", fleet_.dir("model"));
  }
  fs::path segment_of(const std::string& agent) {
    return find_file(fleet_.agent(agent).store / "models", "model.safetensors");
  }
  // Of m@1 as the agent's status has it.
  nlohmann::json copy_at(const std::string& agent) {
    const auto now = status(agent);
    if (!now.is_object() || now.value("copies", nlohmann::json::array()).empty()) return {};
    return now["copies"][0];
  }
  bool eventually_copy(const std::string& agent, const std::string& state,
                       const std::string& found) {
    return eventually(
        [&] {
          const auto copy = copy_at(agent);
          return copy.is_object() && copy["state"] == state &&
                 copy["found"].get<std::string>().find(found) != std::string::npos;
        },
        3 * kPatience);
  }
  std::vector<std::string> kinds_of_events(const std::string& agent) {
    std::vector<std::string> kinds;
    for (const auto& event : events_of(agent)) kinds.push_back(event["event"]);
    return kinds;
  }
  // Oracle: the published files.
  void expect_mended(const std::string& agent) {
    ASSERT_TRUE(eventually_copy(agent, "verified", "mended from peers")) << copy_at(agent).dump();
    EXPECT_THAT(copy_at(agent)["found"].get<std::string>(), HasSubstr("wrong: "));
    EXPECT_EQ(compare_checkpoints(fleet_.dir("model"), segment_of(agent).parent_path()), "");
    const auto kinds = kinds_of_events(agent);
    EXPECT_THAT(kinds, Contains("copy_rotten"));
    EXPECT_THAT(kinds, Contains("copy_mended"));
  }
};

// The pull is in its middle when the bits flip. Over tcp the sources are slow. Over shm a copy is
// over in a moment: the puller is stopped, and goes on when the agent has found the rot.
class RotUnderPull : public WithRot, public ::testing::WithParamInterface<const char*> {
 protected:
  bool is_tcp() const { return std::string(GetParam()) == "tcp"; }

  void SetUp() override {
    // 12 MiB at 4 MB/s, or 256 MiB.
    if (is_tcp()) {
      make_checkpoint(fleet_.dir("model"), 12, 512, 7);
    } else {
      make_checkpoint(fleet_.dir("model"), 128, 1024, 7);
    }
    fleet_.start_coordinator();
  }
  void start_sources(const std::vector<std::string>& names, std::vector<std::string> more,
                     const std::vector<std::string>& under) {
    if (is_tcp()) more.insert(more.end(), {"--max-rate", "4MB"});
    for (const auto& name : names) start_holder(name, more, under);
  }
  // In each eighth of the file, the first tensor among them, which is scrubbed first.
  std::vector<std::uint64_t> places() {
    const std::uint64_t size = fs::file_size(segment_of("b"));
    std::vector<std::uint64_t> places;
    for (std::uint64_t i = 0; i < 8; ++i) places.push_back(100'000 + i * (size / 8));
    return places;
  }
  std::vector<std::string> pull_arguments() const {
    return {"pull", "m@1", "--to", fleet_.dir("out").string(), "--transport", GetParam()};
  }
  // It reads from b, and maybe from others.
  std::unique_ptr<Process> pull_in_its_middle() {
    const Spawn command = fleet_.command(pull_arguments());
    std::unique_ptr<Process> pull;
    if (is_tcp()) {
      pull = std::make_unique<Process>(command);
      (void)eventually([&] { return !pull->running() || verified_share(fleet_.dir("out")) > 0; });
      EXPECT_TRUE(pull->running()) << pull->err();
    } else {
      pull = stopped_pull(command, fleet_.dir("out"));
    }
    EXPECT_TRUE(eventually([&] { return fleet_.agent("b").sessions_opened() > 0; }));
    return pull;
  }
  Fleet::Answer end_of(Process& pull) {
    pull.signal(SIGCONT);
    const auto exit = pull.wait(3 * kPatience);
    EXPECT_TRUE(!exit || exit->signal == 0) << "it crashed: signal " << exit->signal;
    return Fleet::answer_of({exit.value_or(Exit{}), !exit, pull.out(), pull.err()});
  }
  void expect_complete(const Fleet::Answer& answer) {
    ASSERT_EQ(answer.exit_code, 0) << answer.err;
    EXPECT_EQ(compare_checkpoints(fleet_.dir("model"), fleet_.dir("out")), "");
  }
  Finished repair(const std::string& agent) {
    return run({rekindle_program(), "verify", "--repair", "m@1", "--store",
                fleet_.agent(agent).store.string()},
               3 * kPatience);
  }
  // b has its copy from a former life, in files through which bits flip without a stamp.
  std::unique_ptr<SilentFlips> start_b_with_bad_memory(std::vector<std::string> more) {
    start_sources({"b"}, {}, {});
    fleet_.agent("b").process->kill();
    auto memory = std::make_unique<SilentFlips>(segment_of("b"));
    if (is_tcp()) more.insert(more.end(), {"--max-rate", "4MB"});
    fleet_.start_agent("b", std::move(more), "127.0.0.1:0", Fleet::without_leases());
    EXPECT_TRUE(eventually_copy("b", "verified", "")) << copy_at("b").dump();
    return memory;
  }
};

INSTANTIATE_TEST_SUITE_P(Transports, RotUnderPull, ::testing::Values("tcp", "shm"),
                         [](const auto& test) { return std::string(test.param); });

TEST_P(RotUnderPull, TheScrubberMendsACopyThatIsBeingPulledFrom) {
  start_sources({"a"}, {}, {});
  auto memory = start_b_with_bad_memory({"--scrub", "100ms"});
  const auto pull = pull_in_its_middle();
  ASSERT_NE(pull, nullptr);
  for (const auto at : places()) memory->flip(at);
  memory.reset();
  if (!is_tcp()) {
    ASSERT_NO_FATAL_FAILURE(expect_mended("b"));
  }
  ASSERT_NO_FATAL_FAILURE(expect_complete(end_of(*pull)));
  ASSERT_NO_FATAL_FAILURE(expect_mended("b"));
}

TEST_P(RotUnderPull, RepairOnDemandMendsACopyThatIsBeingPulledFrom) {
  start_sources({"a"}, {}, {});
  auto memory = start_b_with_bad_memory({"--scrub", "off"});
  const auto pull = pull_in_its_middle();
  ASSERT_NE(pull, nullptr);
  for (const auto at : places()) memory->flip(at);
  memory.reset();
  const auto repaired = repair("b");
  EXPECT_EQ(repaired.exit.code, 0) << repaired.err;
  EXPECT_THAT(repaired.out, HasSubstr("mended from peers"));
  ASSERT_NO_FATAL_FAILURE(expect_complete(end_of(*pull)));
  ASSERT_NO_FATAL_FAILURE(expect_mended("b"));
}

// The puller may still have the file mapped into which the right bytes are written.
TEST_P(RotUnderPull, AWrittenFileIsMendedInPlaceBelowItsReader) {
  start_sources({"a", "b"}, {}, {});
  struct stat before {};
  ASSERT_EQ(::stat(segment_of("b").c_str(), &before), 0);
  const auto pull = pull_in_its_middle();
  ASSERT_NE(pull, nullptr);
  for (const auto at : places()) ASSERT_NO_FATAL_FAILURE(flip_by_write(segment_of("b"), at));
  if (!is_tcp()) {
    ASSERT_NO_FATAL_FAILURE(expect_mended("b"));
  }
  ASSERT_NO_FATAL_FAILURE(expect_complete(end_of(*pull)));
  ASSERT_NO_FATAL_FAILURE(expect_mended("b"));
  struct stat after {};
  ASSERT_EQ(::stat(segment_of("b").c_str(), &after), 0);
  EXPECT_EQ(after.st_ino, before.st_ino);
}

TEST_P(RotUnderPull, TheOnlyCopyIsLostToThePullWithTheNameOfATensor) {
  auto memory = start_b_with_bad_memory({"--scrub", "off"});
  const auto pull = pull_in_its_middle();
  ASSERT_NE(pull, nullptr);
  for (const auto at : places()) memory->flip(at);
  memory.reset();
  const auto repaired = repair("b");
  EXPECT_EQ(repaired.exit.code, 4) << repaired.out << repaired.err;
  const auto answer = end_of(*pull);
  EXPECT_NE(answer.exit_code, 0);
  EXPECT_THAT(answer.err, HasSubstr("model.layers."));
  EXPECT_FALSE(fs::exists(fleet_.dir("out") / "model.safetensors"));
  EXPECT_NE(copy_at("b").value("state", ""), "verified") << copy_at("b").dump();
}

class RotUnderWorker : public WithRot {
 protected:
  void SetUp() override {
    make_checkpoint(fleet_.dir("model"), 8, 1024, 7);
    fleet_.start_coordinator();
  }
  std::unique_ptr<Process> worker_that_has_read(const std::string& agent) {
    auto one = worker(agent, {"wait", fleet_.dir("go").string()});
    EXPECT_TRUE(one->wait_for_out("took all")) << one->out() << one->err();
    return one;
  }
  void expect_refused(Process& worker) {
    EXPECT_TRUE(worker.wait_for_out("lost ")) << worker.out() << worker.err();
    EXPECT_EQ(worker.out().find("ready m@1"), std::string::npos) << worker.out();
  }
};

TEST_F(RotUnderWorker, AFileThatWasChangedWhileItWasReadCommitsNoWorker) {
  start_holder("a", {});
  start_holder("b", {});
  const auto one = worker_that_has_read("b");
  flip_by_write(segment_of("b"), 5 << 20);
  write_file(fleet_.dir("go"), "");
  expect_refused(*one);
  ASSERT_NO_FATAL_FAILURE(expect_mended("b"));
  const auto again = worker("b");
  const auto right = worker("a");
  const std::string sum = sum_of(*right);
  EXPECT_EQ(sum.size(), 32u) << right->out() << right->err();
  EXPECT_EQ(sum_of(*again), sum) << again->out() << again->err();
}

TEST_F(RotUnderWorker, WhatTheScrubberFindsWhileAWorkerReadsCommitsNoWorker) {
  start_holder("a", {});
  start_holder("b", {});
  fleet_.agent("b").process->kill();
  auto memory = std::make_unique<SilentFlips>(segment_of("b"));
  fleet_.start_agent("b", {"--scrub", "100ms"}, "127.0.0.1:0", Fleet::without_leases());
  ASSERT_TRUE(eventually_copy("b", "verified", "")) << copy_at("b").dump();
  const auto one = worker_that_has_read("b");
  memory->flip(100'000);
  memory->flip(5 << 20);
  memory.reset();
  ASSERT_NO_FATAL_FAILURE(expect_mended("b"));
  write_file(fleet_.dir("go"), "");
  expect_refused(*one);
  const auto again = worker("b");
  EXPECT_EQ(sum_of(*again).size(), 32u) << again->out() << again->err();
}

}  // namespace
}  // namespace rekindle::testing
