#include "recovery/joint/local_ranks.h"

#include <gtest/gtest.h>

#include "tests/joint/joint_sample.h"

namespace rekindle::joint {
namespace {

using test::code_of;
using test::kId;
using Ranks = std::vector<std::uint32_t>;

Declaration declaration(std::uint32_t rank, std::uint64_t rows = 4) {
  const Shape shape{rows, 8};
  return {rank, {{{"w", DType::kF32, shape}, {Box::whole(shape)}}}};
}

// No bytes: LocalRanks only keeps them.
store::FilledSegments filled() {
  auto tensors = must(TensorSet::create({{"w", DType::kF32, {4, 8}}}));
  const std::vector<TensorBox> boxes{{0, Box::whole({4, 8})}};
  auto packed = must(pack_layout(tensors, boxes, 1 << 20));
  return {std::move(tensors), std::move(packed), {}};
}

class LocalRanksTest : public ::testing::Test {
 protected:
  // A world of eight ranks, of which 1 and 2 are here.
  void declare_both() {
    ASSERT_TRUE(ranks_.declare(8, declaration(1), 100));
    ASSERT_TRUE(ranks_.declare(8, declaration(2), 200));
  }
  void seal() { ranks_.seal(here_); }

  const Ranks here_{1, 2};
  LocalRanks ranks_{kId, 8};
};

TEST_F(LocalRanksTest, RanksAreHereUntilTheyLeave) {
  EXPECT_TRUE(ranks_.deserted());
  declare_both();
  EXPECT_EQ(ranks_.present(), here_);
  EXPECT_FALSE(ranks_.deserted());
  EXPECT_TRUE(ranks_.owns(1, 100));
  EXPECT_FALSE(ranks_.owns(1, 200));
  EXPECT_FALSE(ranks_.owns(3, 100));
  ranks_.leave(1, 100);
  EXPECT_EQ(ranks_.present(), Ranks{2});
  EXPECT_FALSE(ranks_.owns(1, 100));
  ranks_.leave(2, 200);
  EXPECT_TRUE(ranks_.deserted());
}

TEST_F(LocalRanksTest, AnotherWorldAndRanksOutsideOfItAreRefused) {
  EXPECT_EQ(ranks_.world(), 8u);
  EXPECT_EQ(code_of(ranks_.declare(9, declaration(1), 100)), ErrorCode::kInvalid);
  EXPECT_EQ(code_of(ranks_.declare(8, declaration(8), 100)), ErrorCode::kInvalid);
  EXPECT_TRUE(ranks_.deserted());
  EXPECT_TRUE(ranks_.declare(8, declaration(7), 100));
}

TEST_F(LocalRanksTest, TwoProcessesCannotHaveTheSameRank) {
  declare_both();
  EXPECT_EQ(code_of(ranks_.declare(8, declaration(1), 101)), ErrorCode::kDenied);
  EXPECT_TRUE(ranks_.owns(1, 100));
  seal();
  EXPECT_EQ(code_of(ranks_.declare(8, declaration(1), 101)), ErrorCode::kDenied);
}

TEST_F(LocalRanksTest, ARankMayComeBackWithAnotherDeclarationBeforeTheSeal) {
  declare_both();
  ranks_.leave(1, 100);
  ASSERT_TRUE(ranks_.declare(8, declaration(1, 6), 101));
  EXPECT_EQ(must(ranks_.declarations(here_)),
            (std::vector<Declaration>{declaration(1, 6), declaration(2)}));
}

TEST_F(LocalRanksTest, ARankMayComeBackWithTheSameDeclarationAfterTheSeal) {
  declare_both();
  seal();
  ranks_.leave(1, 100);
  EXPECT_EQ(must(ranks_.declarations(here_)).size(), 2u) << "a declaration stays";
  ASSERT_TRUE(ranks_.declare(8, declaration(1), 101));
  EXPECT_TRUE(ranks_.owns(1, 101));
  ASSERT_TRUE(ranks_.fill(1, 101, filled()));
}

TEST_F(LocalRanksTest, AnotherDeclarationAfterTheSealIsDenied) {
  declare_both();
  seal();
  ranks_.leave(1, 100);
  EXPECT_EQ(code_of(ranks_.declare(8, declaration(1, 6), 101)), ErrorCode::kDenied);
  EXPECT_EQ(ranks_.present(), Ranks{2});
  EXPECT_EQ(must(ranks_.declarations(here_))[0], declaration(1));
}

TEST_F(LocalRanksTest, TheLeaveOfAnOldProcessDoesNotTouchTheNewOne) {
  declare_both();
  ranks_.leave(1, 100);
  ASSERT_TRUE(ranks_.declare(8, declaration(1), 101));
  ranks_.leave(1, 100);
  EXPECT_TRUE(ranks_.owns(1, 101));
  EXPECT_EQ(ranks_.present(), here_);
  EXPECT_EQ(code_of(ranks_.fill(1, 100, filled())), ErrorCode::kStale);
  ranks_.leave(5, 100);
  EXPECT_EQ(ranks_.present(), here_);
}

TEST_F(LocalRanksTest, ARankFillsOnce) {
  declare_both();
  seal();
  EXPECT_EQ(ranks_.unfilled(here_), here_);
  ASSERT_TRUE(ranks_.fill(1, 100, filled()));
  EXPECT_EQ(ranks_.unfilled(here_), Ranks{2});
  EXPECT_EQ(code_of(ranks_.fill(1, 100, filled())), ErrorCode::kStale);
  EXPECT_EQ(code_of(ranks_.fill(3, 100, filled())), ErrorCode::kStale);
  EXPECT_EQ(code_of(ranks_.fill(2, 100, filled())), ErrorCode::kStale) << "it has another owner";
  EXPECT_EQ(ranks_.take(1).tensors.size(), 1u);
  EXPECT_EQ(ranks_.unfilled(here_), Ranks{2}) << "what was taken is not asked for again";
  EXPECT_EQ(code_of(ranks_.fill(1, 100, filled())), ErrorCode::kStale);
}

TEST_F(LocalRanksTest, CommittedBytesStayWhenTheirProcessLeaves) {
  declare_both();
  seal();
  ASSERT_TRUE(ranks_.fill(1, 100, filled()));
  ranks_.leave(1, 100);
  EXPECT_EQ(ranks_.present(), Ranks{2});
  EXPECT_EQ(ranks_.unfilled(here_), Ranks{2});
  EXPECT_EQ(code_of(ranks_.declare(8, declaration(1), 101)), ErrorCode::kDenied);
}

TEST_F(LocalRanksTest, DeclarationsOfARankThatIsNotHereAreStale) {
  declare_both();
  EXPECT_EQ(code_of(ranks_.declarations(Ranks{1, 3})), ErrorCode::kStale);
  EXPECT_EQ(must(ranks_.declarations(Ranks{2, 1})),
            (std::vector<Declaration>{declaration(2), declaration(1)}));
  EXPECT_EQ(ranks_.unfilled(Ranks{3}), Ranks{3});
}

TEST_F(LocalRanksTest, ANewRankAfterTheSealIsDenied) {
  declare_both();
  seal();
  EXPECT_EQ(code_of(ranks_.declare(8, declaration(3), 300)), ErrorCode::kDenied);
  EXPECT_EQ(ranks_.present(), here_);
}

// Rank 3 began here, and a scheduler moved it to another host before the roster was complete.
TEST_F(LocalRanksTest, ARankThatMovedAwayBeforeTheSealIsDeniedAfterwards) {
  declare_both();
  ASSERT_TRUE(ranks_.declare(8, declaration(3), 300));
  ranks_.leave(3, 300);
  seal();
  EXPECT_EQ(code_of(ranks_.declare(8, declaration(3), 301)), ErrorCode::kDenied);
  EXPECT_EQ(ranks_.present(), here_);
}

// The roster became complete with rank 3 at another host while a second process declared it here.
TEST_F(LocalRanksTest, TheSealTurnsAwayRanksOfOtherHosts) {
  declare_both();
  ASSERT_TRUE(ranks_.declare(8, declaration(3), 300));
  seal();
  EXPECT_FALSE(ranks_.owns(3, 300));
  EXPECT_EQ(code_of(ranks_.fill(3, 300, filled())), ErrorCode::kStale);
  EXPECT_EQ(ranks_.present(), here_);
}

}  // namespace
}  // namespace rekindle::joint
