#include "recovery/joint/joint_lead.h"

#include <algorithm>
#include <chrono>

#include <gtest/gtest.h>

#include "tests/joint/joint_sample.h"
#include "tests/support/numbered_digest.h"

namespace rekindle::joint {
namespace {

using namespace std::chrono_literals;
using rekindle::test::numbered_digest;
using test::code_of;
using test::kId;
using test::plan_of;
using test::rows;
using Runs = std::vector<std::pair<TileIndex, TileIndex>>;

const TimePoint kStart{1h};

// a has ranks 0 and 1, b has rank 2, c has ranks 3 and 4.
std::vector<JointLead::Host> three_hosts() { return {{"a", {0, 1}}, {"b", {2}}, {"c", {3, 4}}}; }

// Four tensors of one tile each: w0 to w3.
std::shared_ptr<const JointPlan> four_tiles() {
  JointHost host{"a", {{0, {}}}};
  const Shape shape{4, 4};
  for (int i = 0; i < 4; ++i) {
    host.ranks[0].tensors.push_back(
        {{"w" + std::to_string(i), DType::kU8, shape}, {Box::whole(shape)}});
  }
  return std::make_shared<const JointPlan>(must(JointPlan::create({host})));
}

std::vector<Digest> digests(std::initializer_list<int> numbers) {
  std::vector<Digest> list;
  for (const int number : numbers)
    list.push_back(numbered_digest(static_cast<std::uint64_t>(number)));
  return list;
}

bool says(const JointLead& lead, std::string_view words) {
  return lead.why() && lead.why()->message().find(words) != std::string::npos;
}

class JointLeadTest : public ::testing::Test {
 protected:
  void declare(std::uint32_t host) { ASSERT_TRUE(lead_.put_declarations(host, 0, 3, "abc")); }
  void reach_writing() {
    for (std::uint32_t host = 0; host < 3; ++host) declare(host);
    ASSERT_EQ(lead_.phase(), Phase::kWriting);
    lead_.set_plan(four_tiles(), layouts_);
  }
  void reach_claiming() {
    reach_writing();
    ASSERT_TRUE(lead_.put_leaves(0, Runs{{0, 4}}, digests({10, 11, 12, 13})));
    for (std::uint32_t host = 0; host < 3; ++host) {
      ASSERT_TRUE(lead_.put_layout(host, layouts_[host]));
    }
    ASSERT_EQ(lead_.phase(), Phase::kClaiming);
  }
  void reach_committing() {
    reach_claiming();
    lead_.claimed(root_);
    ASSERT_EQ(lead_.phase(), Phase::kCommitting);
  }
  void reach_complete() {
    reach_committing();
    for (std::uint32_t host = 0; host < 3; ++host) ASSERT_TRUE(lead_.confirm(host));
    ASSERT_EQ(lead_.phase(), Phase::kComplete);
  }
  // b is silent for `silence`, and the others are not.
  void only_b_is_silent(Duration silence) {
    lead_.heard(0, kStart + silence);
    lead_.heard(2, kStart + silence);
    lead_.advance(kStart + silence);
  }
  void expect_that_silence_of_b_ends_it() {
    const Phase before = lead_.phase();
    only_b_is_silent(10s);
    EXPECT_EQ(lead_.phase(), before) << "10 s are not too long";
    only_b_is_silent(10s + 1ms);
    EXPECT_EQ(lead_.phase(), Phase::kEnded);
    ASSERT_TRUE(lead_.why());
    EXPECT_EQ(lead_.why()->code(), ErrorCode::kPeerLost);
    EXPECT_EQ(lead_.why()->message(), "m@7: no word for 10 s from b (rank 2); publish it again");
  }

