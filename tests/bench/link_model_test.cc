#include "tests/bench/link_model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/bench/spread_model.h"

namespace rekindle::bench {
namespace {

using ::testing::DoubleNear;
using ::testing::ElementsAre;

TEST(LinkModel, AFlowThatIsSlowElsewhereLeavesItsShareToTheOthers) {
  LinkModel links;
  const auto shared = links.add_link(100);
  const auto slow = links.add_link(20);
  const auto held_back = links.start({shared, slow}, 200);
  const auto free = links.start({shared}, 1600);
  EXPECT_DOUBLE_EQ(links.rate(held_back), 20);
  EXPECT_DOUBLE_EQ(links.rate(free), 80);
  EXPECT_DOUBLE_EQ(links.next_end(), 10);
  EXPECT_THAT(links.advance(10), ElementsAre(held_back));
  EXPECT_DOUBLE_EQ(links.rate(free), 100);
  EXPECT_THAT(links.advance(links.next_end()), ElementsAre(free));
  EXPECT_DOUBLE_EQ(links.carried(shared), 1800);
  EXPECT_DOUBLE_EQ(links.carried(slow), 200);
}

// Two hosts with one rank each fetch a half each of one bucket, upload it and receive the other.
TEST(SpreadModel, ABucketIsFetchedUploadedAndSpreadInTurn) {
  SpreadRates rates;
  rates.host = 1000;
  rates.gpu = 500;
  rates.keep = 0;
  rates.verify = 1e12;
  rates.spread_start = rates.release = rates.fetched = 0;
  SpreadParty party{1000, 1, {}};
  for (std::size_t host = 0; host < 2; ++host) party.ranks.push_back({host, {1000}, {{1000}}});
  SpreadModel model(rates, {{1000}, {1000}}, {party});
  // The source sends 2000 bytes. Then each GPU uploads a half, and receives the other.
  EXPECT_THAT(model.run(), DoubleNear(2 + 2 + 2, 1e-2));
  EXPECT_THAT(model.host_in(1), DoubleNear(2000, 5));
  EXPECT_THAT(model.source_out(0), DoubleNear(2000, 5));
}

// While a bucket waits for its release, a second slot takes the next one.
TEST(SpreadModel, ASecondSlotHidesTheRelease) {
  SpreadRates rates;
  rates.host = 1e9;
  rates.gpu = 1000;
  rates.keep = 0;
  rates.release = 50;
  rates.spread_start = rates.fetched = 0;
  const auto took = [&](std::size_t slots) {
    rates.slots = slots;
    SpreadParty party{1e5, 4, {}};
    for (std::size_t host = 0; host < 2; ++host) {
      party.ranks.push_back({host, std::vector<double>(4, 1e5), {4, {0.0}}});
    }
    return SpreadModel(rates, {{0}, {0}}, {party}).run();
  };
  EXPECT_THAT(took(1), DoubleNear(4 * (100 + 100 + 50), 1));
  EXPECT_THAT(took(2), DoubleNear(4 * (100 + 100) + 50, 1));
}

}  // namespace
}  // namespace rekindle::bench
