// The faults of source_faults_test.cc where puller and source share a host and the bytes go through
// shared memory. A copy is over in a moment: the puller is stopped in the middle of it, then
// something breaks, then it goes on.
#include <csignal>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/fleet.h"
#include "tests/support/rot.h"

namespace rekindle::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class ShmFaults : public ::testing::Test {
 protected:
  void SetUp() override {
    fleet_.start_coordinator();
    make_checkpoint(fleet_.dir("model"), 192, 1024, 7);  // 384 MiB
  }

  void start_sources(const std::vector<std::string>& names) {
    for (const auto& name : names) {
      fleet_.start_agent(name);
      fleet_.publish(name, "m@1", fleet_.dir("model"));
    }
  }

  std::vector<std::string> pull_arguments(std::vector<std::string> more = {}) const {
    std::vector<std::string> arguments = {"pull",        "m@1", "--to", fleet_.dir("out").string(),
                                          "--transport", "shm"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  }

  std::unique_ptr<Process> stopped_pull(const std::vector<std::string>& more = {}) {
    return testing::stopped_pull(fleet_.command(pull_arguments(more)), fleet_.dir("out"));
  }

  static Fleet::Answer go_on(Process& pull) {
    pull.signal(SIGCONT);
    const auto exit = pull.wait(60'000ms);
    EXPECT_TRUE(!exit || exit->signal == 0) << "it crashed: signal " << exit->signal;
    return Fleet::answer_of({exit.value_or(Exit{}), !exit, pull.out(), pull.err()});
  }

  void expect_complete(const Fleet::Answer& answer) {
    ASSERT_EQ(answer.exit_code, 0) << answer.err;
    EXPECT_EQ(compare_checkpoints(fleet_.dir("model"), fleet_.dir("out")), "");
    for (const auto& source : answer.json["sources"]) {
      if (source["bytes"] > 0) {
        EXPECT_THAT(source["transport"].get<std::string>(), ::testing::AnyOf("shm", "local"));
      }
    }
  }
  // Nothing was fetched twice.
  static void expect_no_waste(const Fleet::Answer& answer) {
    EXPECT_EQ(answer.json["refetched_bytes"], 0);
    EXPECT_EQ(answer.json["fetched_bytes"].get<std::uint64_t>() +
                  answer.json["resumed_bytes"].get<std::uint64_t>(),
              answer.json["bytes"].get<std::uint64_t>());
  }

  static nlohmann::json source_of(const Fleet::Answer& answer, const std::string& name) {
    for (const auto& source : answer.json.value("sources", nlohmann::json::array())) {
      if (source["name"] == name) return source;
    }
    return {{"bytes", 0}, {"lost", false}, {"cause", ""}};
  }

  fs::path segment_of(const std::string& agent) {
    return find_file(fleet_.agent(agent).store / "models", "model.safetensors");
  }

  Fleet fleet_;
};

TEST_F(ShmFaults, Row1SourceKilledMidCopyIsReplacedByTheOther) {
  start_sources({"a", "b"});
  const auto pull = stopped_pull();
  ASSERT_NE(pull, nullptr);
  fleet_.agent("a").process->kill();
  const auto answer = go_on(*pull);
  ASSERT_NO_FATAL_FAILURE(expect_complete(answer));
  EXPECT_TRUE(source_of(answer, "a")["lost"]) << answer.json;
  EXPECT_GT(source_of(answer, "b")["bytes"], 0);
  expect_no_waste(answer);
}

// Row 3: what is mapped can be read on, and what cannot goes elsewhere.
TEST_F(ShmFaults, Row3FrozenSourceDoesNotHoldThePullUp) {
  start_sources({"a", "b"});
  const auto pull = stopped_pull();
  ASSERT_NE(pull, nullptr);
  fleet_.agent("a").process->signal(SIGSTOP);
  const auto answer = go_on(*pull);
  fleet_.agent("a").process->signal(SIGCONT);
  ASSERT_NO_FATAL_FAILURE(expect_complete(answer));
  expect_no_waste(answer);
}

TEST_F(ShmFaults, Row4RestartedSourceIsAStrangerAndItsKeysAreNotReused) {
  start_sources({"a"});
  const std::string address = fleet_.agent("a").control;
  const auto pull = stopped_pull();
  ASSERT_NE(pull, nullptr);
  fleet_.agent("a").process->kill();
  fleet_.start_agent("a", {}, address);
  const auto answer = go_on(*pull);
  ASSERT_NO_FATAL_FAILURE(expect_complete(answer));
  expect_no_waste(answer);
}

TEST_F(ShmFaults, Row13AllSourcesLostNamesWhatNobodyHolds) {
  start_sources({"a"});
  const auto pull = stopped_pull();
  ASSERT_NE(pull, nullptr);
  fleet_.agent("a").process->kill();
  const auto answer = go_on(*pull);
  EXPECT_EQ(answer.exit_code, 3) << answer.err;
  EXPECT_THAT(answer.err, HasSubstr("NO_SOURCE"));
  EXPECT_THAT(answer.err, HasSubstr("model.layers."));
  EXPECT_FALSE(fs::exists(fleet_.dir("out") / "rekindle.manifest"));
}

// Row 13 with a fallback directory.
TEST_F(ShmFaults, Row13AllSourcesLostFallsBackToTheDirectory) {
  start_sources({"a"});
  const auto pull = stopped_pull({"--fallback", fleet_.dir("model").string()});
  ASSERT_NE(pull, nullptr);
  fleet_.agent("a").process->kill();
  const auto answer = go_on(*pull);
  ASSERT_NO_FATAL_FAILURE(expect_complete(answer));
  EXPECT_EQ(answer.json["refetched_bytes"], 0);
}

TEST_F(ShmFaults, Row25CoordinatorKilledMidCopyChangesNothing) {
  start_sources({"a"});
  const auto pull = stopped_pull();
  ASSERT_NE(pull, nullptr);
  fleet_.coordinator().kill();
  const auto answer = go_on(*pull);
  ASSERT_NO_FATAL_FAILURE(expect_complete(answer));
  expect_no_waste(answer);
}

TEST_F(ShmFaults, Row48SegmentTruncatedUnderTheMappingIsReadElsewhere) {
  start_sources({"a", "b"});
  const auto pull = stopped_pull();
  ASSERT_NE(pull, nullptr);
  fs::resize_file(segment_of("a"), 4096);
  const auto answer = go_on(*pull);
  ASSERT_NO_FATAL_FAILURE(expect_complete(answer));
  EXPECT_TRUE(source_of(answer, "a")["lost"]) << answer.json;
  EXPECT_TRUE(fleet_.agent("a").process->running());
}

// Row 48 without another source: an error, and nobody crashes.
TEST_F(ShmFaults, Row48TheOnlySegmentTruncatedIsAnErrorNotACrash) {
  start_sources({"a"});
  const auto pull = stopped_pull();
  ASSERT_NE(pull, nullptr);
  fs::resize_file(segment_of("a"), 4096);
  const auto answer = go_on(*pull);
  EXPECT_EQ(answer.exit_code, 3) << answer.err;
  EXPECT_THAT(answer.err, HasSubstr("model.layers."));
  EXPECT_TRUE(fleet_.agent("a").process->running());
  EXPECT_FALSE(fs::exists(fleet_.dir("out") / "rekindle.manifest"));
}

// Row 48 at the puller's end: nobody is to blame but who cut the file, and the same command goes
// on.
TEST_F(ShmFaults, Row48ADestinationCutShortEndsThePullAndBlamesNoSource) {
  start_sources({"a"});
  const auto pull = stopped_pull();
  ASSERT_NE(pull, nullptr);
  fs::resize_file(find_file(fleet_.dir("out"), "model.safetensors.partial"), 4096);
  const auto answer = go_on(*pull);
  EXPECT_EQ(answer.exit_code, 1) << answer.err;
  EXPECT_THAT(answer.err, HasSubstr("another process changed it"));
  EXPECT_THAT(answer.err, ::testing::Not(HasSubstr("quarantine")));
  EXPECT_FALSE(fs::exists(fleet_.dir("out") / "rekindle.manifest"));
  const auto again = fleet_.run_command(pull_arguments());
  ASSERT_NO_FATAL_FAILURE(expect_complete(again));
  EXPECT_EQ(again.json["refetched_bytes"], 0);
}

TEST_F(ShmFaults, Row52PullKilledHalfwayResumesWhereItWas) {
  start_sources({"a"});
  const auto pull = stopped_pull();
  ASSERT_NE(pull, nullptr);
  pull->kill();
  const auto answer = fleet_.run_command(pull_arguments());
  ASSERT_NO_FATAL_FAILURE(expect_complete(answer));
  EXPECT_GT(answer.json["resumed_bytes"], 0);
  expect_no_waste(answer);
}

}  // namespace
}  // namespace rekindle::testing
