// Pulls that demand encryption, on real daemons.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/fleet.h"

namespace rekindle::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class EncryptedPulls : public ::testing::Test {
 protected:
  // Grants are good for 4 s, and a pull of the 16 MiB takes 7 s.
  static constexpr const char* kShortGrants = "REKINDLE_FAILPOINTS=grants.short=error:EIO";
  static constexpr const char* kSlow = "2500kB";
  // For pulls that start again what was under way at the end of their session.
  static constexpr milliseconds kPatienceWithSlowPulls{60'000};
  void publish(const std::vector<std::string>& options = {},
               const std::vector<std::string>& under = {}) {
    make_checkpoint(fleet_.dir("model"), 8, 1024, 3);
    fleet_.start_coordinator("127.0.0.1", {}, under);
    fleet_.start_agent("a", options, "127.0.0.1:0", under);
    fleet_.publish("a", "m@1", fleet_.dir("model"));
  }
  Spawn pull(std::vector<std::string> more) const {
    // On one host, shared memory would be used.
    std::vector<std::string> all{"pull", "m@1", "--transport", "tcp"};
    all.insert(all.end(), more.begin(), more.end());
    return fleet_.command(std::move(all));
  }
  std::vector<std::string> to_directory() const { return {"--to", fleet_.dir("out").string()}; }
  nlohmann::json status_of(const std::string& agent) const {
    return fleet_.run_command({"status", "--agent", fleet_.agent(agent).control}).json;
  }
  void expect_pulled(const Fleet::Answer& answer, const std::string& transport) {
    ASSERT_EQ(answer.exit_code, 0) << answer.err;
    ASSERT_EQ(answer.json["sources"].size(), 1u) << answer.json;
    EXPECT_EQ(answer.json["sources"][0]["transport"], transport) << answer.json;
  }

  mutable Fleet fleet_;
};

TEST_F(EncryptedPulls, ASessionIsRenewedForAsLongAsThePullTakes) {
  publish({"--max-rate", kSlow}, {"env", kShortGrants});
  auto command = pull(to_directory());
  command.argv.emplace_back("--encrypt");
  command.env.emplace_back("REKINDLE_FAILPOINTS", "grants.short=error:EIO");
  const auto answer = Fleet::answer_of(run(std::move(command), kPatienceWithSlowPulls));
  ASSERT_NO_FATAL_FAILURE(expect_pulled(answer, "tcp+tls"));
  EXPECT_EQ(compare_checkpoints(fleet_.dir("model"), fleet_.dir("out")), "");
  ASSERT_GT(answer.json["elapsed_ms"], 4000) << "its first grant did not run out";
  EXPECT_EQ(fleet_.agent("a").sessions_opened(), 1u);
  EXPECT_THAT(fleet_.agent("a").process->err(), Not(HasSubstr("session.grant_over")));
}

// The puller renews every 10 s, and not every half second as above.
TEST_F(EncryptedPulls, ASessionThatIsNotRenewedEndsWithItsStreams) {
  publish({"--max-rate", kSlow}, {"env", kShortGrants});
  auto command = pull(to_directory());
  command.argv.emplace_back("--encrypt");
  const auto answer = Fleet::answer_of(run(std::move(command), kPatienceWithSlowPulls));
  ASSERT_NO_FATAL_FAILURE(expect_pulled(answer, "tcp+tls"));
  EXPECT_EQ(compare_checkpoints(fleet_.dir("model"), fleet_.dir("out")), "");
  EXPECT_THAT(fleet_.agent("a").process->err(), HasSubstr("session.grant_over"));
  EXPECT_GT(fleet_.agent("a").sessions_opened(), 1u) << "the pull went on with a fresh grant";
}

TEST_F(EncryptedPulls, TheAgentOfTheHostHonoursTheDemand) {
  publish();
  fleet_.start_agent("b");
  auto command = pull({"--store", fleet_.agent("b").store.string(), "--encrypt"});
  const auto answer = Fleet::answer_of(run(std::move(command)));
  ASSERT_NO_FATAL_FAILURE(expect_pulled(answer, "tcp+tls"));
  EXPECT_FALSE(answer.json["embedded"].get<bool>());
  const auto status = status_of("a");
  EXPECT_GT(status["bytes_served"], 0u);
  EXPECT_EQ(status["bytes_served_encrypted"], status["bytes_served"]);
  EXPECT_FALSE(status["requires_encryption"].get<bool>());
}

TEST_F(EncryptedPulls, WithoutADemandBytesAreCountedAsPlain) {
  publish();
  fleet_.start_agent("b", {"--require-encryption"});
  const std::vector<std::string> into_b{"--store", fleet_.agent("b").store.string()};
  ASSERT_NO_FATAL_FAILURE(expect_pulled(Fleet::answer_of(run(pull(into_b))), "tcp"));
  EXPECT_GT(status_of("a")["bytes_served"], 0u);
  EXPECT_EQ(status_of("a")["bytes_served_encrypted"], 0u);
  EXPECT_TRUE(status_of("b")["requires_encryption"].get<bool>());
}

}  // namespace
}  // namespace rekindle::testing
