// One of two cables fails in the middle of a pull, which goes on over the other; then it comes
// back. What went over which cable is read from the counters of their interfaces.
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

}  // namespace
}  // namespace rekindle::testing
