#include "src/base/fair_places.h"

#include <gtest/gtest.h>

namespace rekindle {
namespace {

TEST(FairPlaces, FreePlacesGoToWhoeverComesFirst) {
  EXPECT_EQ(places_left(8, {}, "a"), 8u);
  EXPECT_EQ(places_left(8, {{"a", 7}}, "a"), 1u);
  EXPECT_EQ(places_left(8, {{"a", 7}}, "b"), 1u);
}

TEST(FairPlaces, APartyWithLessThanItsPartGetsTheRestOfItAtAFullTable) {
  EXPECT_EQ(places_left(8, {{"hog", 8}}, "b"), 4u);
  EXPECT_EQ(places_left(8, {{"hog", 8}, {"b", 1}}, "b"), 3u);
  EXPECT_EQ(places_left(8, {{"hog", 8}, {"b", 4}}, "b"), 0u);
  EXPECT_EQ(places_left(8, {{"hog", 8}, {"b", 4}}, "c"), 2u);
}

TEST(FairPlaces, AHogGetsNoMoreAtAFullTable) {
  EXPECT_EQ(places_left(8, {{"hog", 8}}, "hog"), 0u);
  EXPECT_EQ(places_left(8, {{"hog", 8}, {"b", 1}}, "hog"), 0u);
}

TEST(FairPlaces, EqualPartiesStayWithinThePlaces) {
  EXPECT_EQ(places_left(2, {{"a", 1}, {"b", 1}}, "c"), 0u);
  EXPECT_EQ(places_left(1, {{"a", 1}}, "b"), 0u);
  EXPECT_EQ(places_left(0, {}, "a"), 0u);
}

TEST(FairPlaces, PartiesWithoutEndGetABoundedNumberOfPlaces) {
  PlacesTaken taken;
  std::size_t all = 0;
  for (int i = 0; i < 1000; ++i) {
    const std::string party = std::to_string(i);
    while (places_left(64, taken, party) > 0) {
      ++taken[party];
      ++all;
    }
  }
  EXPECT_LE(all, 5u * 64u);
}

}  // namespace
}  // namespace rekindle
