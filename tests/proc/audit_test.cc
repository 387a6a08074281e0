// What an agent writes into its audit log, and who is told before it lies on the disk.
#include <fstream>

#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "recovery/rpc/audit_log.h"
#include "tests/support/fleet.h"
#include "tests/support/syslog_double.h"

namespace rekindle::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class AgentAudit : public ::testing::Test {
 protected:
  AgentAudit() { make_checkpoint(fleet_.dir("model"), 2, 64, 5); }

  void start(std::vector<std::string> more = {}) {
    more.insert(more.end(), {"--audit", file_.string()});
    fleet_.start_agent("a", std::move(more));
  }
  Fleet::Answer here(std::vector<std::string> words) {
    words.insert(words.end(), {"--store", fleet_.dir("store-a").string()});
    return fleet_.run_command(std::move(words));
  }
  // The lines that have this text.
  std::vector<std::string> lines(const std::string& text) const {
    std::ifstream stream(file_);
    std::vector<std::string> found;
    for (std::string line; std::getline(stream, line);) {
      if (line.find(text) != std::string::npos) found.push_back(line);
    }
    return found;
  }
  std::string last(const std::string& act) const {
    const auto found = lines("\"act\":\"" + act + "\"");
    return found.empty() ? "" : found.back();
  }
  void expect_whole_chain() const {
    const auto chain = rpc::verify_audit({file_});
    EXPECT_TRUE(chain) << chain.error().message();
    EXPECT_EQ(fleet_.run_command({"audit", "verify", file_.string()}).exit_code, 0);
  }

  Fleet fleet_;
  const std::filesystem::path file_ = fleet_.dir("audit.jsonl");
  const std::string self_ = fmt::format("\"principals\":[\"uid:{}\"]", ::geteuid());
};

TEST_F(AgentAudit, WhatItsUserAsksForIsWrittenDownAlsoOverARestart) {
  start();
  ASSERT_EQ(here({"publish", "m@1", fleet_.dir("model").string()}).exit_code, 0);
  EXPECT_EQ(here({"release", "m@1"}).exit_code, 0);
  EXPECT_EQ(here({"retire", "m@1"}).exit_code, 0);
  EXPECT_NE(here({"retire", "m@1"}).exit_code, 0) << "it is gone";
  fleet_.agent("a").process->kill();
  start();
  EXPECT_THAT(last("local_publish"),
              AllOf(HasSubstr("\"object\":\"m@1\""), HasSubstr(self_),
                    HasSubstr("\"address\":\"unix\""), HasSubstr("\"result\":\"ok\"")));
  EXPECT_THAT(last("local_release"), HasSubstr("\"object\":\"m@1\""));
  const auto retirements = lines("\"act\":\"local_retire\"");
  ASSERT_EQ(retirements.size(), 2u);
  EXPECT_THAT(retirements[0], HasSubstr("\"result\":\"ok\""));
  EXPECT_THAT(retirements[1], HasSubstr("does not hold it"));
  EXPECT_EQ(lines("agent_started").size(), 2u);
  expect_whole_chain();
}

TEST_F(AgentAudit, OrdersOfTheCoordinatorAreWrittenDownWithItsName) {
  fleet_.start_coordinator();
  start();
  fleet_.publish("a", "m@1", fleet_.dir("model"));
  ASSERT_EQ(fleet_.run_command({"drain", "a"}).exit_code, 0);
  EXPECT_TRUE(eventually([&] { return !last("ordered_drain").empty(); }));
  ASSERT_EQ(fleet_.run_command({"drain", "a", "--undo"}).exit_code, 0);
  EXPECT_TRUE(eventually([&] { return !last("ordered_undrain").empty(); }));
  ASSERT_EQ(fleet_.run_command({"retire", "m@1", "--everywhere"}).exit_code, 0);
  ASSERT_TRUE(eventually([&] { return !last("ordered_retire").empty(); }));
  EXPECT_THAT(last("ordered_retire"),
              AllOf(HasSubstr("\"object\":\"m@1\""), HasSubstr("\"role\":\"coordinator\""),
                    HasSubstr(fleet_.coordinator_address()), HasSubstr("\"result\":\"ok\"")));
  expect_whole_chain();
}

TEST_F(AgentAudit, RefusalsAreWrittenDown) {
  const auto key = fleet_.dir("key").string();
  ASSERT_EQ(fleet_.run_command({"keys", "new", key}).exit_code, 0);
  fleet_.start_coordinator();
  start({"--trust-publisher", "trusted*=" + key + ".pub"});
  EXPECT_NE(here({"publish", "trusted@1", fleet_.dir("model").string()}).exit_code, 0);
  EXPECT_THAT(last("local_publish"),
              AllOf(HasSubstr("trusted@1 has no signature"), HasSubstr(self_)));
  // A drill that the agent does not allow.
  EXPECT_NE(fleet_.run_command({"drill", "kill-agent", "a", "--yes"}).exit_code, 0);
  EXPECT_THAT(last("drill"), HasSubstr("--allow-drills"));
  expect_whole_chain();
}

TEST_F(AgentAudit, AReloadIsWrittenDownAndFollowsARotation) {
  start();
  const auto old = fleet_.dir("audit.jsonl.1");
  std::filesystem::rename(file_, old);
  fleet_.agent("a").process->signal(SIGHUP);
  ASSERT_TRUE(eventually([&] { return !last("reload").empty(); }));
  const auto chain = rpc::verify_audit({old, file_});
  EXPECT_TRUE(chain) << chain.error().message();
}

TEST_F(AgentAudit, AnActIsNotAcknowledgedWhileItsLineIsNotOnTheDisk) {
  fleet_.start_agent("a", {"--audit", file_.string()}, "127.0.0.1:0",
                     {"env", "REKINDLE_FAILPOINTS=audit.sync=error:EIO@2"});
  const auto published = here({"publish", "m@1", fleet_.dir("model").string()});
  EXPECT_NE(published.exit_code, 0);
  EXPECT_THAT(published.err, AllOf(HasSubstr("may be lost"), HasSubstr(file_.string())));
  const auto refused = here({"publish", "m@1", fleet_.dir("model").string()});
  EXPECT_NE(refused.exit_code, 0);
  EXPECT_THAT(refused.err, HasSubstr("nothing was changed"));
  EXPECT_TRUE(eventually([&] {
    return here({"publish", "m@1", fleet_.dir("model").string()}).exit_code == 0;
  }));
  expect_whole_chain();
}

TEST_F(AgentAudit, AnAgentWritesToSyslog) {
  const auto socket = fleet_.dir("log");
  SyslogDouble syslog(socket);
  fleet_.start_agent("a", {"--audit", "syslog:" + socket.string()});
  EXPECT_THAT(syslog.next_line(), HasSubstr("agent_started"));
  ASSERT_EQ(here({"publish", "m@1", fleet_.dir("model").string()}).exit_code, 0);
  EXPECT_THAT(syslog.next_line(), HasSubstr("\"act\":\"local_publish\""));
}

}  // namespace
}  // namespace rekindle::testing
