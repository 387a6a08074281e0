#include <algorithm>
#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "src/base/units.h"
#include "transport/verbs/memory/registered_region.h"

namespace rekindle::transport::verbs {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr std::uint64_t kHuge = 2 * kMiB;

TEST(PiecePlan, ARegionThatFitsIsOnePiece) {
  EXPECT_THAT(plan_pieces(kGiB + 4096, 3 * kMiB + 17, {}), ElementsAre(Cut{0, 3 * kMiB + 17}));
  EXPECT_THAT(plan_pieces(kGiB, 0, {}), IsEmpty());
}

TEST(PiecePlan, BordersLieOnMultiplesOfTheAddress) {
  // 1 MiB past a border: the first piece is shorter, so that the others begin on one.
  EXPECT_THAT(plan_pieces(kGiB + kMiB, 9 * kMiB, {.max_bytes = 4 * kMiB}),
              ElementsAre(Cut{0, 3 * kMiB}, Cut{3 * kMiB, 4 * kMiB}, Cut{7 * kMiB, 2 * kMiB}));
}

TEST(PiecePlan, ADeviceMaximumBelowTheAlignmentIsStillKept) {
  EXPECT_THAT(plan_pieces(kGiB, 20'000, {.max_bytes = 8192}),
              ElementsAre(Cut{0, 8192}, Cut{8192, 8192}, Cut{16'384, 3616}));
}

TEST(PiecePlan, NumaBordersAreCut) {
  const auto node_at = [](std::uint64_t address) { return address < kGiB + 6 * kMiB ? 0 : 1; };
  EXPECT_THAT(plan_pieces(kGiB, 10 * kMiB, {.node_at = node_at}),
              ElementsAre(Cut{0, 6 * kMiB}, Cut{6 * kMiB, 4 * kMiB}));
}

TEST(PiecePlan, PagesOfNoKnownNodeCutNothing) {
  const auto node_at = [](std::uint64_t address) { return address / kHuge % 2 == 0 ? 3 : -1; };
  EXPECT_THAT(plan_pieces(kGiB, 10 * kMiB, {.node_at = node_at}), ElementsAre(Cut{0, 10 * kMiB}));
  const auto first_unknown = [](std::uint64_t address) {
    if (address < kGiB + kHuge) return -1;
    return address < kGiB + 2 * kHuge ? 0 : 1;
  };
  EXPECT_THAT(plan_pieces(kGiB, 3 * kHuge, {.node_at = first_unknown}),
              ElementsAre(Cut{0, 2 * kHuge}, Cut{2 * kHuge, kHuge}));
}

TEST(PiecePlan, ARegionMayEndWhereAddressesDo) {
  const std::uint64_t address = ~std::uint64_t{0} - 5 * kMiB + 1;
  const auto cuts = plan_pieces(address, 5 * kMiB, {.max_bytes = 2 * kMiB});
  EXPECT_THAT(cuts, ElementsAre(Cut{0, kMiB}, Cut{kMiB, kHuge}, Cut{kMiB + kHuge, kHuge}));
}

struct Problem {
  std::uint64_t address = 0, bytes = 0;
  CutRules rules;
  std::vector<int> nodes;  // of blocks, from address / alignment on
};

Problem random_problem(std::mt19937_64& random) {
  const auto up_to = [&](std::uint64_t limit) {
    return std::uniform_int_distribution<std::uint64_t>(0, limit)(random);
  };
  Problem problem;
  problem.rules.alignment = std::uint64_t{1} << (6 + up_to(6));
  problem.rules.max_bytes = 1 + up_to(40 * problem.rules.alignment);
  if (up_to(4) == 0) problem.rules.max_bytes = 1 + up_to(2 * problem.rules.alignment);
  problem.address = kGiB + up_to(3 * problem.rules.alignment);
  problem.bytes = up_to(100 * problem.rules.alignment);
  int node = 0;
  for (int i = 0; i < 110; ++i) {
    if (up_to(9) == 0) node = static_cast<int>(up_to(2)) - 1;
    problem.nodes.push_back(node);
  }
  return problem;
}

void check(const Problem& problem, bool with_nodes) {
  CutRules rules = problem.rules;
  const std::uint64_t alignment = rules.alignment;
  const auto node_at = [&](std::uint64_t address) {
    return problem.nodes.at((address - kGiB) / alignment);
  };
  if (with_nodes) rules.node_at = node_at;
  const auto cuts = plan_pieces(problem.address, problem.bytes, rules);
  std::uint64_t next = 0;
  for (const Cut& cut : cuts) {
    ASSERT_EQ(cut.offset, next) << "complete, in order";
    ASSERT_GT(cut.bytes, 0u);
    ASSERT_LE(cut.bytes, rules.max_bytes);
    next += cut.bytes;
    if (rules.max_bytes >= alignment && cut.offset > 0) {
      ASSERT_EQ((problem.address + cut.offset) % alignment, 0u);
    }
    if (!with_nodes) continue;
    int known = -1;
    const std::uint64_t begin = problem.address + cut.offset;
    for (std::uint64_t at = begin; at < begin + cut.bytes; at = (at / alignment + 1) * alignment) {
      const int node = node_at(at);
      if (node == -1) continue;
      ASSERT_TRUE(known == -1 || known == node) << "one node";
      known = node;
    }
  }
  ASSERT_EQ(next, problem.bytes);
  if (with_nodes || cuts.size() < 2) return;
  // No more pieces than alignment forces: each but the first and last fills at least half.
  for (std::size_t i = 1; i + 1 < cuts.size(); ++i) {
    ASSERT_GT(2 * cuts[i].bytes, rules.max_bytes);
  }
}

TEST(PiecePlanProperty, CutsAreCompleteOrderedAlignedBoundedAndOnOneNode) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  for (int round = 0; round < 3000; ++round) {
    const Problem problem = random_problem(random);
    for (const bool with_nodes : {false, true}) {
      check(problem, with_nodes);
      if (::testing::Test::HasFatalFailure()) return;
    }
  }
}

}  // namespace
}  // namespace rekindle::transport::verbs
