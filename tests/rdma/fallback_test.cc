// Which transport a pull takes between two hosts, and what it says when RDMA does not work.
#include <csignal>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/rdma/rdma_fleet.h"

namespace rekindle::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class RdmaFallback : public RdmaHosts {
 protected:
  void SetUp() override {
    mib_ = 16;
    RdmaHosts::SetUp();
  }
  // A pull that has begun, and still has seconds to go.
  std::unique_ptr<Process> start_slowly(const std::string& transport) {
    start_source_on_host("a", {"--max-rate", "4MB"});
    auto pull = start_pull_on_host(transport);
    EXPECT_TRUE(wait_for_bytes(*pull)) << pull->err();
    return pull;
  }
  // It stands still meanwhile: however long that takes, the pull is not over before.
  static CableFault break_all_cables_under(Process& pull, std::string_view fault) {
    struct Frozen {
      explicit Frozen(Process& process) : frozen(process) { frozen.signal(SIGSTOP); }
      ~Frozen() { frozen.signal(SIGCONT); }
      Process& frozen;
    };
    const Frozen frozen(pull);
    return CableFault{fault, "all"};
  }
  // Over TCP in the end, after one warning that a person sees and that says why.
  void expect_tcp_after_one_warning(const Fleet::Answer& answer, const std::string& cause) {
    ASSERT_NO_FATAL_FAILURE(expect_complete(answer));
    EXPECT_EQ(source_of(answer, "a")["transport"], "tcp") << answer.json;
    EXPECT_FALSE(source_of(answer, "a")["lost"].get<bool>()) << answer.json;
    EXPECT_EQ(count_of(answer.err, kWarning), 1u) << answer.err;
    const auto at = answer.err.find(kWarning);
    if (at == std::string::npos) return;
    EXPECT_THAT(answer.err.substr(at, answer.err.find('\n', at) - at), HasSubstr(cause));
    EXPECT_THAT(answer.err, Not(HasSubstr("source_lost")));
  }

  static constexpr std::string_view kWarning =
      "pull: verbs to a does not work, trying the next transport: ";
};

// Row 16, with no other rail and no other source.
TEST_F(RdmaFallback, AllCablesThatDropRoceMidPullEndInTcp) {
  auto pull = start_slowly("");
  const CableFault fault = break_all_cables_under(*pull, "filter");
  expect_tcp_after_one_warning(finish(*pull), "first read");
}

TEST_F(RdmaFallback, CablesThatDropRoceFromTheStartEndInTcpOrForcedVerbsInTheCause) {
  const CableFault fault{"filter", "all"};
  start_source_on_host("a");
  auto forced = start_pull_on_host("verbs");
  const auto answer = finish(*forced);
  EXPECT_EQ(answer.exit_code, 3) << answer.err;
  EXPECT_THAT(answer.err, HasSubstr("NO_SOURCE"));
  EXPECT_THAT(answer.err, HasSubstr("first read"));
  EXPECT_FALSE(std::filesystem::exists(fleet_.dir("out") / "model.safetensors"));
  auto pull = start_pull_on_host("");
  expect_tcp_after_one_warning(finish(*pull), "first read");
}

// Row 15.
TEST_F(RdmaFallback, AllCablesCutMidPullEndInTcp) {
  auto pull = start_slowly("");
  const CableFault fault = break_all_cables_under(*pull, "cut");
  expect_tcp_after_one_warning(finish(*pull), "no active port");
}

TEST_F(RdmaFallback, ForcedVerbsEndsWhenAllCablesFailMidPullAndResumesLater) {
  auto pull = start_slowly("verbs");
  {
    const CableFault fault = break_all_cables_under(*pull, "silence");
    const auto answer = finish(*pull);
    EXPECT_EQ(answer.exit_code, 3) << answer.err;
    EXPECT_THAT(answer.err, HasSubstr("NO_SOURCE"));
  }
  auto again = start_pull_on_host("verbs");
  const auto answer = finish(*again);
  ASSERT_NO_FATAL_FAILURE(expect_complete(answer));
  EXPECT_GT(answer.json["resumed_bytes"], 0) << answer.json;
}

// A wrong guess: addresses of the same kind, and no route between them.
TEST_F(RdmaFallback, ASubnetWithoutARouteEndsInTcp) {
  const CableFault fault{"unroute", "all"};
  start_source_on_host("a");
  auto pull = start_pull_on_host("");
  expect_tcp_after_one_warning(finish(*pull), "no route");
}

// Row 20. Between hosts verbs is the automatic choice, also when it has to be staged or bounced.
TEST_F(RdmaFallback, ASourceThatMayNotPinItsWeightsSaysSoAndServesThemStaged) {
  start_source_on_host("a", {}, with_memlock(4096));
  auto pull = start_pull_on_host("");
  const auto answer = finish(*pull);
  ASSERT_NO_FATAL_FAILURE(expect_complete(answer));
  EXPECT_EQ(source_of(answer, "a")["transport"], "verbs") << answer.json;
  EXPECT_EQ(count_of(answer.err, kWarning), 0u) << answer.err;
  const std::string said = fleet_.agent("a").process->err();
  EXPECT_THAT(said, HasSubstr("ulimit -l"));
  EXPECT_THAT(said, HasSubstr("through a staging window"));
}

TEST_F(RdmaFallback, APullerThatMayNotPinItsDestinationReadsThroughItsBouncePool) {
  start_source_on_host("a");
  auto pull = start_pull_on_host("", {}, with_memlock(4096));
  const auto answer = finish(*pull);
  ASSERT_NO_FATAL_FAILURE(expect_complete(answer));
  EXPECT_EQ(source_of(answer, "a")["transport"], "verbs") << answer.json;
  EXPECT_EQ(count_of(answer.err, kWarning), 0u) << answer.err;
  EXPECT_EQ(count_of(answer.err, "verbs.not_registered"), 1u) << answer.err;
  EXPECT_THAT(answer.err, HasSubstr("ulimit -l"));
  EXPECT_THAT(answer.err, HasSubstr("through bounce buffers"));
}

}  // namespace
}  // namespace rekindle::testing