  const Digest root_ = numbered_digest(99);
  // b has no copy.
  const std::vector<std::optional<Digest>> layouts_{numbered_digest(50), std::nullopt,
                                                    numbered_digest(40)};
  JointLead lead_{kId, three_hosts(), kStart};
};

TEST_F(JointLeadTest, PhasesComeInOrder) {
  EXPECT_EQ(lead_.host_count(), 3u);
  EXPECT_EQ(lead_.phase(), Phase::kDeclaring);
  declare(2);
  declare(0);
  EXPECT_EQ(lead_.phase(), Phase::kDeclaring);
  declare(1);
  EXPECT_EQ(lead_.phase(), Phase::kWriting);
  lead_.set_plan(four_tiles(), layouts_);
  ASSERT_TRUE(lead_.put_leaves(1, Runs{{1, 2}, {3, 4}}, digests({11, 13})));
  ASSERT_TRUE(lead_.put_leaves(2, Runs{{0, 1}}, digests({10})));
  ASSERT_TRUE(lead_.put_leaves(0, Runs{{2, 3}}, digests({12})));
  for (std::uint32_t host = 0; host < 3; ++host) {
    EXPECT_EQ(lead_.phase(), Phase::kWriting);
    ASSERT_TRUE(lead_.put_layout(host, layouts_[host]));
  }
  EXPECT_EQ(lead_.phase(), Phase::kClaiming);
  EXPECT_TRUE(std::ranges::equal(lead_.leaves(), digests({10, 11, 12, 13})));
  lead_.claimed(root_);
  EXPECT_EQ(lead_.phase(), Phase::kCommitting);
  EXPECT_EQ(lead_.root(), root_);
  for (const std::uint32_t host : {1u, 0u, 2u}) {
    EXPECT_EQ(lead_.phase(), Phase::kCommitting);
    ASSERT_TRUE(lead_.confirm(host));
  }
  EXPECT_EQ(lead_.phase(), Phase::kComplete);
  EXPECT_FALSE(lead_.why());
}

TEST_F(JointLeadTest, DeclarationsComeInPages) {
  ASSERT_TRUE(lead_.put_declarations(0, 0, 10, "0123"));
  ASSERT_TRUE(lead_.put_declarations(1, 0, 2, "xy"));
  ASSERT_TRUE(lead_.put_declarations(0, 4, 10, "4567"));
  ASSERT_TRUE(lead_.put_declarations(0, 8, 10, "89"));
  EXPECT_EQ(lead_.declarations(0), "0123456789");
  EXPECT_EQ(lead_.declarations(1), "xy");
  EXPECT_EQ(lead_.phase(), Phase::kDeclaring) << "c has not declared";
}

TEST_F(JointLeadTest, PagesThatDoNotFitTogetherAreRefused) {
  EXPECT_EQ(code_of(lead_.put_declarations(0, 4, 10, "4567")), ErrorCode::kInvalid) << "no first";
  ASSERT_TRUE(lead_.put_declarations(0, 0, 10, "0123"));
  EXPECT_EQ(code_of(lead_.put_declarations(0, 8, 10, "89")), ErrorCode::kInvalid) << "a gap";
  EXPECT_EQ(code_of(lead_.put_declarations(0, 3, 10, "345")), ErrorCode::kInvalid) << "an overlap";
  EXPECT_EQ(code_of(lead_.put_declarations(0, 4, 11, "4567")), ErrorCode::kInvalid)
      << "another total";
  EXPECT_EQ(code_of(lead_.put_declarations(0, 4, 10, "456789+")), ErrorCode::kInvalid) << "long";
  EXPECT_EQ(code_of(lead_.put_declarations(0, ~0ull, 10, "4")), ErrorCode::kInvalid);
  const auto refused = lead_.put_declarations(0, 9, 10, "9");
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().message().find(" a "), std::string::npos)
      << "it names the host: " << refused.error().message();
  ASSERT_TRUE(lead_.put_declarations(0, 4, 10, "456789"));
  EXPECT_EQ(lead_.declarations(0), "0123456789") << "refused pages change nothing";
}

TEST_F(JointLeadTest, DeclarationsThatAreTooLongAreRefused) {
  EXPECT_EQ(code_of(lead_.put_declarations(0, 0, std::uint64_t{1} << 40, "0123")),
            ErrorCode::kExhausted);
  EXPECT_EQ(code_of(lead_.put_declarations(0, 0, 3, "0123")), ErrorCode::kInvalid);
  declare(0);
  EXPECT_EQ(lead_.declarations(0), "abc");
}

TEST_F(JointLeadTest, TheDeclarationsOfAllHostsTogetherAreBounded) {
  constexpr std::uint64_t kHalf = kMaxJointDeclarationBytes / 2;
  ASSERT_TRUE(lead_.put_declarations(0, 0, kHalf, "a"));
  ASSERT_TRUE(lead_.put_declarations(1, 0, kHalf - 3, "b"));
  const auto refused = lead_.put_declarations(2, 0, 4, "c");
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), ErrorCode::kExhausted);
  EXPECT_NE(refused.error().message().find("m@7: the declarations of c have 4 B"),
            std::string::npos)
      << refused.error().message();
  ASSERT_TRUE(lead_.put_declarations(2, 0, 3, "c"));
  ASSERT_TRUE(lead_.put_declarations(0, 0, 3, "abc")) << "a host that begins again counts once";
  ASSERT_TRUE(lead_.put_declarations(2, 0, kHalf, "c"));
}

