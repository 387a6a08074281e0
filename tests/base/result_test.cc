#include "src/base/result.h"

#include <cerrno>
#include <memory>

#include <gtest/gtest.h>

namespace rekindle {
namespace {

Result<int> parse_positive(int value) {
  if (value <= 0) return fail(ErrorCode::kInvalid, "{} is not positive", value);
  return value;
}

Result<std::unique_ptr<int>> twice(int value) {
  TRY(const int positive, parse_positive(value));
  TRY(int other, parse_positive(positive));
  return std::make_unique<int>(positive + other);
}

Result<void> check(int value) {
  TRY_VOID(parse_positive(value));
  return {};
}

TEST(ResultTest, TryPassesValuesAndErrorsOn) {
  EXPECT_EQ(**twice(4), 8);
  const auto bad = twice(-4);
  ASSERT_FALSE(bad);
  EXPECT_EQ(bad.error().code(), ErrorCode::kInvalid);
  EXPECT_EQ(bad.error().message(), "-4 is not positive");
  EXPECT_TRUE(check(1));
  EXPECT_FALSE(check(0));
}

TEST(ResultTest, ContextStandsInFront) {
  const Error error =
      Error(ErrorCode::kTimeout, "no answer").with_context("connect").with_context("pull m@1");
  EXPECT_EQ(error.message(), "pull m@1: connect: no answer");
  EXPECT_EQ(error.code(), ErrorCode::kTimeout);
}

TEST(ResultTest, ErrnoChoosesTheCode) {
  EXPECT_EQ(errno_error(ENOSPC, "x").code(), ErrorCode::kExhausted);
  EXPECT_EQ(errno_error(EFBIG, "x").code(), ErrorCode::kExhausted);
  EXPECT_EQ(errno_error(EIO, "x").code(), ErrorCode::kInternal);
  EXPECT_EQ(errno_error(ELOOP, "x").code(), ErrorCode::kInvalid);
  EXPECT_EQ(errno_error(ENOENT, "x").code(), ErrorCode::kNotFound);
  EXPECT_EQ(errno_error(EACCES, "x").code(), ErrorCode::kDenied);
  EXPECT_EQ(errno_error(ECONNRESET, "x").code(), ErrorCode::kPeerLost);
  EXPECT_EQ(errno_error(EACCES, "open /a").message(), "open /a: Permission denied");
}

}  // namespace
}  // namespace rekindle
