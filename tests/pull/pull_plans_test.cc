// Tables that the pulls of a host share: what they share, and what they must not. The failpoint
// "plan.compute" holds computations, or fails the second one.
#include "recovery/pull/pull_plans.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <utility>

#include <boost/asio/bind_cancellation_slot.hpp>
#include <boost/asio/cancellation_signal.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/post.hpp>
#include <gtest/gtest.h>

#include "src/base/failpoint.h"
#include "tests/recovery/rpc_fixture.h"
#include "tests/store/store_fixture.h"

namespace rekindle::pull {
namespace {

constexpr std::uint64_t kHeight = 64;
constexpr std::uint64_t kWidth = 32;

std::shared_ptr<const Checkpoint> checkpoint_of(const ModelVersion& id,
                                                std::vector<TensorInfo> infos) {
  auto tensors = *TensorSet::create(std::move(infos));
  const auto tiles = *TileMap::create(tensors);
  std::vector<Digest> leaves(tiles.tile_count());
  const Digest root = checkpoint_root(id, tensors, tiles, leaves);
  return *Checkpoint::create(id, std::move(tensors), std::move(leaves), root);
}

std::string split_by(int dimension) {
  return fmt::format(R"({{"name":"t","rules":[{{"match":["w"],"kind":"split","dim":{}}},)"
                     R"({{"match":["layers.*.n"],"kind":"replicate"}}]}})",
                     dimension);
}
std::string config_of(int layers) { return fmt::format(R"({{"num_hidden_layers":{}}})", layers); }

Box rows(std::uint64_t begin, std::uint64_t end) { return {{begin, 0}, {end - begin, kWidth}}; }
Box columns(std::uint64_t begin, std::uint64_t end) { return {{0, begin}, {kHeight, end - begin}}; }

class PullPlansTest : public store::StoreTest {
 protected:
  void SetUp() override {
    StoreTest::SetUp();
    open({2, 64 << 20, 64});
  }
  void TearDown() override {
    EXPECT_TRUE(arm_failpoints(""));
    plans_.reset();
    StoreTest::TearDown();
  }
  void open(PullPlans::Options options) {
    plans_ = std::make_unique<PullPlans>(loop_.executor(), options);
  }

  PullPlans::WantedRef wanted(std::shared_ptr<const Checkpoint> checkpoint, WantedSpec spec,
                              std::string config = "{}") {
    auto table =
        loop_.run(plans_->wanted(std::move(checkpoint), std::move(spec), std::move(config)));
    EXPECT_TRUE(table) << table.error().message();
    return table ? *table : nullptr;
  }
  static std::vector<TensorBox> boxes(const PullPlans::WantedRef& wanted) {
    return wanted == nullptr ? std::vector<TensorBox>() : wanted->layout.boxes();
  }

  PlanSource source(const std::vector<TensorBox>& held, bool growing = false) const {
    return {layout_of(held), growing};
  }
  std::shared_ptr<const Layout> layout_of(const std::vector<TensorBox>& held) const {
    return std::make_shared<const Layout>(store::pack(*checkpoint(), held).layout);
  }
  std::vector<TensorBox> all() const { return store::all_boxes(*checkpoint()); }
  std::vector<TensorBox> shard() const { return store::shard_boxes(*checkpoint()); }
  PlanInputs inputs(std::vector<PlanSource> sources, bool trades = false) const {
    return {.checkpoint = checkpoint(),
            .destination = layout_of(all()),
            .sources = std::move(sources),
            .verified = std::nullopt,
            .trades = trades};
  }
  PullPlans::PlanRef plan(PlanInputs inputs) {
    auto made = loop_.run(plans_->plan(std::move(inputs)));
    EXPECT_TRUE(made) << made.error().message();
    return made ? *made : nullptr;
  }
  // Whether the tile lies in one of the boxes.
  bool holds(const std::vector<TensorBox>& held, TileIndex tile) const {
    const Box box = checkpoint()->tiles.tile_box(tile);
    const TensorIndex tensor = checkpoint()->tiles.tensor_of(tile);
    return std::ranges::any_of(held, [&](const TensorBox& part) {
      return part.tensor == tensor && contains(part.box, box);
    });
  }

