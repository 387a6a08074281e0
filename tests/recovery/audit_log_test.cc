#include "recovery/coordinator/audit_log.h"

#include <csignal>
#include <filesystem>
#include <fstream>
#include <sstream>

#include <sys/resource.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/process.h"

namespace rekindle::coordinator {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class Audit : public ::testing::Test {
 protected:
  std::unique_ptr<AuditLog> open() {
    auto log = AuditLog::open(file_.string());
    EXPECT_TRUE(log) << log.error().message();
    return log ? *std::move(log) : nullptr;
  }
  std::vector<std::string> lines() const {
    std::ifstream stream(file_);
    std::vector<std::string> all;
    for (std::string line; std::getline(stream, line);) all.push_back(line);
    return all;
  }
  void put(const std::vector<std::string>& lines) const {
    std::ofstream stream(file_, std::ios::trunc);
    for (const auto& line : lines) stream << line << '\n';
  }
  std::string problem() const {
    const auto chain = verify_audit({file_});
    return chain ? "" : chain.error().message();
  }
  void write_three() {
    const auto log = open();
    for (const char* const object : {"m@1", "m@2", "m@3"}) {
      log->write({.act = "retire", .object = object, .principals = {"uid:0"}});
    }
  }

  rekindle::testing::TempDir temp_;
  const std::filesystem::path file_ = temp_ / "audit.jsonl";
};

TEST_F(Audit, ARestartContinuesTheChain) {
  write_three();
  write_three();
  const auto chain = verify_audit({file_});
  ASSERT_TRUE(chain) << chain.error().message();
  EXPECT_EQ(chain->lines, 6u);
  EXPECT_EQ(chain->first, 1u);
  EXPECT_EQ(chain->last, 6u);
  EXPECT_EQ(chain->lost, 0u);
  EXPECT_THAT(lines()[1],
              AllOf(HasSubstr("\"act\":\"retire\""), HasSubstr("\"object\":\"m@2\""),
                    HasSubstr("\"principals\":[\"uid:0\"]"), HasSubstr("\"result\":\"ok\"")));
}

TEST_F(Audit, ARemovedLineShows) {
  write_three();
  auto all = lines();
  all.erase(all.begin() + 1);
  put(all);
  EXPECT_THAT(problem(), AllOf(HasSubstr(file_.string() + ":2:"), HasSubstr("3 follows line 1")));
}

TEST_F(Audit, AnEditedLineShows) {
  write_three();
  auto all = lines();
  all[1].replace(all[1].find("m@2"), 3, "m@9");
  put(all);
  EXPECT_THAT(problem(), HasSubstr("line 2 was changed"));
  put({"{}"});
  EXPECT_THAT(problem(), HasSubstr(":1: it is no line of an audit log"));
}

TEST_F(Audit, LinesInAnotherOrderShow) {
  write_three();
  auto all = lines();
  std::swap(all[1], all[2]);
  put(all);
  EXPECT_NE(problem(), "");
}

TEST_F(Audit, TheChainGoesOnInTheNextFileAfterARotation) {
  const auto log = open();
  log->write({.act = "retire"});
  const auto old = temp_ / "audit.jsonl.1";
  std::filesystem::rename(file_, old);
  log->write({.act = "drain"});
  ASSERT_TRUE(log->reopen());
  log->write({.act = "publish"});
  const auto chain = verify_audit({old, file_});
  ASSERT_TRUE(chain) << chain.error().message();
  EXPECT_EQ(chain->lines, 3u);
  EXPECT_EQ(verify_audit({file_})->first, 3u);
  EXPECT_FALSE(verify_audit({file_, old}));
}

TEST_F(Audit, HalfALineOfADeadProcessIsDropped) {
  write_three();
  std::ofstream(file_, std::ios::app) << "{\"time\":\"2026";
  write_three();
  EXPECT_EQ(problem(), "");
  EXPECT_EQ(lines().size(), 6u);
}

TEST_F(Audit, AFileOfSomethingElseIsNotContinued) {
  put({"root:x:0:0:root:/root:/bin/bash"});
  const auto log = AuditLog::open(file_.string());
  ASSERT_FALSE(log);
  EXPECT_THAT(log.error().message(), HasSubstr(file_.string()));
  EXPECT_FALSE(AuditLog::open("/dev/null")) << "it keeps nothing";
}

TEST_F(Audit, WhileItCannotBeWrittenItSaysSoAndCountsWhatIsLost) {
  const auto log = open();
  log->write({.act = "retire", .object = "m@1"});
  EXPECT_TRUE(log->check());
  // A file that may not grow stands for a full disk.
  struct rlimit before {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto ignored = std::signal(SIGXFSZ, SIG_IGN);
  struct rlimit full = before;
  full.rlim_cur = std::filesystem::file_size(file_) + 10;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &full), 0);
  log->write({.act = "retire", .object = "m@2"});
  const auto refused = log->check();
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, ignored);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), ErrorCode::kExhausted);
  EXPECT_THAT(refused.error().message(), AllOf(HasSubstr(file_.string()), Not(HasSubstr("\n"))));
  EXPECT_TRUE(log->check()) << "there is room again";
  log->write({.act = "retire", .object = "m@3"});
  const auto chain = verify_audit({file_});
  ASSERT_TRUE(chain) << chain.error().message();
  EXPECT_EQ(chain->lines, 3u);
  EXPECT_EQ(chain->lost, 1u);
}

TEST_F(Audit, StrangersDoNotFillTheDisk) {
  const auto log = open();
  const TimePoint now{1h};
  for (int i = 0; i < 1000; ++i) log->write_some({.act = "connect", .result = "no secret"}, now);
  EXPECT_EQ(lines().size(), 10u);
  log->write_some({.act = "connect", .result = "no secret"}, now + 1s);
  ASSERT_EQ(lines().size(), 11u);
  EXPECT_THAT(lines().back(), HasSubstr("\"skipped\":990"));
  EXPECT_EQ(problem(), "");
}

TEST_F(Audit, NamesOfStrangersStayInTheirLine) {
  const auto log = open();
  log->write({.act = "connect", .result = "a\nb\xff", .node = std::string(4096, 'n')});
  EXPECT_EQ(lines().size(), 1u);
  EXPECT_EQ(problem(), "");
}

}  // namespace
}  // namespace rekindle::coordinator
