#include "transport/verbs/link/rail_pairs.h"

#include <algorithm>
#include <map>
#include <random>
#include <set>

#include <gmock/gmock.h>

namespace rekindle::transport::verbs {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Bytes4 = std::array<std::uint8_t, 4>;

constexpr std::uint64_t kFast = 50'000'000'000;

RailInfo ipv4(std::uint32_t index, Bytes4 address, std::uint64_t speed = kFast) {
  RailInfo rail{.index = index, .name = fmt::format("mlx5_{}:1", index), .bytes_per_second = speed};
  rail.address.link = LinkLayer::kEthernet;
  rail.address.gid[10] = rail.address.gid[11] = 0xff;
  std::copy(address.begin(), address.end(), rail.address.gid.begin() + 12);
  return rail;
}
RailInfo ipv6(std::uint32_t index, std::uint8_t network, std::uint8_t host,
              std::uint64_t speed = kFast) {
  RailInfo rail = ipv4(index, {}, speed);
  rail.address.gid = {0x20, 0x01, 0x0d, 0xb8, 0, 0, 0, network, 2, 0, 0, 0xff, 0xfe, 0, 0, host};
  return rail;
}
RailInfo infiniband(std::uint32_t index, std::uint8_t subnet, std::uint8_t guid,
                    std::uint64_t speed = kFast) {
  RailInfo rail = ipv6(index, subnet, guid, speed);
  rail.address.link = LinkLayer::kInfiniBand;
  rail.address.lid = static_cast<std::uint16_t>(guid + 1u);
  return rail;
}

using Rails = std::vector<RailInfo>;
std::vector<RailPair> pairs(const Rails& local, const Rails& remote) {
  const auto chosen = choose_rail_pairs(local, remote);
  EXPECT_TRUE(chosen) << chosen.error().message();
  return chosen.value_or(std::vector<RailPair>{});
}

TEST(RailPairs, RailOptimisedNetworksPairUpRailByRailInAnyOrder) {
  const Rails local{ipv4(0, {10, 0, 1, 5}), ipv4(1, {10, 0, 2, 5}), ipv4(2, {10, 0, 3, 5})};
  const Rails remote{ipv4(0, {10, 0, 3, 9}), ipv4(1, {10, 0, 1, 9}), ipv4(2, {10, 0, 2, 9})};
  EXPECT_THAT(pairs(local, remote), ElementsAre(RailPair{0, 1}, RailPair{1, 2}, RailPair{2, 0}));
}

TEST(RailPairs, NetworksWithinOneByteOfTheAddressPairUpToo) {
  const Rails local{ipv4(0, {10, 0, 0, 1}), ipv4(1, {10, 0, 0, 65}), ipv4(2, {10, 0, 0, 129})};
  const Rails remote{ipv4(0, {10, 0, 0, 130}), ipv4(1, {10, 0, 0, 2}), ipv4(2, {10, 0, 0, 66})};
  EXPECT_THAT(pairs(local, remote), ElementsAre(RailPair{0, 1}, RailPair{1, 2}, RailPair{2, 0}));
}

// .3 shares the longest prefix with both .1 and .2, which means nothing here.
TEST(RailPairs, SourceRailsOfOneNetworkAreSharedEvenlyWhateverTheirNumbers) {
  const Rails local{ipv4(0, {10, 0, 0, 1}), ipv4(1, {10, 0, 0, 2})};
  const Rails remote{ipv4(0, {10, 0, 0, 3}), ipv4(1, {10, 0, 0, 4})};
  EXPECT_THAT(pairs(local, remote), ElementsAre(RailPair{0, 0}, RailPair{1, 1}));
}

TEST(RailPairs, PortNumbersOfInfiniBandAndIpv6SayNothingAboutTheNetwork) {
  for (const auto make : {&ipv6, &infiniband}) {
    const Rails local{make(0, 1, 1, kFast), make(1, 1, 2, kFast)};
    const Rails remote{make(0, 1, 3, kFast), make(1, 1, 4, kFast)};
    EXPECT_THAT(pairs(local, remote), ElementsAre(RailPair{0, 0}, RailPair{1, 1}));
  }
}

TEST(RailPairs, InfiniBandReachesItsOwnSubnetOnly) {
  const Rails local{infiniband(0, 1, 1), infiniband(1, 2, 2)};
  const Rails remote{infiniband(0, 2, 3), infiniband(1, 3, 4)};
  EXPECT_THAT(pairs(local, remote), ElementsAre(RailPair{1, 0}));
}

TEST(RailPairs, FewerRailsAtOneEndAreShared) {
  const Rails many{ipv4(0, {10, 0, 1, 5}), ipv4(1, {10, 0, 2, 5}), ipv4(2, {10, 0, 3, 5})};
  const Rails one{ipv4(0, {10, 0, 2, 9})};
  EXPECT_THAT(pairs(many, one), ElementsAre(RailPair{0, 0}, RailPair{1, 0}, RailPair{2, 0}));
  EXPECT_THAT(pairs(one, many), ElementsAre(RailPair{0, 1}));
}

TEST(RailPairs, RailsBelowHalfTheFastestAreLeftOutUnlessTheyAreAllThatReaches) {
  const Rails local{ipv4(0, {10, 0, 1, 5}), ipv4(1, {10, 0, 2, 5}, kFast / 2),
                    ipv4(2, {10, 0, 3, 5}, kFast / 2 - 1)};
  const Rails remote{ipv4(0, {10, 0, 1, 9}), ipv4(1, {10, 0, 2, 9}), ipv4(2, {10, 0, 3, 9})};
  EXPECT_THAT(pairs(local, remote), ElementsAre(RailPair{0, 0}, RailPair{1, 1}));
  // The fast rails speak InfiniBand there, RoCE here: the slow ones do.
  const Rails mixed{infiniband(0, 1, 1), ipv4(1, {10, 0, 3, 9}, kFast / 10)};
  EXPECT_THAT(pairs(local, mixed), ElementsAre(RailPair{0, 1}, RailPair{1, 1}));
  EXPECT_THAT(pairs(mixed, local), ElementsAre(RailPair{1, 1})) << "to the fast ones there";
}

TEST(RailPairs, UnknownSpeedsCountAsFast) {
  const Rails local{ipv4(0, {10, 0, 1, 5}, 0), ipv4(1, {10, 0, 2, 5})};
  const Rails remote{ipv4(0, {10, 0, 1, 9}, 0), ipv4(1, {10, 0, 2, 9}, 0)};
  EXPECT_THAT(pairs(local, remote), ElementsAre(RailPair{0, 0}, RailPair{1, 1}));
}

TEST(RailPairs, WithoutACommonFabricTheErrorNamesBothSides) {
  const Rails roce{ipv4(0, {10, 0, 1, 5})};
  for (const auto& [local, remote] :
       {std::pair(roce, Rails{infiniband(3, 1, 9)}), std::pair(roce, Rails{ipv6(3, 1, 9)}),
        std::pair(Rails{infiniband(0, 1, 1)}, Rails{infiniband(3, 2, 9)})}) {
    const auto none = choose_rail_pairs(local, remote);
    ASSERT_FALSE(none);
    EXPECT_EQ(none.error().code(), ErrorCode::kUnavailable);
    EXPECT_THAT(none.error().message(),
                AllOf(HasSubstr("here mlx5_0:1 "), HasSubstr("there mlx5_3:1 "),
                      HasSubstr(to_string(remote[0].address))));
  }
  EXPECT_THAT(choose_rail_pairs(Rails{}, roce).error().message(), HasSubstr("here no active port"));
  EXPECT_THAT(choose_rail_pairs(roce, Rails{}).error().message(),
              HasSubstr("there no active port"));
}

// For any hosts there is at most one pair per local rail, between rails that can reach each other.
// Where all reach all equally well, no source rail has two pairs more than another.
TEST(RailPairs, RandomHostsUseEveryLocalRailOnceAndShareTheOthersEvenly) {
  const auto seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  const auto pick = [&](unsigned limit) { return static_cast<unsigned>(random() % limit); };
  for (int round = 0; round < 5000; ++round) {
    const bool flat = pick(2) == 0;
    const auto host = [&](std::uint8_t id) {
      Rails rails(1 + pick(8));
      for (std::uint32_t i = 0; i < rails.size(); ++i) {
        const auto number = static_cast<std::uint8_t>(random());
        rails[i] = flat           ? ipv4(i, {10, 1, 1, number})
                   : pick(4) == 0 ? infiniband(i, static_cast<std::uint8_t>(pick(2)), number)
                                  : ipv4(i, {10, id, static_cast<std::uint8_t>(pick(3)), number},
                                         kFast / (1 + pick(3)));
      }
      return rails;
    };
    const Rails local = host(1), remote = host(static_cast<std::uint8_t>(1 + pick(2)));
    const auto chosen = choose_rail_pairs(local, remote);
    if (!chosen) {
      const auto roce = [](const RailInfo& rail) {
        return rail.address.link == LinkLayer::kEthernet;
      };
      EXPECT_FALSE(std::any_of(local.begin(), local.end(), roce) &&
                   std::any_of(remote.begin(), remote.end(), roce));
      continue;
    }
    std::set<std::uint32_t> used;
    std::map<std::uint32_t, int> uses;
    for (const auto& rail : remote) uses[rail.index] = 0;
    for (const RailPair& pair : *chosen) {
      ASSERT_LT(pair.local, local.size());
      ASSERT_LT(pair.remote, remote.size());
      EXPECT_TRUE(used.insert(pair.local).second) << "a local rail twice";
      EXPECT_EQ(local[pair.local].address.link, remote[pair.remote].address.link);
      ++uses[pair.remote];
    }
    if (!flat) continue;
    EXPECT_EQ(chosen->size(), local.size());
    const auto [least, most] = std::minmax_element(
        uses.begin(), uses.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
    EXPECT_LE(most->second - least->second, 1);
  }
}

}  // namespace
}  // namespace rekindle::transport::verbs
