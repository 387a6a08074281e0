// One of two cables fails in the middle of a pull, which goes on over the other; then it comes
// back. What went over which cable is read from the counters of their interfaces.
#include <algorithm>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/rdma/rdma_fleet.h"

namespace rekindle::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr std::uint64_t kMiB = 1 << 20;

class RdmaRails : public RdmaCables {
 protected:
  void SetUp() override {
    mib_ = 64;
    RdmaCables::SetUp();
    if (IsSkipped()) return;
    ASSERT_GE(rails_.a.size(), 2u) << "it takes two cables";
  }

  // A pull over both cables that is long enough for what is done to them, which takes seconds.
  void start() {
    for (std::size_t cable = 0; cable < 2; ++cable) began_[cable] = received_bytes('a', cable);
    start_source("a", {"--max-rate", "5MB"});
    pull_ = start_pull("verbs");
    ASSERT_TRUE(wait_for_bytes(*pull_)) << pull_->err();
    for (std::size_t cable = 0; cable < 2; ++cable) {
      EXPECT_GT(received_bytes('a', cable), began_[cable] + kMiB) << "unused: cable " << cable;
    }
  }
  // Until it has brought one more MiB. False: the pull has ended.
  bool wait_for_cable(std::size_t cable) {
    const std::uint64_t before = received_bytes('a', cable);
    return eventually(
               [&] { return received_bytes('a', cable) > before + kMiB || !pull_->running(); }) &&
           pull_->running();
  }
  void expect_rail_back() {
    ASSERT_TRUE(pull_->wait_for_err("pull.rail_joined")) << pull_->err();
    EXPECT_TRUE(wait_for_cable(0)) << pull_->err();
  }
  // And nobody was given up.
  void expect_complete_over_verbs() {
    const auto answer = finish(*pull_);
    ASSERT_NO_FATAL_FAILURE(expect_complete(answer));
    EXPECT_EQ(source_of(answer, "a")["transport"], "verbs") << answer.json;
    EXPECT_THAT(answer.err, Not(HasSubstr("source_lost")));
    EXPECT_THAT(answer.err, Not(HasSubstr("transport_failed")));
  }

  std::unique_ptr<Process> pull_;
  std::uint64_t began_[2] = {};
};

// Row 15.
TEST_F(RdmaRails, ACutCableIsReplacedByTheOtherAndUsedAgainWhenItIsBack) {
  ASSERT_NO_FATAL_FAILURE(start());
  CableFault cut{"cut", "0"};
  ASSERT_TRUE(wait_for_cable(1)) << pull_->err();
  cut.repair();
  ASSERT_NO_FATAL_FAILURE(expect_rail_back());
  expect_complete_over_verbs();
  EXPECT_THAT(pull_->err(), Not(HasSubstr("pull.reconnect")));
}

// Row 16: the port is up, and nothing comes through.
TEST_F(RdmaRails, ACableThatDropsRoceIsReplacedByTheOtherAndUsedAgain) {
  ASSERT_NO_FATAL_FAILURE(start());
  CableFault filter{"filter", "0"};
  // The device tries for seconds before it gives up.
  ASSERT_TRUE(pull_->wait_for_err("pull.rail_lost")) << pull_->err();
  ASSERT_TRUE(wait_for_cable(1)) << pull_->err();
  filter.repair();
  ASSERT_NO_FATAL_FAILURE(expect_rail_back());
  expect_complete_over_verbs();
}

// Row 23.
TEST_F(RdmaRails, ASourceWhoseAddressChangesIsReadOverTheOtherRailThenOverBoth) {
  ASSERT_NO_FATAL_FAILURE(start());
  const CableFault moved{"readdress", "0", "b"};
  ASSERT_TRUE(wait_for_cable(1)) << pull_->err();
  ASSERT_NO_FATAL_FAILURE(expect_rail_back());
  expect_complete_over_verbs();
}

