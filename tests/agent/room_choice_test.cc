#include "recovery/agent/core/room_choice.h"

#include <gtest/gtest.h>

namespace rekindle::agent {
namespace {

using namespace std::chrono_literals;

constexpr TimePoint kBegan{1h};
const std::string kNothing = "there is too little";

RoomChoice::Candidate version(std::uint64_t number, std::uint64_t bytes, std::string why = "") {
  return {{"m", number}, bytes, std::move(why)};
}

std::vector<std::uint64_t> numbers(const Result<std::vector<RoomChoice::Candidate>>& chosen) {
  std::vector<std::uint64_t> numbers;
  for (const auto& candidate : chosen.value()) numbers.push_back(candidate.id.version);
  return numbers;
}

TEST(RoomChoice, TheOldestAreChosenAndNoMoreThanNeeded) {
  RoomChoice choice(15, {version(1, 10), version(2, 10), version(3, 10)}, kBegan);
  ASSERT_EQ(choice.next_question(), (ModelVersion{"m", 1}));
  choice.agreed();
  ASSERT_EQ(choice.next_question(), (ModelVersion{"m", 2}));
  choice.agreed();
  EXPECT_FALSE(choice.next_question()) << "nobody is asked about the third";
  EXPECT_EQ(numbers(choice.chosen(kNothing)), (std::vector<std::uint64_t>{1, 2}));
}

TEST(RoomChoice, WhereTheCoordinatorRefusesTheNextOneIsAskedAbout) {
  RoomChoice choice(10, {version(1, 10), version(2, 10)}, kBegan);
  choice.refused("m@1 must stay");
  ASSERT_EQ(choice.next_question(), (ModelVersion{"m", 2}));
  choice.agreed();
  EXPECT_EQ(numbers(choice.chosen(kNothing)), (std::vector<std::uint64_t>{2}));
}

TEST(RoomChoice, WithoutEnoughNothingIsChosenAndEachReasonIsNamed) {
  RoomChoice choice(20, {version(1, 10, "m@1 is used"), version(2, 10), version(3, 10)}, kBegan);
  choice.agreed();
  choice.refused("m@3 must stay");
  EXPECT_FALSE(choice.next_question());
  const auto chosen = choice.chosen(kNothing);
  ASSERT_FALSE(chosen);
  EXPECT_EQ(chosen.error().code(), ErrorCode::kExhausted);
  EXPECT_EQ(chosen.error().message(), "m@1 is used; m@3 must stay");
}

TEST(RoomChoice, NobodyIsAskedWhereAllTogetherAreTooSmall) {
  const RoomChoice choice(20, {version(1, 10)}, kBegan);
  EXPECT_FALSE(choice.next_question());
  EXPECT_EQ(choice.chosen(kNothing).error().message(), kNothing);
}

TEST(RoomChoice, TheAgreementEndsWithTheConnectionAndWithTime) {
  RoomChoice choice(10, {version(1, 10)}, kBegan);
  choice.agreed();
  const auto unused = [](const ModelVersion&) { return std::string(); };
  EXPECT_TRUE(choice.confirm(true, kBegan + 30s, unused));
  EXPECT_EQ(choice.confirm(true, kBegan + 31s, unused).error().code(), ErrorCode::kUnavailable);
  EXPECT_EQ(choice.confirm(false, kBegan, unused).error().code(), ErrorCode::kUnavailable);
}

TEST(RoomChoice, AVersionThatIsNeededMeanwhileStays) {
  RoomChoice choice(10, {version(1, 10)}, kBegan);
  choice.agreed();
  const auto used = [](const ModelVersion& id) { return id.to_string() + " is used"; };
  const auto confirmed = choice.confirm(true, kBegan, used);
  ASSERT_FALSE(confirmed);
  EXPECT_EQ(confirmed.error().message(), "m@1 is used");
}

}  // namespace
}  // namespace rekindle::agent
