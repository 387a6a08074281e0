#include "recovery/rpc/audit_log.h"

#include <atomic>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <future>
#include <sstream>

#include <sys/resource.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "src/base/failpoint.h"
#include "tests/support/process.h"
#include "tests/support/syslog_double.h"

namespace rekindle::rpc {
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

TEST_F(Audit, ADirectoryAndAnEndlessLineAreNoLogs) {
  EXPECT_THAT(verify_audit({temp_.path()}).error().message(), HasSubstr("name a file"));
  EXPECT_THAT(verify_audit({"/dev/zero"}).error().message(),
              HasSubstr("/dev/zero:1: it is no line of an audit log"));
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

// The outcome of the log for its lines so far.
Result<void> settled(AuditLog& log) {
  const auto told = std::make_shared<std::promise<Result<void>>>();
  auto outcome = told->get_future();
  log.when_on_disk([told](Result<void> done) { told->set_value(std::move(done)); });
  return outcome.get();
}

TEST_F(Audit, NobodyIsToldThatALineIsOnTheDiskBeforeItIs) {
  const auto log = open();
  ASSERT_TRUE(settled(*log));
  ASSERT_TRUE(arm_failpoints("audit.sync=hold"));
  log->write({.act = "retire", .object = "m@1"});
  std::atomic<bool> told = false;
  log->when_on_disk([&told](Result<void>) { told = true; });
  // The line is in the file, where it outlives this process but not its host.
  EXPECT_EQ(lines().size(), 1u);
  log->write({.act = "retire", .object = "m@2"});
  EXPECT_FALSE(told);
  ASSERT_TRUE(arm_failpoints(""));
  EXPECT_TRUE(settled(*log));
  EXPECT_TRUE(told);
}

TEST_F(Audit, AfterADiskErrorTheNextActIsRefusedAndTheOneAfterTheErrorIsNot) {
  const auto log = open();
  ASSERT_TRUE(arm_failpoints("audit.sync=error:EIO"));
  log->write({.act = "retire", .object = "m@1"});
  const auto lost = settled(*log);
  ASSERT_FALSE(lost);
  EXPECT_THAT(lost.error().message(),
              AllOf(HasSubstr(file_.string()), HasSubstr("may be lost"), Not(HasSubstr("\n"))));
  const auto refused = log->check();
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), ErrorCode::kExhausted);
  ASSERT_TRUE(arm_failpoints(""));
  EXPECT_FALSE(log->check()) << "nobody has tried again";
  EXPECT_TRUE(settled(*log));
  EXPECT_TRUE(log->check());
  EXPECT_EQ(problem(), "");
}

TEST_F(Audit, LinesGoToSyslogWithTheirChain) {
  const auto socket = temp_ / "log";
  rekindle::testing::SyslogDouble syslog(socket);
  auto log = AuditLog::open("syslog:" + socket.string());
  ASSERT_TRUE(log) << log.error().message();
  (*log)->write({.act = "retire", .object = "m@1", .principals = {"uid:0"}});
  (*log)->write({.act = "drain", .object = "gpu-7"});
  EXPECT_TRUE(settled(**log));
  const std::string first = syslog.next();
  // Facility authpriv, severity notice.
  EXPECT_THAT(first, ::testing::StartsWith("<85>"));
  EXPECT_THAT(first, HasSubstr(fmt::format(" rekindle[{}]: {{", ::getpid())));
  put({first.substr(first.find('{')), syslog.next_line()});
  const auto chain = verify_audit({file_});
  ASSERT_TRUE(chain) << chain.error().message();
  EXPECT_EQ(chain->lines, 2u);
}

TEST_F(Audit, WithoutSyslogActsAreRefusedUntilItIsBack) {
  const auto socket = temp_ / "log";
  EXPECT_FALSE(AuditLog::open("syslog:" + socket.string())) << "nobody would get the lines";
  auto syslog = std::make_unique<rekindle::testing::SyslogDouble>(socket);
  auto log = AuditLog::open("syslog:" + socket.string());
  ASSERT_TRUE(log) << log.error().message();
  syslog.reset();
  std::filesystem::remove(socket);
  (*log)->write({.act = "retire", .object = "m@1"});
  EXPECT_FALSE(settled(**log));
  const auto refused = (*log)->check();
  ASSERT_FALSE(refused);
  EXPECT_THAT(refused.error().message(), HasSubstr(socket.string()));
  ASSERT_FALSE(settled(**log));
  syslog = std::make_unique<rekindle::testing::SyslogDouble>(socket);
  EXPECT_FALSE((*log)->check()) << "nobody has tried again";
  EXPECT_TRUE(settled(**log));
  EXPECT_TRUE((*log)->check());
  EXPECT_THAT(syslog->next_line(), HasSubstr("audit_resumed"));
}

TEST_F(Audit, ACutLogAndItsEndShow) {
  write_three();
  const auto whole = rekindle::testing::read_file(file_);
  // In the middle of the last line.
  rekindle::testing::write_file(file_, whole.substr(0, whole.size() - 10));
  EXPECT_THAT(problem(), HasSubstr(":3: "));
  const auto before = [&] {
    rekindle::testing::write_file(file_, whole);
    return verify_audit({file_})->hash;
  }();
  auto all = lines();
  all.pop_back();
  put(all);
  const auto after = verify_audit({file_});
  ASSERT_TRUE(after) << "what was cut at a line shows only to those who keep the last hash";
  EXPECT_NE(after->hash, before);
  EXPECT_EQ(after->last, 2u);
}

TEST_F(Audit, ARestartAfterARotationContinuesTheChain) {
  write_three();
  const auto old = temp_ / "audit.jsonl.1";
  std::filesystem::rename(file_, old);
  write_three();
  const auto both = verify_audit({old, file_});
  ASSERT_TRUE(both) << both.error().message();
  EXPECT_EQ(both->lines, 6u);
  EXPECT_EQ(both->first, 1u);
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
}  // namespace rekindle::rpc