  rpc::testing::Loop loop_;
  std::unique_ptr<PullPlans> plans_;
};

TEST_F(PullPlansTest, SpecsPlacesWorldsConfigsAndTensorSetsDoNotShare) {
  const std::vector<TensorInfo> infos{{"layers.0.n", DType::kU8, {4}},
                                      {"layers.1.n", DType::kU8, {4}},
                                      {"w", DType::kU8, {kHeight, kWidth}}};
  const auto one = checkpoint_of({"m", 1}, infos);
  auto wider = infos;
  wider[2].shape = {2 * kHeight, kWidth};
  const auto other = checkpoint_of({"m", 1}, wider);
  const TensorBox first{0, Box::whole({4})};
  const TensorBox second{1, Box::whole({4})};
  struct Case {
    std::shared_ptr<const Checkpoint> checkpoint;
    WantedSpec spec;
    std::string config;
    std::vector<TensorBox> boxes;
  };
  const std::vector<Case> cases{
      {one, {"tp=0/2", split_by(0), ""}, "{}", {first, second, {2, rows(0, 32)}}},
      {one, {"tp=1/2", split_by(0), ""}, "{}", {first, second, {2, rows(32, 64)}}},
      {one, {"tp=1/4", split_by(0), ""}, "{}", {first, second, {2, rows(16, 32)}}},
      {one, {"tp=1/4", split_by(1), ""}, "{}", {first, second, {2, columns(8, 16)}}},
      {other, {"tp=1/4", split_by(0), ""}, "{}", {first, second, {2, rows(32, 64)}}},
      {one, {"", "", "^w$"}, "{}", {{2, rows(0, 64)}}},
      {one, {"", "", "n$"}, "{}", {first, second}},
      {one, {"", "", "", {{"w", {8, 0}, {8, kWidth}}}}, "{}", {{2, rows(8, 16)}}},
      {one, {"", "", "", {{"w", {8, 0}, {9, kWidth}}}}, "{}", {{2, rows(8, 17)}}},
      {one, {"", "", ""}, "{}", {first, second, {2, rows(0, 64)}}},
  };
  std::vector<PullPlans::WantedRef> tables;
  for (const Case& item : cases) {
    tables.push_back(wanted(item.checkpoint, item.spec, item.config));
    EXPECT_EQ(boxes(tables.back()), item.boxes) << item.spec.to_string();
  }
  for (std::size_t i = cases.size(); i-- > 0;) {
    const auto again = wanted(cases[i].checkpoint, cases[i].spec, cases[i].config);
    EXPECT_EQ(again, tables[i]) << "the table of " << cases[i].spec.to_string() << " is kept";
  }
}

TEST_F(PullPlansTest, TheContentOfConfigJsonCounts) {
  std::vector<TensorInfo> infos;
  for (int layer = 0; layer < 4; ++layer) {
    infos.push_back({fmt::format("layers.{}.n", layer), DType::kU8, {4}});
  }
  const auto model = checkpoint_of({"m", 1}, infos);
  const WantedSpec first_stage{
      "tp=0/1,pp=0/2",
      R"({"name":"t","rules":[{"match":["layers.{layer}.n"],"kind":"replicate"}]})", ""};
  const auto of_four = wanted(model, first_stage, config_of(4));
  const auto of_eight = wanted(model, first_stage, config_of(8));
  EXPECT_EQ(boxes(of_four).size(), 2u);
  EXPECT_EQ(boxes(of_eight).size(), 4u);
}

TEST_F(PullPlansTest, TheNextVersionWithTheSameTensorsFindsTheTables) {
  const std::vector<TensorInfo> infos{{"w", DType::kU8, {kHeight, kWidth}}};
  const auto before = wanted(checkpoint_of({"m", 1}, infos), {"", "", ""});
  EXPECT_EQ(wanted(checkpoint_of({"m", 2}, infos), {"", "", ""}), before);
}

TEST_F(PullPlansTest, TheControlThreadServesOthersWhileEightPullsWaitForTheirPlan) {
  ASSERT_TRUE(arm_failpoints("plan.compute=hold"));
  std::vector<Result<PullPlans::PlanRef>> plans;
  for (int i = 0; i < 8; ++i) {
    boost::asio::co_spawn(loop_.executor(), plans_->plan(inputs({source(all())})),
                          [&](const std::exception_ptr&, Result<PullPlans::PlanRef> made) {
                            plans.push_back(std::move(made));
                          });
  }
  bool served = false;
  boost::asio::post(loop_.executor(), [&] { served = true; });
  loop_.run_until([&] { return served; });
  EXPECT_TRUE(plans.empty());
  ASSERT_TRUE(arm_failpoints(""));
  loop_.run_until([&] { return plans.size() == 8; });
  for (const auto& made : plans) {
    ASSERT_TRUE(made) << made.error().message();
    EXPECT_TRUE((*made)->missing().empty());
  }
}

TEST_F(PullPlansTest, EightPlansAtOnceCostOneComputation) {
  ASSERT_TRUE(arm_failpoints("plan.compute=error:EIO@2"));
  int good = 0;
  int ended = 0;
  for (int i = 0; i < 8; ++i) {
    boost::asio::co_spawn(loop_.executor(), plans_->plan(inputs({source(all())})),
                          [&](const std::exception_ptr&, Result<PullPlans::PlanRef> made) {
                            good += made.has_value();
                            ++ended;
                          });
  }
  loop_.run_until([&] { return ended == 8; });
  EXPECT_EQ(good, 8);
  EXPECT_FALSE(loop_.run(plans_->plan(inputs({source(shard())})))) << "the second computation";
}

TEST_F(PullPlansTest, APullThatIsCancelledWhileItsPlanIsComputedEndsAtOnce) {
  ASSERT_TRUE(arm_failpoints("plan.compute=hold"));
  boost::asio::cancellation_signal cancel;
  std::optional<ErrorCode> code;
  bool other_ended = false;
  const auto begin = [this](auto on_end) {
    auto task = [](PullPlans* plans, PlanInputs what) -> async::Task<Result<PullPlans::PlanRef>> {
      co_await boost::asio::this_coro::throw_if_cancelled(false);
      co_return co_await plans->plan(std::move(what));
    };
    boost::asio::co_spawn(loop_.executor(), task(plans_.get(), inputs({source(all())})), on_end);
  };
  begin(boost::asio::bind_cancellation_slot(
      cancel.slot(), [&](const std::exception_ptr&, Result<PullPlans::PlanRef> made) {
        code = made ? ErrorCode::kInternal : made.error().code();
      }));
  begin([&](const std::exception_ptr&, Result<PullPlans::PlanRef> made) {
    other_ended = true;
    EXPECT_TRUE(made);
  });
  bool served = false;
  boost::asio::post(loop_.executor(), [&] { served = true; });
  loop_.run_until([&] { return served; });
  cancel.emit(boost::asio::cancellation_type::terminal);
  loop_.run_until([&] { return code.has_value(); });
  EXPECT_EQ(code, ErrorCode::kUnavailable);
  EXPECT_FALSE(other_ended);
  ASSERT_TRUE(arm_failpoints(""));
  loop_.run_until([&] { return other_ended; });
}

TEST_F(PullPlansTest, TablesEndWhileAPlanIsComputed) {
  ASSERT_TRUE(arm_failpoints("plan.compute=hold"));
  std::optional<bool> good;
  boost::asio::co_spawn(
      loop_.executor(), plans_->plan(inputs({source(all())})),
      [&](const std::exception_ptr&, Result<PullPlans::PlanRef> made) { good = made.has_value(); });
  bool served = false;
  boost::asio::post(loop_.executor(), [&] { served = true; });
  loop_.run_until([&] { return served; });
  std::thread release([] { EXPECT_TRUE(arm_failpoints("")); });
  plans_.reset();
  release.join();
  loop_.run_until([&] { return good.has_value(); });
}

TEST_F(PullPlansTest, PlansOfOtherDestinationsSourcesAndTradesDoNotShare) {
  const auto whole = plan(inputs({source(all())}));
  EXPECT_TRUE(whole->missing().empty());
  EXPECT_FALSE(plan(inputs({source(shard())}))->missing().empty());
  EXPECT_TRUE(plan(inputs({}))->slice_count() == 0);
  // The complete source decides, and does not have everything; then both are complete.
  EXPECT_FALSE(plan(inputs({source(shard()), source(all(), true)}))->missing().empty());
  EXPECT_TRUE(plan(inputs({source(shard()), source(all())}))->missing().empty());
  EXPECT_GT(plan(inputs({source(all())}, true))->slice_count(), whole->slice_count());
  auto part = inputs({source(all())});
  part.destination = layout_of(shard());
  EXPECT_LT(plan(std::move(part))->wanted_bytes(), whole->wanted_bytes());
}

TEST_F(PullPlansTest, APullWithOtherSourcesOfTheSameLayoutsFindsThePlanAndItsOwnNumbers) {
  const auto first = plan(inputs({source(all()), source(shard())}));
  ASSERT_TRUE(arm_failpoints("plan.compute=error:EIO"));
  const auto second = plan(inputs({source(shard()), source(all()), source(shard())}));
  ASSERT_NE(second, nullptr);
  ASSERT_EQ(second->slice_count(), first->slice_count());
  std::vector<TileIndex> tiles;
  bool partly = false;
  for (planner::SliceIndex slice = 0; slice < second->slice_count(); ++slice) {
    second->tiles_read(slice, tiles);
    const bool in_shard =
        std::ranges::all_of(tiles, [&](TileIndex tile) { return holds(shard(), tile); });
    partly = partly || in_shard;
    EXPECT_TRUE(second->candidates(slice).test(1));
    EXPECT_EQ(second->candidates(slice).test(0), in_shard);
    EXPECT_EQ(second->candidates(slice).test(2), in_shard);
    planner::Expansion expansion;
    second->expand(slice, 1, expansion);
    EXPECT_FALSE(expansion.reads.empty());
  }
  EXPECT_TRUE(partly) << "some slices lie in the shard";
}

TEST_F(PullPlansTest, ADestinationThatHasTilesGetsAPlanOfItsOwn) {
  auto resumed = inputs({source(all())});
  resumed.verified.emplace(checkpoint()->tiles.tile_count());
  resumed.verified->set_range(0, 5);
  const auto rest = plan(resumed);
  const auto whole = plan(inputs({source(all())}));
  EXPECT_LT(rest->wanted_bytes(), whole->wanted_bytes());
  EXPECT_EQ(whole->wanted_bytes(), layout_of(all())->payload_bytes());
  resumed.verified->set_range(0, 6);
  EXPECT_LT(plan(resumed)->wanted_bytes(), rest->wanted_bytes());
}

TEST_F(PullPlansTest, WrongBytesOfASourceAreCorruptAndNotKept) {
  const Checkpoint& right = *checkpoint();
  const auto leaves = std::as_bytes(std::span(right.tile_digests));
  const std::string digests(reinterpret_cast<const char*>(leaves.data()), leaves.size());
  std::string wrong = digests;
  wrong.back() ^= 1;
  const auto parse = [&](const std::string& tile_digests) {
    return loop_.run(plans_->parse(
        right.id, right.root, {right.tensors.digest(), right.tensors.serialize(), tile_digests}));
  };
  const auto refused = parse(wrong);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), ErrorCode::kCorrupt);
  EXPECT_EQ(plans_->find_checkpoint(right.id, right.root), nullptr);
  const auto parsed = parse(digests);
  ASSERT_TRUE(parsed) << parsed.error().message();
  EXPECT_EQ(plans_->find_checkpoint(right.id, right.root), *parsed);
  EXPECT_EQ(plans_->find_checkpoint({"evil", 51}, right.root), nullptr);
}

