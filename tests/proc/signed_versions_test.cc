// Signed versions, and what those who trust only some publishers do with all others.
#include <fstream>

#include <sys/stat.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/fleet.h"

namespace rekindle::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int kDenied = 7;

class SignedVersions : public ::testing::Test {
 protected:
  struct Key {
    std::string secret, shared, id;
  };
  SignedVersions() { make_checkpoint(fleet_.dir("model"), 2, 512, 5); }

  Key make_key(const std::string& name) {
    Key key{fleet_.dir(name).string(), fleet_.dir(name).string() + ".pub", ""};
    const auto made = fleet_.run_command({"keys", "new", key.secret});
    EXPECT_EQ(made.exit_code, 0) << made.err;
    if (made.json.is_object()) key.id = made.json["key"];
    return key;
  }
  Fleet::Answer publish(const std::string& agent, const std::string& version,
                        std::vector<std::string> more = {}) {
    std::vector<std::string> words = {"publish", version, fleet_.dir("model").string(), "--store",
                                      fleet_.dir("store-" + agent).string()};
    words.insert(words.end(), more.begin(), more.end());
    return fleet_.run_command(words);
  }
  Fleet::Answer pull(const std::string& version, const std::string& agent,
                     std::vector<std::string> more) {
    std::vector<std::string> words = {"pull", version, "--to",
                                      fleet_.dir(fmt::format("out-{}", ++pulls_)).string()};
    if (!agent.empty()) words.insert(words.end(), {"--from", fleet_.agent(agent).control});
    words.insert(words.end(), more.begin(), more.end());
    return fleet_.run_command(words);
  }

  Fleet fleet_;
  int pulls_ = 0;
};

TEST_F(SignedVersions, AVersionOfAnotherPublisherIsRefusedAndNothingIsWritten) {
  const Key good = make_key("good"), other = make_key("other");
  fleet_.start_agent("a");
  ASSERT_EQ(publish("a", "unsigned@1").exit_code, 0);
  ASSERT_EQ(publish("a", "m@1", {"--sign-key", other.secret}).exit_code, 0);
  const auto unsigned_version = pull("unsigned@1", "a", {"--trust-publisher", good.shared});
  EXPECT_EQ(unsigned_version.exit_code, kDenied);
  EXPECT_THAT(unsigned_version.err,
              AllOf(HasSubstr("unsigned@1 has no signature"), HasSubstr(good.id)));
  EXPECT_FALSE(std::filesystem::exists(fleet_.dir("out-1")));
  const auto by_another = pull("m@1", "a", {"--trust-publisher", good.shared});
  EXPECT_EQ(by_another.exit_code, kDenied);
  EXPECT_THAT(by_another.err, HasSubstr("m@1 is signed by " + other.id));
  // Models that the option does not name need no signature.
  EXPECT_EQ(pull("m@1", "a", {"--trust-publisher", "x*=" + good.shared}).exit_code, 0);
  const auto trusted = pull("m@1", "a", {"--trust-publisher", "m*=" + other.shared});
  ASSERT_EQ(trusted.exit_code, 0) << trusted.err;
  EXPECT_THAT(trusted.json["signers"], ElementsAre(other.id));
  const auto shown = fleet_.run_command({"inspect", fleet_.dir("out-4").string()});
  EXPECT_THAT(shown.json["signers"], ElementsAre(other.id));
  EXPECT_THAT(fleet_.run_command({"verify", fleet_.dir("out-4").string()}).json["signers"],
              ElementsAre(other.id));
}

TEST_F(SignedVersions, AChainOfPullersKeepsTheSignature) {
  const Key key = make_key("key");
  fleet_.start_coordinator();
  fleet_.start_agent("a");
  ASSERT_EQ(publish("a", "m@1", {"--sign-key", key.secret}).exit_code, 0);
  for (const auto& [to, from] : {std::pair("b", "a"), std::pair("c", "b")}) {
    fleet_.start_agent(to, {"--trust-publisher", key.shared});
    const auto pulled = fleet_.run_command({"pull", "m@1", "--from", fleet_.agent(from).control,
                                            "--store", fleet_.agent(to).store.string()});
    ASSERT_EQ(pulled.exit_code, 0) << pulled.err;
    EXPECT_THAT(pulled.json["signers"], ElementsAre(key.id));
  }
  fleet_.agent("a").process->kill();
  fleet_.agent("b").process->kill();
  EXPECT_EQ(pull("m@1", "c", {"--trust-publisher", key.shared}).exit_code, 0);
  const auto status = fleet_.run_command({"status"});
  EXPECT_THAT(status.json["versions"][0]["signers"], ElementsAre(key.id));
}

TEST_F(SignedVersions, AHolderWithoutTheSignatureCannotStripItFromAVersionOfTheFleet) {
  const Key key = make_key("key");
  fleet_.start_coordinator();
  fleet_.start_agent("a");
  fleet_.start_agent("stripped");
  ASSERT_EQ(publish("a", "m@1", {"--sign-key", key.secret}).exit_code, 0);
  fleet_.publish("stripped", "m@1", fleet_.dir("model"));
  EXPECT_EQ(pull("m@1", "stripped", {"--trust-publisher", key.shared}).exit_code, kDenied);
  fleet_.agent("a").process->kill();
  const auto pulled = pull("m@1", "", {"--trust-publisher", key.shared});
  EXPECT_EQ(pulled.exit_code, 0) << pulled.err;
}

