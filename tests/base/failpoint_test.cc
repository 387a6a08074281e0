#include "src/base/failpoint.h"

#include <atomic>
#include <csignal>
#include <thread>

#include <sys/wait.h>
#include <unistd.h>

#include <gmock/gmock.h>

namespace rekindle {
namespace {

using ::testing::HasSubstr;

class FailpointTest : public ::testing::Test {
 protected:
  void TearDown() override { EXPECT_TRUE(arm_failpoints("")); }
};

TEST_F(FailpointTest, UnarmedOnesPass) {
  EXPECT_TRUE(failpoint("a.b"));
  ASSERT_TRUE(arm_failpoints("a.b=error:EIO"));
  EXPECT_TRUE(failpoint("a.c"));
}

TEST_F(FailpointTest, ErrorsCarryTheirErrnoAndName) {
  ASSERT_TRUE(arm_failpoints("a.b=error:ENOSPC;c=error:EIO"));
  const auto full = failpoint("a.b");
  ASSERT_FALSE(full);
  EXPECT_EQ(full.error().code(), ErrorCode::kExhausted);
  EXPECT_THAT(full.error().message(), HasSubstr("failpoint a.b: No space left"));
  EXPECT_THAT(failpoint("c").error().message(), HasSubstr("Input/output error"));
  ASSERT_TRUE(arm_failpoints(""));
  EXPECT_TRUE(failpoint("a.b"));
}

TEST_F(FailpointTest, AHitLimitsTheActionToThatPassage) {
  ASSERT_TRUE(arm_failpoints("a=error:EIO@3"));
  EXPECT_TRUE(failpoint("a"));
  EXPECT_TRUE(failpoint("a"));
  EXPECT_FALSE(failpoint("a"));
  EXPECT_TRUE(failpoint("a"));
}

TEST_F(FailpointTest, KillDiesBySigkill) {
  const pid_t child = ::fork();
  if (child == 0) {
    (void)arm_failpoints("a=kill");
    (void)failpoint("a");
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  ASSERT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ(WTERMSIG(status), SIGKILL);
}

TEST_F(FailpointTest, HoldEndsWithTheNextArming) {
  ASSERT_TRUE(arm_failpoints("a=hold"));
  std::atomic<bool> released = false;
  bool released_before_it_passed = false;
  std::thread held([&] {
    EXPECT_TRUE(failpoint("a"));
    released_before_it_passed = released;
  });
  released = true;
  ASSERT_TRUE(arm_failpoints("b=hold"));
  held.join();
  EXPECT_TRUE(released_before_it_passed);
}

TEST_F(FailpointTest, WhatDoesNotParseArmsNothing) {
  for (const char* bad : {"a", "=kill", "a=", "a=explode", "a=error:EPERM", "a=sleep:", "a=sleep:x",
                          "a=kill@0", "a=kill@x", "a=hold:1", "b=error:EIO;a=explode"}) {
    const auto armed = arm_failpoints(bad);
    ASSERT_FALSE(armed) << bad;
    EXPECT_EQ(armed.error().code(), ErrorCode::kInvalid);
    EXPECT_TRUE(failpoint("a"));
    EXPECT_TRUE(failpoint("b"));
  }
}

}  // namespace
}  // namespace rekindle
