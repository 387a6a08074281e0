#include "recovery/keeper/kept_copies.h"

#include <fcntl.h>
#include <unistd.h>

#include <gtest/gtest.h>

#include "tests/support/must.h"

namespace rekindle::keeper {
namespace {

using namespace std::chrono_literals;

class KeptCopiesTest : public ::testing::Test {
 protected:
  static KeptCopy copy_of(std::size_t blocks, std::string record = "r", std::uint32_t owner = 1) {
    KeptCopy copy;
    copy.owner = owner;
    copy.record = std::move(record);
    copy.time_to_live = 10s;
    for (std::size_t i = 0; i < blocks; ++i) {
      copy.blocks.emplace_back(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    }
    return copy;
  }
  static bool is_open(int fd) { return ::fcntl(fd, F_GETFD) >= 0; }

  KeptCopies copies_;
  TimePoint now_ = TimePoint(1000s);
};

TEST_F(KeptCopiesTest, ACopyIsKeptUntilItIsDropped) {
  KeptCopy copy = copy_of(2, "what it is");
  const int block = copy.blocks.front().get();
  must(copies_.keep("a", std::move(copy), now_));
  ASSERT_NE(copies_.find("a"), nullptr);
  EXPECT_EQ(copies_.find("a")->record, "what it is");
  EXPECT_EQ(copies_.keep("a", copy_of(1), now_).error().code(), ErrorCode::kInvalid);
  EXPECT_TRUE(is_open(block));
  must(copies_.drop("a"));
  EXPECT_FALSE(is_open(block));
  EXPECT_EQ(copies_.find("a"), nullptr);
  EXPECT_EQ(copies_.drop("a").error().code(), ErrorCode::kNotFound);
}

TEST_F(KeptCopiesTest, WhatIsNoCopyIsRefused) {
  EXPECT_EQ(copies_.keep("", copy_of(1), now_).error().code(), ErrorCode::kInvalid);
  EXPECT_EQ(copies_.keep("a", copy_of(0), now_).error().code(), ErrorCode::kInvalid);
}

TEST_F(KeptCopiesTest, ItsTimeRunsOnlyWhileItHasNoUser) {
  must(copies_.keep("a", copy_of(1), now_));
  EXPECT_EQ(copies_.next_expiry(), now_ + 10s);
  const UserId first = must(copies_.add_user("a"));
  const UserId second = must(copies_.add_user("a"));
  EXPECT_NE(first, second);
  EXPECT_EQ(copies_.next_expiry(), std::nullopt);
  EXPECT_TRUE(copies_.expire(now_ + 1000s).empty());
  EXPECT_EQ(copies_.remove_user(first, now_ + 1000s), "a");
  EXPECT_EQ(copies_.remove_user(first, now_ + 1000s), std::nullopt);
  EXPECT_EQ(copies_.next_expiry(), std::nullopt);
  EXPECT_EQ(copies_.remove_user(second, now_ + 2000s), "a");
  EXPECT_TRUE(copies_.expire(now_ + 2000s + 9999ms).empty());
  EXPECT_EQ(copies_.expire(now_ + 2010s), std::vector<std::string>{"a"});
  EXPECT_TRUE(copies_.all().empty());
}

TEST_F(KeptCopiesTest, TheUsersOfADroppedCopyAreForgotten) {
  must(copies_.keep("a", copy_of(1), now_));
  const UserId user = must(copies_.add_user("a"));
  must(copies_.drop("a"));
  must(copies_.keep("a", copy_of(1), now_));
  EXPECT_EQ(copies_.remove_user(user, now_), std::nullopt);
  EXPECT_NE(must(copies_.add_user("a")), user);
}

TEST_F(KeptCopiesTest, ThereIsAnEndToUsersAndRecords) {
  must(copies_.keep("a", copy_of(1), now_));
  for (std::size_t i = 0; i < kMostUsers; ++i) must(copies_.add_user("a"));
  EXPECT_EQ(copies_.add_user("a").error().code(), ErrorCode::kExhausted);
  EXPECT_EQ(copies_.add_user("b").error().code(), ErrorCode::kNotFound);
  const std::string large(kMostRecordBytes / kOwnersShare / 2 + 1, 'x');
  must(copies_.keep("b", copy_of(1, large), now_));
  EXPECT_EQ(copies_.keep("c", copy_of(1, large), now_).error().code(), ErrorCode::kExhausted);
  must(copies_.drop("b"));
  must(copies_.keep("c", copy_of(1, large), now_));
}

TEST_F(KeptCopiesTest, OneOwnerCannotFillTheKeeper) {
  for (std::size_t i = 0; i < kMostCopies / kOwnersShare; ++i) {
    must(copies_.keep(std::to_string(i), copy_of(1), now_));
  }
  const auto refused = copies_.keep("more", copy_of(1), now_);
  EXPECT_EQ(refused.error().code(), ErrorCode::kExhausted);
  EXPECT_NE(refused.error().message().find("of user 1"), std::string::npos);
  must(copies_.keep("of another", copy_of(1, "r", 2), now_));
  must(copies_.drop("0"));
  must(copies_.keep("more", copy_of(1), now_));
}

TEST_F(KeptCopiesTest, AllOwnersTogetherFillTheKeeper) {
  const std::string large(kMostRecordBytes / kOwnersShare, 'x');
  for (std::uint32_t owner = 1; owner <= kOwnersShare; ++owner) {
    must(copies_.keep(std::to_string(owner), copy_of(1, large, owner), now_));
  }
  EXPECT_EQ(copies_.keep("more", copy_of(1, "r", 99), now_).error().code(), ErrorCode::kExhausted);
}

}  // namespace
}  // namespace rekindle::keeper