TEST_F(SignedVersions, AVersionCanBeSignedAfterItWasPublished) {
  const Key first = make_key("first"), second = make_key("second");
  fleet_.start_agent("a");
  ASSERT_EQ(publish("a", "m@1").exit_code, 0);
  ASSERT_EQ(publish("a", "m@1", {"--sign-key", first.secret}).exit_code, 0);
  EXPECT_EQ(pull("m@1", "a", {"--trust-publisher", first.shared}).exit_code, 0);
  const auto both = publish("a", "m@1", {"--sign-key", second.secret});
  EXPECT_EQ(both.json["signers"].size(), 2u);
  fleet_.agent("a").process->kill();
  fleet_.start_agent("a");
  EXPECT_EQ(pull("m@1", "a", {"--trust-publisher", first.shared}).exit_code, 0);
  EXPECT_EQ(pull("m@1", "a", {"--trust-publisher", second.shared}).exit_code, 0);
}

TEST_F(SignedVersions, AnAgentServesNoCopyOfAPublisherThatItDoesNotTrust) {
  const Key key = make_key("key");
  ASSERT_EQ(publish("a", "m@1").exit_code, 0);
  ASSERT_EQ(publish("a", "m@2", {"--sign-key", key.secret}).exit_code, 0);
  fleet_.start_agent("a", {"--trust-publisher", key.shared});
  EXPECT_TRUE(fleet_.agent("a").process->wait_for_err("m@1 has no signature"));
  EXPECT_NE(pull("m@1", "a", {}).exit_code, 0);
  EXPECT_EQ(pull("m@2", "a", {}).exit_code, 0);
  const auto refused = publish("a", "m@3");
  EXPECT_EQ(refused.exit_code, kDenied);
  EXPECT_THAT(refused.err, HasSubstr("m@3 has no signature"));
  EXPECT_EQ(publish("a", "m@3", {"--sign-key", key.secret}).exit_code, 0);
}

TEST_F(SignedVersions, ACoordinatorTakesNoClaimAndNoAnnouncementOfAnotherPublisher) {
  const Key key = make_key("key");
  ASSERT_EQ(publish("a", "planted@1").exit_code, 0);
  fleet_.start_coordinator("127.0.0.1", {"--trust-publisher", key.shared});
  fleet_.start_agent("a");
  EXPECT_TRUE(fleet_.coordinator().wait_for_err("planted@1 has no signature"));
  EXPECT_NE(pull("planted@1", "", {}).exit_code, 0);
  const auto refused = publish("a", "m@1");
  EXPECT_EQ(refused.exit_code, kDenied);
  EXPECT_THAT(refused.err, HasSubstr("m@1 has no signature"));
  ASSERT_EQ(publish("a", "m@1", {"--sign-key", key.secret}).exit_code, 0);
  const auto pulled = pull("m@1", "", {});
  EXPECT_EQ(pulled.exit_code, 0) << pulled.err;
}

TEST_F(SignedVersions, FilesOfAFallbackDirectoryHaveNoSignature) {
  const Key key = make_key("key");
  const std::string model = fleet_.dir("model").string();
  const auto refused = pull(
      "m@1", "", {"--fallback", model, "--from", "127.0.0.1:1", "--trust-publisher", key.shared});
  EXPECT_EQ(refused.exit_code, kDenied);
  EXPECT_THAT(refused.err, HasSubstr("m@1 has no signature"));
  EXPECT_EQ(pull("m@1", "", {"--fallback", model, "--from", "127.0.0.1:1"}).exit_code, 0);
}

TEST_F(SignedVersions, KeysThatCannotBeUsedAreRefusedInOneLine) {
  const Key key = make_key("key");
  EXPECT_EQ(fleet_.run_command({"keys", "show", key.shared}).json["keys"][0], key.id);
  const auto again = fleet_.run_command({"keys", "new", key.secret});
  EXPECT_EQ(again.exit_code, kDenied);
  EXPECT_THAT(again.err, HasSubstr("never overwritten"));
  write_file(fleet_.dir("no-key"), "hello");
  ASSERT_EQ(::chmod(fleet_.dir("no-key").c_str(), 0600), 0);
  const auto no_key = publish("a", "m@1", {"--sign-key", fleet_.dir("no-key").string()});
  EXPECT_EQ(no_key.exit_code, 2);
  EXPECT_THAT(no_key.err, HasSubstr("--sign-key"));
  const auto no_publisher = pull("m@1", "", {"--trust-publisher", fleet_.dir("no-key").string()});
  EXPECT_EQ(no_publisher.exit_code, 2);
  EXPECT_THAT(no_publisher.err, HasSubstr("--trust-publisher"));
  ASSERT_EQ(::chmod(key.secret.c_str(), 0644), 0);
  const auto open = publish("a", "m@1", {"--sign-key", key.secret});
  EXPECT_EQ(open.exit_code, kDenied);
  EXPECT_THAT(open.err, HasSubstr("chmod 600"));
}

}  // namespace
}  // namespace rekindle::testing
