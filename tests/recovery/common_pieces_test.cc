// Which members share the uploads of which pieces: each expectation is counted by hand.
#include "recovery/coordinator/core/common_pieces.h"

#include <random>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/numbered_digest.h"

namespace rekindle::coordinator {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Pair;
using ::testing::SizeIs;

std::vector<CommonPieces> find_in(const std::vector<Pieces>& wanted) {
  std::vector<const Pieces*> all;
  for (const Pieces& pieces : wanted) all.push_back(&pieces);
  return find_common_pieces(all);
}

TEST(CommonPieces, AreThoseThatAllMembersOfASetWant) {
  const auto found = find_in({{{1, 100}, {10, 50}, {2, 100}}, {{20, 50}, {1, 100}, {2, 100}}});
  ASSERT_THAT(found, SizeIs(1));
  EXPECT_EQ(found[0].bytes, 200u);
  EXPECT_THAT(found[0].members, ElementsAre(0u, 1u));
  EXPECT_THAT(found[0].runs[0], ElementsAre(Pair(0u, 1u), Pair(2u, 3u)));
  EXPECT_THAT(found[0].runs[1], ElementsAre(Pair(1u, 3u)));
}

// Four ranks of one expert-parallel instance, two of which have an expert in common. Together, all
// four save 3 x 100 bytes; the pair would save 160.
TEST(CommonPieces, GoToTheSetThatSavesTheMost) {
  const auto found = find_in({{{1, 100}, {7, 60}},
                              {{1, 100}, {7, 60}, {20, 9}},
                              {{1, 100}, {30, 60}},
                              {{1, 100}, {40, 60}}});
  ASSERT_THAT(found, SizeIs(1));
  EXPECT_EQ(found[0].bytes, 100u);
  EXPECT_THAT(found[0].members, ElementsAre(0u, 1u, 2u, 3u));
}

TEST(CommonPieces, StagesThatShareNothingAreSetsOfTheirOwn) {
  const auto found = find_in({{{1, 100}, {10, 50}},
                              {{2, 300}, {20, 50}},
                              {{1, 100}, {11, 50}},
                              {{2, 300}, {21, 50}},
                              {{3, 100}}});
  ASSERT_THAT(found, SizeIs(2));
  EXPECT_THAT(found[0].members, ElementsAre(1u, 3u));
  EXPECT_THAT(found[1].members, ElementsAre(0u, 2u));
}

TEST(CommonPieces, ThatAreAFewOfWhatAMemberWantsAreLeftOut) {
  EXPECT_THAT(find_in({{{1, 10}, {10, 80}}, {{1, 10}, {20, 10}}}), IsEmpty());
  EXPECT_THAT(find_in({{{1, 10}, {10, 70}}, {{1, 10}, {20, 10}}}), SizeIs(1));
  EXPECT_THAT(find_in({{{1, 0}}, {{1, 0}}}), IsEmpty()) << "nothing to upload";
  EXPECT_THAT(find_in({{{1, 10}}, {{2, 10}}}), IsEmpty());
  EXPECT_THAT(find_in({}), IsEmpty());
}

// The ranks of a round compute its plan from their own order.
TEST(CommonPieces, InDifferentOrdersAreNotCommon) {
  EXPECT_THAT(find_in({{{1, 10}, {2, 10}}, {{2, 10}, {1, 10}}}), IsEmpty());
  const auto found = find_in({{{1, 10}, {2, 10}}, {{2, 10}, {1, 10}}, {{1, 10}, {3, 9}, {2, 10}}});
  ASSERT_THAT(found, SizeIs(1)) << "two of them agree";
  EXPECT_THAT(found[0].members, ElementsAre(0u, 2u));
}

TEST(CommonPieces, APieceThatAMemberHasTwiceIsNotCommon) {
  EXPECT_THAT(find_in({{{1, 10}, {1, 10}}, {{1, 10}}}), IsEmpty());
}

// Against the definition, for random contents.
TEST(CommonPieces, EachSetAgreesWithItsMembers) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    std::mt19937_64 random(seed);
    std::vector<Pieces> wanted(1 + random() % 6);
    for (std::uint64_t key = 1; key < 30; ++key) {
      for (Pieces& pieces : wanted) {
        if (random() % 3 == 0) pieces.push_back({key, key * 10});
      }
    }
    std::set<std::size_t> seen;
    for (const CommonPieces& common : find_in(wanted)) {
      ASSERT_GE(common.members.size(), 2u) << seed;
      ASSERT_EQ(common.members.size(), common.runs.size()) << seed;
      std::vector<std::uint64_t> expected;
      std::uint64_t bytes = 0;
      for (std::uint64_t key = 1; key < 30; ++key) {
        const bool all = std::ranges::all_of(common.members, [&](std::size_t member) {
          return std::ranges::find(wanted[member], key, &WantedPiece::key) != wanted[member].end();
        });
        if (!all) continue;
        expected.push_back(key);
        bytes += key * 10;
      }
      EXPECT_EQ(common.bytes, bytes) << seed;
      for (std::size_t i = 0; i < common.members.size(); ++i) {
        EXPECT_TRUE(seen.insert(common.members[i]).second) << seed;
        std::vector<std::uint64_t> its_keys;
        for (const auto& [begin, end] : common.runs[i]) {
          for (auto at = begin; at < end; ++at) {
            its_keys.push_back(wanted[common.members[i]].at(at).key);
          }
        }
        EXPECT_EQ(its_keys, expected) << seed;
      }
    }
  }
}

