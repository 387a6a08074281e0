// Plans over complete sources and sources that are being filled.
#include "recovery/pull/source_plan.h"

#include <gtest/gtest.h>

#include "tests/store/store_fixture.h"

namespace rekindle::pull {
namespace {

class SourcePlanTest : public store::StoreTest {
 protected:
  std::shared_ptr<const Layout> layout_of(const std::vector<TensorBox>& boxes) const {
    return std::make_shared<const Layout>(store::pack(*checkpoint(), boxes).layout);
  }
  // A source that is being filled and holds nothing yet.
  ActiveSource& add_growing(const std::vector<TensorBox>& boxes) {
    ActiveSource& source = add_complete(boxes);
    source.held.emplace(checkpoint()->tiles.tile_count());
    return source;
  }
  ActiveSource& add_complete(const std::vector<TensorBox>& boxes) {
    ActiveSource& source = sources_.emplace_back();
    source.layout = layout_of(boxes);
    return source;
  }
  PlanInputs inputs() const {
    return {.checkpoint = checkpoint(),
            .destination = wanted_,
            .sources = plan_sources(sources_),
            .verified = std::nullopt,
            .trades = false};
  }
  std::shared_ptr<const planner::Plan> plan() const { return *plan_over(inputs()); }
  bool nothing_readable(const planner::Plan& plan) const {
    return pull::nothing_readable(plan, growing_holds(sources_));
  }
  std::vector<planner::MissingBox> held_by_nobody(const planner::Plan& plan) const {
    return pull::held_by_nobody(plan, *checkpoint(), growing_holds(sources_));
  }
  std::vector<TensorBox> all() const { return store::all_boxes(*checkpoint()); }

  void SetUp() override {
    StoreTest::SetUp();
    wanted_ = layout_of(all());
  }

  std::shared_ptr<const Layout> wanted_;
  SourceTable sources_;
};

TEST_F(SourcePlanTest, WithoutSourcesEverythingIsMissing) {
  const auto plan = this->plan();
  EXPECT_EQ(plan->slice_count(), 0u);
  EXPECT_FALSE(plan->missing().empty());
}

TEST_F(SourcePlanTest, CompleteSourcesCutTheSlicesAlthoughOthersGrow) {
  add_growing(all());
  add_complete(store::shard_boxes(*checkpoint()));
  const auto plan = this->plan();
  EXPECT_GT(plan->slice_count(), 0u);
  EXPECT_FALSE(plan->missing().empty()) << "no complete source has the rest";
  EXPECT_FALSE(nothing_readable(*plan));
}

TEST_F(SourcePlanTest, WhereCompleteSourcesHaveNothingGrowingOnesCountAsWhole) {
  ActiveSource& source = add_growing(all());
  const auto plan = this->plan();
  ASSERT_GT(plan->slice_count(), 0u);
  EXPECT_TRUE(plan->missing().empty());
  EXPECT_TRUE(nothing_readable(*plan));
  EXPECT_FALSE(held_by_nobody(*plan).empty());
  EXPECT_TRUE(source.learn_held({{0, checkpoint()->tiles.tile_count()}}));
  EXPECT_FALSE(nothing_readable(*plan));
  EXPECT_TRUE(held_by_nobody(*plan).empty());
}

TEST_F(SourcePlanTest, TradersCutSmallCopiesIntoMorePieces) {
  add_complete(all());
  PlanInputs trading = inputs();
  trading.trades = true;
  EXPECT_GT((*plan_over(trading))->slice_count(), plan()->slice_count());
}

TEST_F(SourcePlanTest, TheSummaryNamesWhatIsMissing) {
  add_complete(store::shard_boxes(*checkpoint())).name = "a";
  PullTarget target;
  target.resolved.id = checkpoint()->id;
  target.checkpoint = checkpoint();
  target.wanted = std::make_shared<const PackedLayout>(store::pack(*checkpoint(), all()));
  const auto summary = summarize_plan(*plan(), target, named_sources(sources_));
  ASSERT_EQ(summary.sources.size(), 1u);
  EXPECT_EQ(summary.sources[0].name, "a");
  EXPECT_GT(summary.sources[0].bytes_available, 0u);
  EXPECT_EQ(summary.wanted_total, all().size());
  EXPECT_GT(summary.missing_total, 0u);
}

}  // namespace
}  // namespace rekindle::pull
