// Agents that pull the same thing at once feed each other: real agents, real sockets.
#include <thread>

#include <gtest/gtest.h>

#include "tests/support/fleet.h"

namespace rekindle::testing {
namespace {

namespace fs = std::filesystem;

// 96 MiB at 8 MB/s from the source alone would take 12 s for each.
class SwarmFleet : public ::testing::Test {
 protected:
  void SetUp() override { start(8); }
  void start(int places) {
    fleet_.start_coordinator("127.0.0.1", {"--max-pullers", std::to_string(places)});
    total_bytes_ = make_checkpoint(fleet_.dir("model"), 12, 4096, 11);
  }

  void start_source(const std::vector<std::string>& more = {}) {
    std::vector<std::string> options = {"--max-rate", "8MB"};
    options.insert(options.end(), more.begin(), more.end());
    fleet_.start_agent("source", options);
    fleet_.publish("source", "m@1", fleet_.dir("model"));
  }

  void start_joiners(int count) {
    for (int i = 0; i < count; ++i) {
      const std::string name = "joiner" + std::to_string(names_.size());
      const auto& agent = fleet_.start_agent(name);
      names_.push_back(name);
      pulls_.push_back(std::make_unique<Process>(
          fleet_.command({"pull", "m@1", "--store", agent.store.string(), "--transport", "tcp"})));
    }
  }

  Fleet::Answer finish(std::size_t joiner) {
    Process& pull = *pulls_[joiner];
    const auto exit = pull.wait(90'000ms);
    Finished finished{exit.value_or(Exit{}), !exit, pull.out(), pull.err()};
    return Fleet::answer_of(finished);
  }

  fs::path copy_of(std::size_t joiner) {
    return find_file(fleet_.agent(names_[joiner]).store / "models", "rekindle.manifest")
        .parent_path();
  }

  void expect_complete(std::size_t joiner, const Fleet::Answer& answer) {
    ASSERT_EQ(answer.exit_code, 0) << names_[joiner] << ": " << answer.err;
    EXPECT_EQ(compare_checkpoints(fleet_.dir("model"), copy_of(joiner)), "");
  }

  static std::uint64_t bytes_from(const Fleet::Answer& answer, const std::string& name) {
    std::uint64_t bytes = 0;
    for (const auto& source : answer.json.value("sources", nlohmann::json::array())) {
      if (source["name"] == name) bytes += source["bytes"].get<std::uint64_t>();
    }
    return bytes;
  }

  // Some joiner has taken the others in.
  void wait_for_trade(std::size_t joiner) {
    ASSERT_TRUE(fleet_.agent(names_[joiner]).process->wait_for_err("pull.source_joined"));
  }

  Fleet fleet_;
  std::uint64_t total_bytes_ = 0;
  std::vector<std::string> names_;
  std::vector<std::unique_ptr<Process>> pulls_;
};

class SwarmFleetWithOnePlace : public SwarmFleet {
 protected:
  void SetUp() override { start(1); }
};

TEST_F(SwarmFleet, JoinersTakeFromEachOtherWhatTheSourceGaveOnlyOnce) {
  start_source();
  start_joiners(3);
  std::uint64_t from_source = 0;
  for (std::size_t i = 0; i < 3; ++i) {
    const auto answer = finish(i);
    ASSERT_NO_FATAL_FAILURE(expect_complete(i, answer));
    const std::uint64_t ours = bytes_from(answer, "source");
    EXPECT_LT(ours, answer.json["bytes"].get<std::uint64_t>()) << names_[i];
    EXPECT_EQ(answer.json["refetched_bytes"], 0) << answer.json;
    from_source += ours;
  }
  EXPECT_LT(from_source, 3 * total_bytes_ * 3 / 4);
}

TEST_F(SwarmFleet, Row1AKilledJoinerStopsNobody) {
  start_source();
  start_joiners(3);
  ASSERT_NO_FATAL_FAILURE(wait_for_trade(0));
  std::this_thread::sleep_for(500ms);
  fleet_.agent(names_[2]).process->kill();
  for (std::size_t i = 0; i < 2; ++i) {
    ASSERT_NO_FATAL_FAILURE(expect_complete(i, finish(i)));
  }
}

// What has been given before is shared; what nobody has is named, and nothing is activated.
TEST_F(SwarmFleet, Row13WhenTheSourceIsKilledTheJoinersEndWithTheRightBytesOrWithoutActivatingAny) {
  start_source();
  start_joiners(3);
  ASSERT_NO_FATAL_FAILURE(wait_for_trade(0));
  std::this_thread::sleep_for(500ms);
  fleet_.agent("source").process->kill();
  for (std::size_t i = 0; i < 3; ++i) {
    const auto answer = finish(i);
    if (answer.exit_code == 0) {
      ASSERT_NO_FATAL_FAILURE(expect_complete(i, answer));
      continue;
    }
    EXPECT_NE(answer.err.find("NO_SOURCE"), std::string::npos) << answer.err;
    EXPECT_THROW(copy_of(i), std::runtime_error);
  }
}

TEST_F(SwarmFleet, Row14WhoIsRefusedByTheSourceIsFilledByWhoWasFirst) {
  start_source({"--max-pullers", "1"});
  start_joiners(1);
  ASSERT_TRUE(fleet_.agent("source").process->wait_for_err("session.open"));
  start_joiners(1);
  const auto second = finish(1);
  ASSERT_NO_FATAL_FAILURE(expect_complete(1, second));
  EXPECT_GT(bytes_from(second, names_[0]), 0u);
  ASSERT_NO_FATAL_FAILURE(expect_complete(0, finish(0)));
}

// The coordinator offers it nobody but the joiner, which is behind: that is waited for.
TEST_F(SwarmFleetWithOnePlace, TheFallbackIsNotReadWhileTheOnlySourceIsBeingFilled) {
  start_source();
  start_joiners(1);
  ASSERT_TRUE(fleet_.agent("source").process->wait_for_err("session.open"));
  ASSERT_TRUE(fleet_.agent(names_[0]).process->wait_for_err("coordinator.connected"));
  const auto answer =
      fleet_.run_command({"pull", "m@1", "--to", fleet_.dir("out").string(), "--transport", "tcp",
                          "--fallback", fleet_.dir("model").string()});
  ASSERT_EQ(answer.exit_code, 0) << answer.err;
  EXPECT_EQ(compare_checkpoints(fleet_.dir("model"), fleet_.dir("out")), "");
  EXPECT_EQ(bytes_from(answer, fleet_.dir("model").string()), 0u) << answer.json;
}

TEST_F(SwarmFleet, ALateJoinerWithoutTheSourceIsFilledByThoseThatHaveIt) {
  start_source();
  start_joiners(1);
  ASSERT_NO_FATAL_FAILURE(expect_complete(0, finish(0)));
  fleet_.agent("source").process->kill();
  const auto& late = fleet_.start_agent("late");
  const auto answer =
      fleet_.run_command({"pull", "m@1", "--store", late.store.string(), "--transport", "tcp"});
  ASSERT_EQ(answer.exit_code, 0) << answer.err;
  EXPECT_EQ(bytes_from(answer, names_[0]), answer.json["bytes"].get<std::uint64_t>());
}

}  // namespace
}  // namespace rekindle::testing