TEST(KnownPieces, ForgetsContentsThatNobodyWantsForNewOnes) {
  KnownPieces known(4);
  const auto nobody = [](const Digest&) { return false; };
  const auto everybody = [](const Digest&) { return true; };
  const Digest a = test::numbered_digest(1);
  const Digest b = test::numbered_digest(2);
  known.add(a, {{1, 1}, {2, 2}, {3, 3}}, everybody);
  known.add(b, {{4, 4}, {5, 5}}, everybody);
  EXPECT_NE(known.find(a), nullptr);
  EXPECT_EQ(known.find(b), nullptr) << "no room";
  EXPECT_TRUE(known.knows(b)) << "so that nobody is asked again";
  const Digest c = test::numbered_digest(3);
  known.add(c, {{4, 4}, {5, 5}}, nobody);
  EXPECT_FALSE(known.knows(a));
  EXPECT_FALSE(known.knows(b));
  ASSERT_NE(known.find(c), nullptr);
  known.add(c, {}, everybody);
  EXPECT_THAT(*known.find(c), SizeIs(2)) << "the first description stays";
}

// Otherwise their agents would describe them for ever, one after the other.
TEST(KnownPieces, ContentsWithoutRoomAreAskedForAgainOnlyWhenThereIsRoom) {
  KnownPieces known(4);
  const Digest a = test::numbered_digest(1);
  const auto everybody = [](const Digest&) { return true; };
  known.add(a, {{1, 1}, {2, 2}, {3, 3}}, everybody);
  const Digest b = test::numbered_digest(2);
  const Digest c = test::numbered_digest(3);
  known.add(b, {{4, 4}, {5, 5}}, everybody);
  known.add(c, {{6, 6}, {7, 7}, {8, 8}}, everybody);
  EXPECT_TRUE(known.knows(b));
  EXPECT_TRUE(known.knows(c));
  const Digest d = test::numbered_digest(4);
  known.add(d, {{9, 9}, {10, 10}}, [&](const Digest& contents) { return contents != a; });
  EXPECT_NE(known.find(d), nullptr);
  EXPECT_FALSE(known.knows(a));
  EXPECT_FALSE(known.knows(b)) << "there is room for it now";
  EXPECT_TRUE(known.knows(c)) << "there is none for it";
}

}  // namespace
}  // namespace rekindle::coordinator