// A caller whose connection breaks before the answer makes the same call again.
TEST_F(JointLeadTest, EveryPageMayComeTwice) {
  for (const std::uint64_t offset : {0u, 3u, 6u, 9u}) {
    const std::string page = std::string("0123456789").substr(offset, 3);
    for (int i = 0; i < 2; ++i) {
      const auto put = lead_.put_declarations(0, offset, 10, page);
      ASSERT_TRUE(put) << offset << ": " << put.error().message();
    }
  }
  EXPECT_EQ(lead_.declarations(0), "0123456789");
  declare(1);
  declare(2);
  EXPECT_EQ(lead_.phase(), Phase::kWriting);
}

TEST_F(JointLeadTest, ALatePageOfTheSameBytesIsHarmless) {
  ASSERT_TRUE(lead_.put_declarations(0, 0, 9, "012"));
  ASSERT_TRUE(lead_.put_declarations(0, 3, 9, "345"));
  ASSERT_TRUE(lead_.put_declarations(0, 0, 9, "012"));
  EXPECT_EQ(code_of(lead_.put_declarations(0, 3, 9, "3x5")), ErrorCode::kInvalid) << "other bytes";
  ASSERT_TRUE(lead_.put_declarations(0, 6, 9, "678"));
  EXPECT_EQ(lead_.declarations(0), "012345678");
}

TEST_F(JointLeadTest, SilenceEndsItWhileItDeclares) {
  declare(1);
  expect_that_silence_of_b_ends_it();
}

TEST_F(JointLeadTest, SilenceEndsItWhileItWrites) {
  reach_writing();
  expect_that_silence_of_b_ends_it();
}

TEST_F(JointLeadTest, SilenceEndsItWhileItClaims) {
  reach_claiming();
  expect_that_silence_of_b_ends_it();
  lead_.claimed(root_);
  EXPECT_EQ(lead_.phase(), Phase::kEnded) << "the claim comes too late";
}

TEST_F(JointLeadTest, SilenceEndsItWhileItCommits) {
  reach_committing();
  ASSERT_TRUE(lead_.confirm(0));
  expect_that_silence_of_b_ends_it();
  EXPECT_FALSE(lead_.confirm(1));
  EXPECT_EQ(lead_.phase(), Phase::kEnded);
}

TEST_F(JointLeadTest, AHostThatHasConfirmedMayBeSilent) {
  reach_committing();
  ASSERT_TRUE(lead_.confirm(1));
  only_b_is_silent(1h);
  EXPECT_EQ(lead_.phase(), Phase::kCommitting);
  lead_.advance(kStart + 2h);
  EXPECT_EQ(lead_.phase(), Phase::kEnded);
  EXPECT_TRUE(says(lead_, "a (ranks 0 and 1), c (ranks 3 and 4)")) << lead_.why()->message();
  EXPECT_FALSE(says(lead_, "b (")) << lead_.why()->message();
}

TEST_F(JointLeadTest, SilenceDoesNotEndACompletePublication) {
  reach_complete();
  lead_.advance(kStart + 24h);
  EXPECT_EQ(lead_.phase(), Phase::kComplete);
  EXPECT_FALSE(lead_.why());
}

TEST_F(JointLeadTest, TheTimeThatTheLeadSleptIsForgiven) {
  reach_writing();
  lead_.forgive(1h);
  lead_.advance(kStart + 1h + 9s);
  EXPECT_EQ(lead_.phase(), Phase::kWriting);
  lead_.heard(0, kStart + 1h + 9s);
  lead_.heard(2, kStart + 1h + 9s);
  lead_.advance(kStart + 1h + 11s);
  EXPECT_EQ(lead_.phase(), Phase::kEnded);
  EXPECT_TRUE(says(lead_, "from b (rank 2);")) << lead_.why()->message();
}

TEST_F(JointLeadTest, LeavesBeforeThePlanAreRefused) {
  EXPECT_EQ(code_of(lead_.put_leaves(0, Runs{{0, 1}}, digests({1}))), ErrorCode::kUnavailable);
  EXPECT_EQ(code_of(lead_.put_layout(0, std::nullopt)), ErrorCode::kUnavailable);
}

