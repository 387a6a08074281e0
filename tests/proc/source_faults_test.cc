// What happens to a pull when its sources die, freeze, lie or crawl: real agents, real sockets.
#include <thread>

#include <gtest/gtest.h>

#include "tests/support/fault_proxy.h"
#include "tests/support/fleet.h"

namespace rekindle::testing {
namespace {

namespace fs = std::filesystem;

// 96 MiB through two sources at 24 MB/s each takes about two seconds: time to break something.
const std::vector<std::string> kSlowly = {"--max-rate", "24MB"};

class SourceFaults : public ::testing::Test {
 protected:
  void SetUp() override {
    fleet_.start_coordinator();
    total_bytes_ = make_checkpoint(fleet_.dir("model"), 12, 4096, 7);
  }

  void start_sources(const std::vector<std::string>& names,
                     const std::vector<std::string>& options) {
    for (const auto& name : names) {
      fleet_.start_agent(name, options);
      fleet_.publish(name, "m@1", fleet_.dir("model"));
    }
  }

  std::unique_ptr<Process> start_pull(std::vector<std::string> more = {}) {
    std::vector<std::string> arguments = {"pull",        "m@1", "--to", fleet_.dir("out").string(),
                                          "--transport", "tcp"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return std::make_unique<Process>(fleet_.command(arguments));
  }

  // Until some tiles are in: the fault then hits the middle of the transfer.
  void wait_for_data(const std::string& source) {
    ASSERT_TRUE(fleet_.agent(source).process->wait_for_err("session.open"));
    std::this_thread::sleep_for(300ms);
  }

  Fleet::Answer finish(Process& pull) {
    const auto exit = pull.wait(60'000ms);
    Finished finished{exit.value_or(Exit{}), !exit, pull.out(), pull.err()};
    return Fleet::answer_of(finished);
  }

  void expect_complete(const Fleet::Answer& answer) {
    ASSERT_EQ(answer.exit_code, 0) << answer.err;
    EXPECT_EQ(compare_checkpoints(fleet_.dir("model"), fleet_.dir("out")), "");
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
  std::uint64_t total_bytes_ = 0;
};

TEST_F(SourceFaults, Row1SourceKilledMidReadIsReplacedByTheOther) {
  start_sources({"a", "b"}, kSlowly);
  auto pull = start_pull();
  wait_for_data("a");
  fleet_.agent("a").process->kill();
  const auto answer = finish(*pull);
  ASSERT_NO_FATAL_FAILURE(expect_complete(answer));
  EXPECT_GT(source_of(answer, "b")["bytes"], 0);
  // What had landed from the dead source stays; only what was in flight there is fetched again.
  EXPECT_EQ(answer.json["refetched_bytes"], 0);
  EXPECT_EQ(answer.json["fetched_bytes"], answer.json["bytes"]);
}

TEST_F(SourceFaults, Row3FrozenSourceDoesNotHoldThePullUp) {
  start_sources({"a", "b"}, kSlowly);
  auto pull = start_pull();
  wait_for_data("a");
  fleet_.agent("a").process->signal(SIGSTOP);
  const auto answer = finish(*pull);
  fleet_.agent("a").process->signal(SIGCONT);
  ASSERT_NO_FATAL_FAILURE(expect_complete(answer));
}

TEST_F(SourceFaults, Row4RestartedSourceIsAStrangerAndItsKeysAreNotReused) {
  start_sources({"a"}, kSlowly);
  const std::string address = fleet_.agent("a").control;
  auto pull = start_pull();
  wait_for_data("a");
  fleet_.agent("a").process->kill();
  fleet_.start_agent("a", kSlowly, address);
  const auto answer = finish(*pull);
  ASSERT_NO_FATAL_FAILURE(expect_complete(answer));
  EXPECT_EQ(answer.json["refetched_bytes"], 0);
}

// What is retired under a pull ends it; nothing of it is activated.
TEST_F(SourceFaults, Row6RetiringAVersionUnderAPullEndsItAndActivatesNothing) {
  start_sources({"a"}, {"--max-rate", "4MB"});
  auto pull = start_pull();
  wait_for_data("a");
  const auto retired =
      fleet_.run_command({"retire", "m@1", "--store", fleet_.agent("a").store.string()});
  ASSERT_EQ(retired.exit_code, 0) << retired.err;
  const auto answer = finish(*pull);
  EXPECT_EQ(answer.exit_code, 3) << answer.err;
  EXPECT_NE(answer.err.find("NO_SOURCE"), std::string::npos) << answer.err;
  EXPECT_FALSE(fs::exists(fleet_.dir("out") / "model.safetensors"));
  EXPECT_TRUE(fleet_.agent("a").process->running());
}

// `latest` is what it was when the pull began, to the last byte.
TEST_F(SourceFaults, Row6AVersionThatComesUnderAPullIsNotMixedWithIt) {
  start_sources({"a"}, kSlowly);
  Process pull(
      fleet_.command({"pull", "m", "--to", fleet_.dir("out").string(), "--transport", "tcp"}));
  wait_for_data("a");
  make_checkpoint(fleet_.dir("next"), 12, 4096, 8);
  fleet_.publish("a", "m@2", fleet_.dir("next"));
  const auto answer = finish(pull);
  ASSERT_NO_FATAL_FAILURE(expect_complete(answer));
  EXPECT_EQ(answer.json["version"], 1) << answer.json;
}

TEST_F(SourceFaults, Row7APullerThatIsKilledGivesItsPlaceBack) {
  start_sources({"a"}, {"--max-rate", "24MB", "--max-pullers", "1"});
  auto pull = start_pull();
  wait_for_data("a");
  pull->kill();
  EXPECT_TRUE(fleet_.agent("a").process->wait_for_err("session.end"));
  auto again = start_pull();
  const auto answer = finish(*again);
  ASSERT_NO_FATAL_FAILURE(expect_complete(answer));
  EXPECT_GT(answer.json["resumed_bytes"], 0) << "what had verified was fetched again";
}

// The only place is taken for 12 s, which is longer than nobody's silence may last.
class BusySource : public SourceFaults {
 protected:
  void SetUp() override {
    fleet_.start_coordinator("127.0.0.1", {"--max-pullers", "1"});
    total_bytes_ = make_checkpoint(fleet_.dir("model"), 12, 4096, 7);
    start_sources({"a"}, {"--max-rate", "8MB"});
    first_ = std::make_unique<Process>(fleet_.command(
        {"pull", "m@1", "--to", fleet_.dir("first").string(), "--transport", "tcp"}));
    wait_for_data("a");
  }
  std::unique_ptr<Process> first_;
};

TEST_F(BusySource, Row14APullThatFindsNoPlaceWaitsForOneAndSaysSo) {
  auto second = start_pull();
  EXPECT_TRUE(second->wait_for_err("all sources are busy"));
  EXPECT_EQ(finish(*first_).exit_code, 0);
  const auto answer = finish(*second);
  ASSERT_NO_FATAL_FAILURE(expect_complete(answer));
  EXPECT_EQ(source_of(answer, "a")["bytes"], answer.json["bytes"]) << answer.json;
}

TEST_F(BusySource, Row14ACoordinatorThatIsKilledEndsTheQueue) {
  auto second = start_pull();
  EXPECT_TRUE(second->wait_for_err("all sources are busy"));
  fleet_.coordinator().kill();
  const auto answer = finish(*second);
  EXPECT_EQ(answer.exit_code, 3) << answer.err;
  EXPECT_NE(answer.err.find("NO_SOURCE"), std::string::npos) << answer.err;
  EXPECT_EQ(finish(*first_).exit_code, 0);
}

TEST_F(BusySource, Row14WhoHasAFallbackDoesNotWaitInTheQueue) {
  auto second = start_pull({"--fallback", fleet_.dir("model").string()});
  EXPECT_TRUE(second->wait_for_err(fleet_.dir("model").string())) << second->err();
  EXPECT_TRUE(first_->running()) << "its place was not waited for";
  const auto answer = finish(*second);
  ASSERT_NO_FATAL_FAILURE(expect_complete(answer));
}

TEST_F(SourceFaults, Row9BitFlippedOnTheWireIsFetchedAgain) {
  auto& probe = fleet_.start_agent("probe");
  const auto port = std::stoi(probe.data.substr(probe.data.rfind(':') + 1));
  probe.process->kill();
  FaultProxy proxy(static_cast<std::uint16_t>(port));
  fleet_.start_agent("a", {"--data-listen", "127.0.0.1:" + std::to_string(port), "--data-advertise",
                           proxy.address()});
  fleet_.publish("a", "m@1", fleet_.dir("model"));
  proxy.flip_bits(1, 1 << 20);
  auto pull = start_pull();
  const auto answer = finish(*pull);
  ASSERT_NO_FATAL_FAILURE(expect_complete(answer));
  EXPECT_EQ(proxy.flipped(), 1);
  EXPECT_GT(answer.json["refetched_bytes"], 0);
}

TEST_F(SourceFaults, Row36FlappingSourceThatDeliversIsNotGivenUp) {
  auto& probe = fleet_.start_agent("probe");
  const auto port = std::stoi(probe.data.substr(probe.data.rfind(':') + 1));
  probe.process->kill();
  FaultProxy proxy(static_cast<std::uint16_t>(port));
  fleet_.start_agent("a", {"--data-listen", "127.0.0.1:" + std::to_string(port), "--data-advertise",
                           proxy.address(), "--max-rate", "24MB"});
  fleet_.publish("a", "m@1", fleet_.dir("model"));
  auto pull = start_pull();
  for (int cut = 0; cut < 8; ++cut) {  // each time after some more slices
    const auto passed = proxy.bytes_passed();
    ASSERT_TRUE(eventually([&] { return proxy.bytes_passed() > passed + (9 << 20); })) << cut;
    proxy.cut();
  }
  const auto answer = finish(*pull);
  ASSERT_NO_FATAL_FAILURE(expect_complete(answer));
}

TEST_F(SourceFaults, Row12CrawlingSourceIsLeftWithLittle) {
  fleet_.start_agent("slow", {"--max-rate", "400KB"});
  fleet_.publish("slow", "m@1", fleet_.dir("model"));
  fleet_.start_agent("fast", {"--max-rate", "40MB"});
  fleet_.publish("fast", "m@1", fleet_.dir("model"));
  auto pull = start_pull();
  const auto answer = finish(*pull);
  ASSERT_NO_FATAL_FAILURE(expect_complete(answer));
  EXPECT_GT(source_of(answer, "fast")["bytes"].get<std::uint64_t>(), total_bytes_ / 10 * 8);
  // Its last slice was taken from it. That is no fault, here or in the coordinator's eyes.
  EXPECT_FALSE(source_of(answer, "slow")["lost"].get<bool>()) << answer.json;
  EXPECT_EQ(pull->err().find("source_lost"), std::string::npos) << pull->err();
}

TEST_F(SourceFaults, Row13AllSourcesLostNamesWhatNobodyHolds) {
  start_sources({"a"}, kSlowly);
  auto pull = start_pull();
  wait_for_data("a");
  fleet_.agent("a").process->kill();
  const auto answer = finish(*pull);
  EXPECT_EQ(answer.exit_code, 3) << answer.err;
  EXPECT_NE(answer.err.find("NO_SOURCE"), std::string::npos) << answer.err;
  EXPECT_NE(answer.err.find("model.layers."), std::string::npos) << answer.err;
}

// Row 13 with a fallback directory: rung 4 of the ladder.
TEST_F(SourceFaults, Row13AllSourcesLostFallsBackToTheDirectory) {
  start_sources({"a"}, kSlowly);
  auto pull = start_pull({"--fallback", fleet_.dir("model").string()});
  wait_for_data("a");
  fleet_.agent("a").process->kill();
  const auto answer = finish(*pull);
  ASSERT_NO_FATAL_FAILURE(expect_complete(answer));
  // Nothing that had verified is read again; slices of a tile that was not complete yet may be.
  EXPECT_LE(answer.json["fetched_bytes"].get<std::uint64_t>(),
            answer.json["bytes"].get<std::uint64_t>() + (16 << 20));
}

// Row 13, from the beginning: nobody to ask, and nobody who holds it.
TEST_F(SourceFaults, Row13NobodyToAskFromTheStartFallsBackToTheDirectory) {
  fleet_.coordinator().kill();
  auto pull = start_pull({"--fallback", fleet_.dir("model").string()});
  const auto answer = finish(*pull);
  ASSERT_NO_FATAL_FAILURE(expect_complete(answer));
}

TEST_F(SourceFaults, Row25CoordinatorKilledMidPullChangesNothing) {
  start_sources({"a"}, kSlowly);
  auto pull = start_pull();
  wait_for_data("a");
  fleet_.coordinator().kill();
  const auto answer = finish(*pull);
  ASSERT_NO_FATAL_FAILURE(expect_complete(answer));
  fleet_.start_coordinator();
  EXPECT_TRUE(eventually([&] {
    return fleet_.run_command({"pull", "m", "--to", fleet_.dir("again").string()}).exit_code == 0;
  }));
  EXPECT_EQ(compare_checkpoints(fleet_.dir("model"), fleet_.dir("again")), "");
}

TEST_F(SourceFaults, Row48SegmentTruncatedUnderItsMappingFailsReadsNotTheAgent) {
  start_sources({"a", "b"}, kSlowly);
  const fs::path segment = segment_of("a");
  auto pull = start_pull();
  wait_for_data("a");
  fs::resize_file(segment, 4096);
  const auto answer = finish(*pull);
  ASSERT_NO_FATAL_FAILURE(expect_complete(answer));
  EXPECT_TRUE(fleet_.agent("a").process->running());
}

// Row 48 at the puller's end.
TEST_F(SourceFaults, Row48ADestinationCutShortEndsThePullAndBlamesNoSource) {
  start_sources({"a"}, kSlowly);
  auto pull = start_pull();
  wait_for_data("a");
  fs::resize_file(find_file(fleet_.dir("out"), "model.safetensors.partial"), 4096);
  const auto answer = finish(*pull);
  EXPECT_EQ(answer.exit_code, 1) << answer.err;
  EXPECT_NE(answer.err.find("another process changed it"), std::string::npos) << answer.err;
  auto again = start_pull();
  const auto second = finish(*again);
  ASSERT_NO_FATAL_FAILURE(expect_complete(second));
  EXPECT_EQ(second.json["refetched_bytes"], 0);
}

}  // namespace
}  // namespace rekindle::testing