TEST_F(RdmaRails, APullerWhoseAddressChangesReadsOverTheOtherRailThenOverBoth) {
  ASSERT_NO_FATAL_FAILURE(start());
  const CableFault moved{"readdress", "0", "a"};
  ASSERT_TRUE(wait_for_cable(1)) << pull_->err();
  ASSERT_NO_FATAL_FAILURE(expect_rail_back());
  expect_complete_over_verbs();
}

// Agent a has the devices of side a, and agent b those of side b.
class RdmaFleetBench : public RdmaCables {
 protected:
  nlohmann::json bench() {
    return fleet_
        .run_command({"bench", "fleet", "--transport", "verbs", "--time", "1s", "--under", "0.02"})
        .json;
  }
};

// `rekindle drill cut-link`, where the wire has to be silenced at the reader: nobody else takes
// part in its reads.
using RdmaCutLink = RdmaRails;

TEST_F(RdmaCutLink, ASilentRailIsGivenUpAndThePullGoesOnOverTheOther) {
  start_source("a", {"--allow-drills", "--max-rate", "5MB"});
  fleet_.start_agent("p", {"--allow-drills", "--hca", hca_a_});
  const std::uint64_t began = received_bytes('a', 0);
  Process pull(
      fleet_.command({"pull", "m@1", "--store", fleet_.agent("p").store, "--transport", "verbs"}));
  ASSERT_TRUE(eventually([&] { return received_bytes('a', 0) > began + kMiB; })) << pull.err();
  const auto answer =
      fleet_.run_command({"drill", "cut-link", "p:" + rails_.a[0] + ":1", "--for", "4s", "--yes"});
  EXPECT_EQ(answer.exit_code, 0) << answer.json << answer.err;
  const std::string steps = answer.json["steps"].dump();
  EXPECT_THAT(steps, HasSubstr("gave the route up "));
  EXPECT_THAT(steps, HasSubstr("reads from a over the link: verbs " + rails_.a[0] + ":1"));
  EXPECT_THAT(steps, HasSubstr("goes on from a: verbs " + rails_.a[1] + ":1"));
  EXPECT_THAT(steps, Not(HasSubstr("over the link: verbs " + rails_.a[1])));
  EXPECT_THAT(steps, HasSubstr("is complete, and every byte verified"));
  const auto done = pull.wait(120s);
  ASSERT_TRUE(done) << pull.err();
  EXPECT_EQ(done->code, 0) << pull.err();
}

TEST_F(RdmaFleetBench, NamesTheRailsOfBothEndsAndARailThatIsDown) {
  fleet_.start_agent("a", {"--allow-drills", "--hca", hca_a_});
  fleet_.start_agent("b", {"--allow-drills", "--hca", hca_b_});
  const auto well = bench();
  ASSERT_EQ(well["pairs"].size(), 2u) << well;
  for (const auto& pair : well["pairs"]) {
    ASSERT_EQ(pair["rails"].size(), rails_.a.size()) << well;
    const bool a_reads = pair["reader"] == "a";
    for (const auto& rail : pair["rails"]) {
      const auto& of_a = rail[a_reads ? "reader_rail" : "source_rail"];
      const auto& of_b = rail[a_reads ? "source_rail" : "reader_rail"];
      const auto cable = std::ranges::find(rails_.a, of_a.get<std::string>(),
                                           [](const auto& name) { return name + ":1"; });
      ASSERT_NE(cable, rails_.a.end()) << well;
      EXPECT_EQ(of_b, rails_.b[static_cast<std::size_t>(cable - rails_.a.begin())] + ":1") << well;
      EXPECT_GT(rail["bytes_per_second"], 0) << well;
    }
  }
  EXPECT_TRUE(well["slow_or_broken"].empty()) << well;

  const CableFault cut{"cut", "0"};
  nlohmann::json broken;
  const auto names = [&](const std::string& line) {
    return broken["slow_or_broken"].dump().find(line) != std::string::npos;
  };
  EXPECT_TRUE(eventually([&] {
    broken = bench();
    return names("rail " + rails_.a[0] + ":1 of a is down: ") &&
           names("rail " + rails_.b[0] + ":1 of b is down: ");
  })) << broken;
}

}  // namespace
}  // namespace rekindle::testing