TEST_F(JointLeadTest, LeavesOfUnknownTilesAndWrongCountsAreRefused) {
  reach_writing();
  const std::pair<Runs, std::vector<Digest>> wrong[] = {
      {{{4, 5}}, digests({1})},
      {{{3, 5}}, digests({1, 2})},
      {{{2, 2}}, {}},
      {{{2, 1}}, digests({1})},
      {{{0, 2}}, digests({1})},
      {{{0, 2}}, digests({1, 2, 3})},
      {{}, digests({1})},
      {{{0, 1}, {3, 9}}, digests({1, 2, 3, 4, 5, 6, 7})},
      {{{0, ~TileIndex{0}}}, digests({1})}};
  for (const auto& [tiles, leaves] : wrong) {
    EXPECT_EQ(code_of(lead_.put_leaves(1, tiles, leaves)), ErrorCode::kInvalid);
  }
  EXPECT_EQ(lead_.phase(), Phase::kWriting);
  ASSERT_TRUE(lead_.put_leaves(0, Runs{{0, 4}}, digests({10, 11, 12, 13})));
  EXPECT_EQ(lead_.phase(), Phase::kWriting) << "refused leaves leave nothing behind";
  EXPECT_TRUE(std::ranges::equal(lead_.leaves(), digests({10, 11, 12, 13})));
}

TEST_F(JointLeadTest, EqualLeavesOfSeveralHostsAreHarmless) {
  reach_writing();
  for (const std::uint32_t host : {0u, 1u, 1u, 2u, 0u}) {
    ASSERT_TRUE(lead_.put_leaves(host, Runs{{0, 2}}, digests({10, 11})));
  }
  EXPECT_EQ(lead_.phase(), Phase::kWriting);
}

TEST_F(JointLeadTest, DifferentLeavesOfATileNameTensorHostsAndRanks) {
  reach_writing();
  ASSERT_TRUE(lead_.put_leaves(2, Runs{{1, 4}}, digests({11, 12, 13})));
  (void)lead_.put_leaves(0, Runs{{0, 4}}, digests({10, 11, 77, 13}));
  EXPECT_EQ(lead_.phase(), Phase::kEnded);
  ASSERT_TRUE(lead_.why());
  EXPECT_EQ(lead_.why()->code(), ErrorCode::kInvalid);
  EXPECT_TRUE(says(lead_, "'w2' [0:4, 0:4]")) << lead_.why()->message();
  EXPECT_TRUE(says(lead_, "c (ranks 3 and 4), a (ranks 0 and 1)")) << lead_.why()->message();
  for (std::uint32_t host = 0; host < 3; ++host) (void)lead_.put_layout(host, std::nullopt);
  EXPECT_EQ(lead_.phase(), Phase::kEnded);
}

TEST_F(JointLeadTest, ItClaimsOnlyWithAllLeavesAndAllLayouts) {
  reach_writing();
  for (std::uint32_t host = 0; host < 3; ++host) {
    ASSERT_TRUE(lead_.put_layout(host, layouts_[host]));
  }
  ASSERT_TRUE(lead_.put_leaves(0, Runs{{0, 3}}, digests({10, 11, 12})));
  EXPECT_EQ(lead_.phase(), Phase::kWriting) << "a leaf is missing";
  lead_.claimed(root_);
  EXPECT_EQ(lead_.phase(), Phase::kWriting) << "nothing is being claimed";
  ASSERT_TRUE(lead_.put_leaves(2, Runs{{3, 4}}, digests({13})));
  EXPECT_EQ(lead_.phase(), Phase::kClaiming);
}

TEST_F(JointLeadTest, ARepeatedLayoutDoesNotStandForAnotherHost) {
  reach_writing();
  ASSERT_TRUE(lead_.put_leaves(0, Runs{{0, 4}}, digests({10, 11, 12, 13})));
  for (const std::uint32_t host : {0u, 0u, 0u, 2u, 2u}) {
    ASSERT_TRUE(lead_.put_layout(host, layouts_[host]));
    EXPECT_EQ(lead_.phase(), Phase::kWriting) << "b has not sent everything";
  }
  ASSERT_TRUE(lead_.put_layout(1, std::nullopt));
  EXPECT_EQ(lead_.phase(), Phase::kClaiming);
  EXPECT_EQ(lead_.layouts(), digests({40, 50})) << "b has no copy";
}

