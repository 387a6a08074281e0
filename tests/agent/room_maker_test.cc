#include "recovery/agent/room_maker.h"

#include <future>
#include <stdexcept>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/use_future.hpp>
#include <gtest/gtest.h>

#include "recovery/agent/core/room_choice.h"
#include "tests/support/process.h"

namespace rekindle::agent {
namespace {

using testing::TempDir;
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

// One caller at a time: the turn of one whose call throws is over, too.
TEST(RoomMaker, B8ACallThatThrowsDoesNotHoldUpTheNextOne) {
  TempDir dir{true};
  const auto store = store::SegmentStore::open({dir / "store", 1 << 20});
  ASSERT_TRUE(store) << store.error().message();
  boost::asio::io_context context;
  const auto executor = context.get_executor();
  const rpc::Identity identity;
  GrantClock grant_clock;
  WorkerPool pool("t-blocking", 1, 16);
  transport::SegmentRegistry registry;
  ServedVersions served(registry);
  CoordinatorLink link(executor, identity, grant_clock, "");
  VersionReaders readers;
  const PublisherKeys publishers;
  RoomMaker maker(executor,
                  {identity, **store, pool, pool, registry, served, link, readers, publishers}, {});
  const auto make = [&](RoomMaker::MissingBytes missing) {
    auto made = boost::asio::co_spawn(context, maker.make({"m", 2}, std::move(missing)),
                                      boost::asio::use_future);
    context.restart();
    context.run_for(std::chrono::seconds(10));
    EXPECT_EQ(made.wait_for(std::chrono::seconds(0)), std::future_status::ready);
    return made;
  };
  auto first = make([]() -> std::uint64_t { throw std::bad_alloc(); });
  EXPECT_THROW((void)first.get(), std::bad_alloc);
  auto second = make([] { return std::uint64_t{0}; });
  EXPECT_TRUE(second.get());
}

}  // namespace
}  // namespace rekindle::agent