TEST_F(PullPlansTest, ALayoutIsKeptUnderTheDigestThatItHas) {
  const auto layout = layout_of(shard());
  const Digest& tensors = checkpoint()->tensors.digest();
  const auto refused =
      loop_.run(plans_->parse(checkpoint(), layout_of(all())->digest(), layout->serialize()));
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), ErrorCode::kCorrupt);
  ASSERT_TRUE(loop_.run(plans_->parse(checkpoint(), layout->digest(), layout->serialize())));
  EXPECT_NE(plans_->find_layout(tensors, layout->digest()), nullptr);
  EXPECT_EQ(plans_->find_layout(tensors, layout_of(all())->digest()), nullptr);
  EXPECT_EQ(plans_->find_layout(Digest{{1}}, layout->digest()), nullptr);
}

TEST_F(PullPlansTest, NoTableKeepsACopyOfTheStore) {
  auto stored = pull(all());
  const std::weak_ptr<const store::StoredVersion> copy = stored;
  const auto layout = loop_.run(plans_->layout_of(stored));
  ASSERT_TRUE(layout);
  ASSERT_TRUE(loop_.run(plans_->plan(inputs({{*layout, false}}))));
  const long others = copy.use_count();
  open({2, 64 << 20, 64});
  EXPECT_EQ(copy.use_count(), others) << "the tables that went away held no copy";
}

TEST_F(PullPlansTest, KeptTablesTakeBoundedMemory) {
  open({1, 20'000, 64});
  const std::vector<TensorInfo> infos{{"w", DType::kU8, {kHeight, kWidth}}};
  const auto model = checkpoint_of({"m", 1}, infos);
  for (std::uint64_t row = 0; row < kHeight; ++row) {
    (void)wanted(model, {"", "", "", {{"w", {row, 0}, {1, kWidth}}}});
    EXPECT_LE(plans_->kept_bytes(), 20'000u);
  }
  EXPECT_GT(plans_->kept_bytes(), 0u);
}

}  // namespace
}  // namespace rekindle::pull