TEST_F(JointLeadTest, LayoutsAreSortedAndNotRepeated) {
  for (std::uint32_t host = 0; host < 3; ++host) declare(host);
  lead_.set_plan(four_tiles(), {numbered_digest(9), numbered_digest(4), numbered_digest(9)});
  EXPECT_EQ(lead_.layouts(), digests({4, 9}));
}

// Its copy would not be the part that the others rely on.
TEST_F(JointLeadTest, ALayoutThatDoesNotFollowFromTheTableNamesItsHost) {
  const std::optional<Digest> wrong[] = {numbered_digest(51), layouts_[2], std::nullopt};
  for (const std::optional<Digest>& layout : wrong) {
    JointLead lead(kId, three_hosts(), kStart);
    for (std::uint32_t host = 0; host < 3; ++host) {
      ASSERT_TRUE(lead.put_declarations(host, 0, 3, "abc"));
    }
    lead.set_plan(four_tiles(), layouts_);
    (void)lead.put_layout(0, layout);
    EXPECT_EQ(lead.phase(), Phase::kEnded);
    ASSERT_TRUE(lead.why());
    EXPECT_EQ(lead.why()->code(), ErrorCode::kInvalid);
    EXPECT_TRUE(says(
        lead, "m@7: a (ranks 0 and 1) has a copy of layout " + (layout ? layout->hex() : "none")))
        << lead.why()->message();
    EXPECT_TRUE(says(lead, layouts_[0]->hex())) << lead.why()->message();
  }
}

TEST_F(JointLeadTest, APlanWithoutTilesNeedsLayoutsOnly) {
  for (std::uint32_t host = 0; host < 3; ++host) declare(host);
  const TensorInfo empty{"e", DType::kF32, {0, 4}};
  lead_.set_plan(plan_of(empty, {{Box::whole({0, 4})}}),
                 {std::nullopt, std::nullopt, std::nullopt});
  for (std::uint32_t host = 0; host < 3; ++host) {
    EXPECT_EQ(lead_.phase(), Phase::kWriting);
    ASSERT_TRUE(lead_.put_layout(host, std::nullopt));
  }
  EXPECT_EQ(lead_.phase(), Phase::kClaiming);
  EXPECT_TRUE(lead_.leaves().empty());
  EXPECT_TRUE(lead_.layouts().empty());
}

TEST_F(JointLeadTest, AConfirmBeforeTheRootIsRefused) {
  EXPECT_EQ(code_of(lead_.confirm(0)), ErrorCode::kInvalid);
  reach_claiming();
  for (std::uint32_t host = 0; host < 3; ++host) {
    EXPECT_EQ(code_of(lead_.confirm(host)), ErrorCode::kInvalid);
  }
  lead_.claimed(root_);
  EXPECT_EQ(lead_.phase(), Phase::kCommitting) << "refused confirms do not count";
}

TEST_F(JointLeadTest, AConfirmMayComeTwice) {
  reach_committing();
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(lead_.confirm(1));
  EXPECT_EQ(lead_.phase(), Phase::kCommitting);
  ASSERT_TRUE(lead_.confirm(0));
  ASSERT_TRUE(lead_.confirm(2));
  EXPECT_EQ(lead_.phase(), Phase::kComplete);
  EXPECT_TRUE(lead_.confirm(2)) << "its answer may have been lost";
}

TEST_F(JointLeadTest, AnEndAfterCompletionChangesNothing) {
  reach_complete();
  lead_.end({ErrorCode::kPeerLost, "too late"});
  EXPECT_EQ(lead_.phase(), Phase::kComplete);
  EXPECT_FALSE(lead_.why());
  EXPECT_EQ(lead_.root(), root_);
}

TEST_F(JointLeadTest, TheFirstReasonStays) {
  lead_.end({ErrorCode::kDenied, "first"});
  lead_.end({ErrorCode::kTimeout, "second"});
  lead_.advance(kStart + 1h);
  ASSERT_TRUE(lead_.why());
  EXPECT_EQ(lead_.why()->message(), "first");
  for (std::uint32_t host = 0; host < 3; ++host) (void)lead_.put_declarations(host, 0, 3, "abc");
  EXPECT_EQ(lead_.phase(), Phase::kEnded);
}

TEST_F(JointLeadTest, HostsAreNamedWithTheirRanks) {
  EXPECT_EQ(lead_.name_hosts({1}), "b (rank 2)");
  EXPECT_EQ(lead_.name_hosts({0, 1}), "a (ranks 0 and 1), b (rank 2)");
}

}  // namespace
}  // namespace rekindle::joint
