#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/recovery/rounds_fixture.h"
#include "tests/support/numbered_digest.h"

// Broadcast rounds: their members, their parties, and their end.
namespace rekindle::coordinator {
namespace {

using namespace testing;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST_F(ThreeWorkers, AreBroughtAVersionByBroadcast) {
  const RoundId number = begin();
  EXPECT_TRUE(rounds.orders_for("a").at(0).gathering);
  now += 100ms;
  all_join(number);
  EXPECT_EQ(round(number).phase(), RoundPhase::kMeeting);
  EXPECT_TRUE(order("a", number).make_id);
  EXPECT_FALSE(order("b", number).make_id);
  EXPECT_FALSE(rounds.orders_for("a").at(0).gathering);
  now += 200ms;
  make_id("a", number);
  EXPECT_EQ(round(number).phase(), RoundPhase::kSpreading);
  std::set<std::uint32_t> ranks;
  for (const char* name : {"a", "b", "c"}) {
    const PartyOrder told = order(name, number);
    EXPECT_EQ(told.state, PartyState::kSpreading);
    EXPECT_EQ(told.id, "id-of-a");
    EXPECT_EQ(told.communicator, "3-1");
    EXPECT_EQ(told.ranks, 3u);
    EXPECT_THAT(told.owners, ElementsAre(1u)) << "b has all of it";
    ASSERT_EQ(told.members.size(), 1u);
    EXPECT_EQ(told.members[0].session, member(name).session);
    ranks.insert(told.members[0].rank);
  }
  EXPECT_THAT(ranks, ElementsAre(0u, 1u, 2u));
  everybody(RoundMemberState::kSpreading);
  now += 300ms;
  everybody(RoundMemberState::kFilled);
  EXPECT_EQ(round(number).phase(), RoundPhase::kLoading);
  now += 400ms;
  everybody(RoundMemberState::kReady);
  const Round& done = round(number);
  EXPECT_TRUE(done.over());
  EXPECT_TRUE(rounds.orders_for("a").empty());
  EXPECT_EQ(done.took().at(RoundPhase::kGathering), 100ms);
  EXPECT_EQ(done.took().at(RoundPhase::kMeeting), 200ms);
  EXPECT_EQ(done.took().at(RoundPhase::kSpreading), 300ms);
  EXPECT_EQ(done.took().at(RoundPhase::kLoading), 400ms);
  for (const RoundPlace& each : done.places()) EXPECT_EQ(each.state_name(), "ready");
}

TEST_F(ThreeWorkers, WithoutAWholeCopyTheOwnersAreThoseWhoseHostsFetch) {
  const RoundId number = begin();
  for (const char* name : {"a", "b", "c"}) join(name, number, false);
  for (const char* name : {"a", "c"}) member(name).fetches = true;
  say_all();
  const PartyOrder told = order("a", number);
  EXPECT_TRUE(told.owners_fetch);
  EXPECT_EQ(told.ranks, 2u);
  EXPECT_THAT(told.owners, ElementsAre(0u, 1u));
  EXPECT_EQ(order("b", number).state, PartyState::kStopped) << "its host fetches no share";
}

TEST_F(ThreeWorkers, NobodyFetchesWhereAHostHasTheWholeCopy) {
  const RoundId number = begin();
  for (const char* name : {"a", "b", "c"}) {
    join(name, number, std::string_view(name) == "b");
    member(name).fetches = !member(name).owner;
  }
  say_all();
  EXPECT_FALSE(order("a", number).owners_fetch);
  EXPECT_THAT(order("a", number).owners, ElementsAre(1u));
}

TEST_F(ThreeWorkers, WithoutACopyAndWithoutWhoFetchesTheyGoAlone) {
  const RoundId number = begin();
  for (const char* name : {"a", "b", "c"}) join(name, number, false);
  say_all();
  EXPECT_EQ(order("a", number).state, PartyState::kStopped);
  EXPECT_THAT(order("a", number).why, HasSubstr("fetches no share"));
}

// Contents of their own, as ranks of one expert-parallel instance have them.
class Lonely : public ThreeWorkers {
 protected:
  // a and c want the pieces 1 and 2, and each wants a third one. b wants one piece that nobody else
  // wants.
  static DescribedContents contents_of(char name) {
    const auto own = static_cast<std::uint64_t>(name);
    const Digest contents = test::numbered_digest(static_cast<std::uint8_t>(name));
    if (name == 'b') return {contents, {{own, kPayload}}};
    if (name == 'a') return {contents, {{1, 400}, {2, 400}, {own, 200}}};
    return {contents, {{own, 200}, {1, 400}, {2, 400}}};
  }
  void describe(const char* name) { reports.at(name).described = {contents_of(name[0])}; }
  RoundId join_lonely() {
    const RoundId number = begin();
    for (const char* name : {"a", "b", "c"}) {
      join(name, number);
      member(name).contents = contents_of(name[0]).contents;
    }
    return number;
  }
};

TEST_F(Lonely, MembersShareThePiecesThatAllOfThemWant) {
  const RoundId number = join_lonely();
  for (const char* name : {"a", "b", "c"}) describe(name);
  say_all();
  EXPECT_EQ(round(number).phase(), RoundPhase::kMeeting);
  ASSERT_EQ(round(number).parties().size(), 1u);
  EXPECT_EQ(round(number).parties()[0].bytes, 800u);
  EXPECT_EQ(order("a", number).ranks, 2u);
  EXPECT_THAT(order("a", number).members.at(0).pieces, ElementsAre(std::pair(0u, 2u)));
  EXPECT_THAT(order("c", number).members.at(0).pieces, ElementsAre(std::pair(1u, 3u)));
  EXPECT_EQ(order("b", number).state, PartyState::kStopped);
  EXPECT_THAT(order("b", number).why, HasSubstr("nobody else wants the same"));
}

// Its device would spread everything that it wants.
TEST_F(Lonely, AMemberOfAnOlderAgentHasNoPartyAlsoIfItsContentsAreKnown) {
  const RoundId number = join_lonely();
  for (const char* name : {"a", "b", "c"}) describe(name);
  member("a").takes_pieces = false;
  say_all();
  EXPECT_TRUE(round(number).parties().empty());
}

TEST_F(Lonely, MembersAreAskedForTheirPiecesAndAreAloneWithout) {
  const RoundId number = join_lonely();
  describe("a");
  say_all();
  EXPECT_TRUE(rounds.undescribed_of("a").empty());
  EXPECT_THAT(rounds.undescribed_of("c"), ElementsAre(contents_of('c').contents));
  EXPECT_TRUE(round(number).parties().empty());
  EXPECT_THAT(order("a", number).why, HasSubstr("nobody else wants the same"));
  describe("c");
  ASSERT_TRUE(say("c"));
  EXPECT_TRUE(rounds.undescribed_of("c").empty());
  EXPECT_TRUE(round(number).parties().empty()) << "the gathering is over";
}

TEST_F(Lonely, AMemberOnABusyDeviceHasNoPartyAndOthersHaveTheirPieces) {
  const RoundId number = join_lonely();
  add_worker("a", "ia2", 0, "double:0");
  for (const char* name : {"a", "b", "c"}) describe(name);
  join("a", number, true, 1);
  member("a", 1).contents = test::numbered_digest(77);
  reports.at("a").described.push_back({test::numbered_digest(77), {{1, 400}, {2, 400}}});
  say_all();
  ASSERT_EQ(round(number).parties().size(), 1u);
  EXPECT_EQ(round(number).parties()[0].ranks.size(), 2u) << "one of the two on the same device";
  EXPECT_EQ(round(number).parties()[0].bytes, 800u);
}

TEST_F(ThreeWorkers, TellTheirPhasesAlsoAfterTheEnd) {
  const RoundId number = spread();
  everybody(RoundMemberState::kFilled);
  for (const char* name : {"a", "b", "c"}) member(name).phases = {{"copy", 5}, {"apply", 7}};
  everybody(RoundMemberState::kReady);
  ASSERT_TRUE(round(number).over());
  EXPECT_EQ(place(number, "b").last->phases.size(), 2u);
  const std::uint64_t before = rounds.revision();
  member("b").phases.push_back({"resume", 9});
  // The agent has left the round by then.
  member("b").round = 0;
  set("b", RoundMemberState::kServing);
  ASSERT_TRUE(say("b"));
  EXPECT_GT(rounds.revision(), before) << "a caller that waits for them is woken";
  ASSERT_EQ(place(number, "b").last->phases.size(), 3u);
  EXPECT_EQ(place(number, "b").last->phases[2].name, "resume");
  EXPECT_EQ(place(number, "b").state_name(), "ready");
  const std::uint64_t after = rounds.revision();
  member("b").phases.clear();
  ASSERT_TRUE(say("b"));
  EXPECT_EQ(rounds.revision(), after) << "a later session of the rank says nothing on this round";
  EXPECT_EQ(place(number, "b").last->phases.size(), 3u);
}

TEST_F(ThreeWorkers, KeepTheirCommunicatorWhileTheSameDevicesMeet) {
  const RoundId first = spread();
  everybody(RoundMemberState::kFilled);
  everybody(RoundMemberState::kReady);
  const std::string name = round(first).parties()[0].communicator;
  for (const char* node : {"a", "b", "c"}) member(node).communicators = {"old", name};
  const RoundId second = begin_anew();
  EXPECT_GT(second, first);
  all_join(second);
  EXPECT_EQ(round(second).phase(), RoundPhase::kSpreading) << "nobody need meet";
  EXPECT_EQ(order("a", second).communicator, name);
  EXPECT_EQ(order("a", second).id, "");
  EXPECT_FALSE(order("a", second).make_id);
}

TEST_F(ThreeWorkers, MeetAnewWhenADeviceProcessIsAnotherOrOneLacksTheCommunicator) {
  const RoundId first = spread();
  everybody(RoundMemberState::kFilled);
  everybody(RoundMemberState::kReady);
  const std::string name = round(first).parties()[0].communicator;
  for (const char* node : {"a", "b", "c"}) member(node).communicators = {name};
  reports["c"].device_life = "another";
  RoundId next = begin_anew();
  all_join(next);
  EXPECT_EQ(order("a", next).communicator, "3-2");
  EXPECT_TRUE(order("a", next).make_id);
  make_id("a", next);
  everybody(RoundMemberState::kFilled);
  everybody(RoundMemberState::kReady);
  for (const char* node : {"a", "b"}) member(node).communicators = {"3-2"};
  next = begin_anew();
  all_join(next);
  EXPECT_EQ(order("a", next).communicator, "3-3") << "c does not keep it";
}

TEST_F(ThreeWorkers, AreOneRoundAtATime) {
  const RoundId number = begin();
  for (const char* group : {"g", ""}) {
    const auto again = rounds.begin(kRoundV1, kRoot, group, {}, 3, now);
    ASSERT_FALSE(again);
    EXPECT_EQ(again.error().code(), ErrorCode::kUnavailable);
    EXPECT_THAT(again.error().message(),
                AllOf(HasSubstr("m@2"), HasSubstr(std::to_string(number))));
  }
  EXPECT_EQ(rounds.begin(kRoundV2, kRoot, "other", {}, 3, now).error().code(),
            ErrorCode::kNotFound);
  EXPECT_EQ(rounds.begin({"n", 1}, kRoot, "", {}, 3, now).error().code(), ErrorCode::kNotFound);
}

TEST_F(ThreeWorkers, OfOtherGroupsAndModelsAreNotExpected) {
  add_worker("a", "x", 0, "double:1", "h");
  add_worker("a", "y", 0, "double:2").id = {"n", 1};
  add_worker("a", "z", 0, "double:3").worker_lost = true;
  say_all();
  EXPECT_EQ(round(begin()).places().size(), 3u);
  RoundsWorld other;
  other.add_node("a");
  other.add_worker("a", "x", 0, "double:0", "g");
  other.add_worker("a", "y", 0, "double:1", "h");
  other.say_all();
  EXPECT_EQ(other.round(other.begin("")).places().size(), 2u) << "every group";
}

TEST_F(ThreeWorkers, WhoIsLateIsLeftOut) {
  const RoundId number = begin();
  join("a", number);
  join("b", number);
  pass(4900ms);
  EXPECT_EQ(round(number).phase(), RoundPhase::kGathering);
  pass(200ms);
  EXPECT_EQ(round(number).phase(), RoundPhase::kMeeting);
  EXPECT_EQ(place(number, "c").state_name(), "left out");
  EXPECT_EQ(place(number, "c").why, "has not attached to m@2 in 5000 ms");
  EXPECT_EQ(order("a", number).ranks, 2u);
  join("c", number);
  ASSERT_TRUE(say("c"));
  EXPECT_EQ(order("c", number).state, PartyState::kStopped) << "it came too late, and is told so";
  EXPECT_EQ(order("c", number).members.at(0).session, member("c").session);
}

TEST_F(ThreeWorkers, AreWaitedForByTheirNumberAsWell) {
  const auto begun = rounds.begin(kRoundV2, kRoot, "g", {std::nullopt, 4}, 3, now);
  ASSERT_TRUE(begun);
  for (const char* node : {"a", "b", "c"}) join(node, *begun);
  say_all();
  EXPECT_EQ(round(*begun).phase(), RoundPhase::kGathering) << "the fourth is not known yet";
  add_node("d");
  add_worker("d", "i");
  join("d", *begun);
  ASSERT_TRUE(say("d"));
  EXPECT_EQ(round(*begun).phase(), RoundPhase::kMeeting);
  EXPECT_EQ(order("d", *begun).ranks, 4u);
}

TEST_F(ThreeWorkers, NeedNotBeThereYetIfTheirNumberIsKnown) {
  const auto begun = rounds.begin(kRoundV2, kRoot, "later", {2s, 1}, 3, now);
  ASSERT_TRUE(begun);
  pass(1900ms);
  EXPECT_EQ(round(*begun).phase(), RoundPhase::kGathering);
  pass(200ms);
  EXPECT_TRUE(round(*begun).over()) << "nobody came";
}

TEST_F(ThreeWorkers, WhoHasTheVersionStaysAsItIs) {
  member("c").id = kRoundV2;
  ASSERT_TRUE(say("c"));
  const RoundId number = begin();
  join("a", number);
  join("b", number);
  say_all();
  EXPECT_EQ(order("a", number).ranks, 2u);
  EXPECT_TRUE(place(number, "c").ready());
  make_id("a", number);
  for (const char* name : {"a", "b"}) set(name, RoundMemberState::kReady);
  say_all();
  EXPECT_TRUE(round(number).over());
}

TEST_F(ThreeWorkers, WhoHasOnlyBegunToAttachHasNotArrived) {  // it serves nothing yet
  const RoundId number = begin();
  join("a", number);
  join("b", number);
  member("c").session += 100;
  member("c").id.version = 0;
  say_all();
  EXPECT_EQ(round(number).phase(), RoundPhase::kGathering);
  join("c", number);
  ASSERT_TRUE(say("c"));
  EXPECT_EQ(order("a", number).ranks, 3u);
}

// It keeps one communicator, which two parties could each take for theirs.
TEST_F(ThreeWorkers, ADeviceIsInOnePartyAtATime) {
  for (const char* name : {"a", "b"}) add_worker(name, std::string("second on ") + name);
  say_all();
  const RoundId number = begin();
  all_join(number);
  for (const char* name : {"a", "b"}) {
    join(name, number, true, 1);
    member(name, 1).contents = {6, 6};
  }
  say_all();
  ASSERT_EQ(round(number).parties().size(), 1u);
  EXPECT_EQ(order("a", number).ranks, 3u);
  for (const char* name : {"a", "b"}) {
    EXPECT_EQ(place(number, name, 1).party, 0u);
    EXPECT_EQ(place(number, name, 1).aside, "its device is in another party");
  }
}

TEST_F(ThreeWorkers, ARankWhoseMateIsLostIsNotWaitedFor) {
  add_worker("a", "pair", 0);
  add_worker("b", "pair", 1);
  say_all();
  const RoundId number = begin();
  all_join(number);
  join("a", number, true, 1);
  member("a", 1).state = RoundMemberState::kAlone;  // it has no device
  join("b", number, true, 1);
  member("b", 1).state = RoundMemberState::kFailed;
  member("b", 1).why = "died";
  say_all();
  make_id("a", number);
  for (const char* name : {"a", "b", "c"}) set(name, RoundMemberState::kReady);
  say_all();
  EXPECT_TRUE(round(number).over());
  EXPECT_NE(place(number, "a", 1).why.find("its instance is not ready"), std::string::npos);
}

TEST_F(ThreeWorkers, ThatHaveItAllEndARoundAtOnce) {
  for (const char* name : {"a", "b", "c"}) member(name).id = kRoundV2;
  say_all();
  EXPECT_TRUE(round(begin()).over());
}

TEST_F(ThreeWorkers, WithAnotherRootAreNotBroughtThis) {
  const RoundId number = begin();
  for (const char* name : {"a", "b", "c"}) join(name, number);
  member("c").root = {9, 9};
  say_all();
  EXPECT_EQ(order("a", number).ranks, 2u);
  EXPECT_THAT(place(number, "c").why, HasSubstr("root"));
  EXPECT_EQ(order("c", number).state, PartyState::kStopped);
  EXPECT_THAT(order("c", number).why, HasSubstr("root"));
}

TEST_F(ThreeWorkers, WhoWantsSomethingElseNeedsNoBroadcast) {
  const RoundId number = begin();
  for (const char* name : {"a", "b", "c"}) join(name, number);
  member("c").contents = {6, 6};
  member("a").bucket_bytes = 32;
  say_all();
  EXPECT_EQ(order("b", number).bucket_bytes, 32u) << "the smallest";
  EXPECT_EQ(order("c", number).state, PartyState::kStopped);
  EXPECT_EQ(order("c", number).why, "needs no broadcast: nobody else wants the same");
  EXPECT_EQ(place(number, "c").why, "");
  set("c", RoundMemberState::kAlone);
  ASSERT_TRUE(say("c"));
  EXPECT_TRUE(rounds.orders_for("c").at(0).parties.empty());
  EXPECT_EQ(order("a", number).state, PartyState::kMeeting) << "that is nobody else's concern";
}

TEST_F(ThreeWorkers, WithoutAnOwnerGoOnAlone) {
  const RoundId number = begin();
  for (const char* name : {"a", "b", "c"}) join(name, number, false);
  say_all();
  EXPECT_EQ(round(number).phase(), RoundPhase::kLoading);
  EXPECT_EQ(order("a", number).state, PartyState::kStopped);
  EXPECT_THAT(order("a", number).why, HasSubstr("no host"));
}

TEST_F(ThreeWorkers, OnTheSameDeviceOneGoesOnAlone) {
  add_worker("a", "second");
  say_all();
  const RoundId number = begin();
  for (const char* name : {"a", "b", "c"}) join(name, number);
  join("a", number, true, 1);
  say_all();
  const auto orders = rounds.orders_for("a").at(0);
  ASSERT_EQ(orders.parties.size(), 2u);
  EXPECT_EQ(orders.parties[0].ranks, 3u);
  EXPECT_EQ(orders.parties[1].state, PartyState::kStopped);
  EXPECT_THAT(orders.parties[1].why, HasSubstr("same device"));
  EXPECT_NE(orders.parties[0].members.at(0).session, orders.parties[1].members.at(0).session);
}

TEST_F(ThreeWorkers, OfTwoAgentsThatShareAGpuOneGoesOnAlone) {
  for (const char* name : {"a", "b"}) member(name).device = "GPU-1";
  member("c").device = "GPU-2";
  say_all();
  const RoundId number = begin();
  for (const char* name : {"a", "b", "c"}) join(name, number);
  say_all();
  EXPECT_EQ(order("a", number).ranks, 2u);
  EXPECT_EQ(place(number, "b").party, 0u);
  EXPECT_THAT(place(number, "b").aside, AllOf(HasSubstr("on a"), HasSubstr("same device")));
  EXPECT_EQ(order("b", number).state, PartyState::kStopped);
  EXPECT_NE(place(number, "c").party, 0u);
}

TEST_F(ThreeWorkers, OfTwoAgentsThatShareAGpuAreInOnePartyAtATime) {
  for (const char* name : {"a", "b"}) member(name).device = "GPU-1";
  add_worker("c", "second on c", 0, "double:1");
  say_all();
  const RoundId number = begin();
  for (const char* name : {"a", "b", "c"}) join(name, number);
  join("c", number, true, 1);
  member("b").contents = member("c", 1).contents = {6, 6};
  say_all();
  ASSERT_EQ(round(number).parties().size(), 1u);
  EXPECT_EQ(place(number, "b").aside, "its device is in another party");
}

TEST_F(ThreeWorkers, MayComeAndGoWhileItGathers) {
  const RoundId number = begin();
  join("a", number);
  join("b", number);
  say_all();
  reports["b"].members.clear();
  ASSERT_TRUE(say("b"));
  join("c", number);
  ASSERT_TRUE(say("c"));
  EXPECT_EQ(round(number).phase(), RoundPhase::kGathering) << "b went";
  add_worker("b", "ib");
  join("b", number);
  ASSERT_TRUE(say("b"));
  EXPECT_EQ(order("a", number).ranks, 3u);
}

TEST_F(ThreeWorkers, ANewOneIsWelcomeWhileItGathers) {
  const RoundId number = begin();
  add_worker("a", "new", 0, "double:1");
  join("a", number, true, 1);
  ASSERT_TRUE(say("a"));
  EXPECT_EQ(round(number).places().size(), 4u);
  all_join(number);
  EXPECT_EQ(order("b", number).ranks, 4u);
}

TEST_F(ThreeWorkers, WithoutAnInstanceAreKnownByTheirDevice) {
  member("c").instance = "pid-3-GPU";
  say_all();
  const RoundId number = begin();
  reports["c"].members.clear();
  ASSERT_TRUE(say("c"));
  add_worker("c", "pid-9-GPU");
  all_join(number);
  EXPECT_EQ(round(number).places().size(), 3u);
  EXPECT_EQ(order("a", number).ranks, 3u) << "all that were expected are there";
}

TEST_F(ThreeWorkers, AnAgentThatWasAwaySeesItsOrdersAllTheSame) {
  const RoundId number = begin();
  const std::uint64_t before = rounds.revision();
  all_join(number);
  make_id("a", number);
  EXPECT_GT(rounds.revision(), before);
  EXPECT_EQ(order("c", number).id, "id-of-a");
  EXPECT_EQ(order("c", number).id, "id-of-a") << "and again";
}

TEST_F(ThreeWorkers, LeaveARoundToRememberForTenMinutes) {
  const RoundId number = begin();
  pass(6s);
  ASSERT_TRUE(round(number).over());
  pass(598s);
  EXPECT_NE(rounds.find(number), nullptr);
  pass(3s);
  EXPECT_EQ(rounds.find(number), nullptr);
}

TEST_F(ThreeWorkers, OfManyRoundsTheLastAreRemembered) {
  for (const char* name : {"a", "b", "c"}) member(name).id = kRoundV2;
  say_all();
  RoundId last = 0;
  for (int i = 0; i < 100; ++i) last = begin();
  pass(100ms);
  EXPECT_EQ(rounds.all().size(), 64u);
  EXPECT_NE(rounds.find(last), nullptr);
}

TEST(TensorParallel, TwoInstancesMeetRankByRank) {
  RoundsWorld world;
  for (const std::string name : {"a", "b"}) {
    world.add_node(name);
    world.add_worker(name, "i" + name, 0, "double:0");
    world.add_worker(name, "i" + name, 1, "double:1");
  }
  world.say_all();
  const RoundId number = world.begin();
  for (const std::string name : {"a", "b"}) {
    for (const std::size_t rank : {0u, 1u}) {
      world.join(name, number, true, rank);
      world.member(name, rank).contents = test::numbered_digest(rank + 1, 1);
    }
  }
  world.say_all();
  ASSERT_EQ(world.round(number).parties().size(), 2u);
  const auto orders = world.rounds.orders_for("b");
  ASSERT_EQ(orders.at(0).parties.size(), 2u);
  for (const PartyOrder& party : orders[0].parties) {
    EXPECT_EQ(party.ranks, 2u);
    EXPECT_THAT(party.owners, ElementsAre(0u, 1u));
    EXPECT_EQ(party.members.at(0).rank, 1u) << "a comes before b";
  }
  // One party's end is not the other's.
  world.make_id("a", number, 1);
  world.set("b", RoundMemberState::kFailed, 1);
  ASSERT_TRUE(world.say("b"));
  EXPECT_EQ(world.round(number).parties()[0].state, PartyState::kSpreading);
  EXPECT_EQ(world.round(number).parties()[1].state, PartyState::kStopped);
}

}  // namespace
}  // namespace rekindle::coordinator
