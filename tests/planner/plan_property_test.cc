// Random checkpoints, layouts, holdings and options; every plan is carried out on memory and held
// against a look at each element. REKINDLE_SEED and REKINDLE_CASES repeat or extend a run.
#include <cstdlib>
#include <random>
#include <set>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "recovery/planner/plan_for_sources.h"
#include "tests/planner/plan_oracle.h"
#include "tests/support/effort.h"

namespace rekindle::planner::testing {
namespace {

std::uint64_t from_environment(const char* name, std::uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

struct Coverage {
  std::uint64_t direct = 0, staged = 0, range = 0, grouped = 0, missing = 0;
};

void count_kinds(const Plan& plan, Coverage& seen) {
  seen.missing += !plan.missing().empty();
  for (SliceIndex slice = 0; slice < plan.slice_count(); ++slice) {
    seen.direct += plan.kind(slice) == SliceKind::kDirect;
    seen.staged += plan.kind(slice) == SliceKind::kStaged;
    seen.range += plan.kind(slice) == SliceKind::kRange;
    seen.grouped += plan.group_size(slice) > 1;
  }
}

template <typename Make>
Coverage run_cases(const Make& make, std::uint64_t cases) {
  const std::uint64_t base = from_environment("REKINDLE_SEED", std::random_device{}());
  const std::uint64_t count = from_environment("REKINDLE_CASES", cases);
  fmt::print("seed {}\n", base);
  Coverage seen;
  for (std::uint64_t i = 0; i < count; ++i) {
    const std::uint64_t seed = base + i;
    Random random(seed);
    const Scenario scenario = make(random);
    const std::vector<SourceView> views = scenario.views();
    const PlanRequest request{scenario.checkpoint.get(), scenario.destination.get(), views,
                              scenario.have.get()};
    const auto plan = plan_pull(request, scenario.options);
    if (!plan) {
      ADD_FAILURE() << "seed " << seed << ": " << plan.error().message();
      break;
    }
    const auto failures = check_plan(scenario, **plan, random);
    for (const std::string& failure : failures) ADD_FAILURE() << "seed " << seed << ": " << failure;
    if (!failures.empty()) break;
    const auto again = plan_pull(request, scenario.options);
    if (digest_plan(**plan) != digest_plan(**again)) {
      ADD_FAILURE() << "seed " << seed << ": the same request gave two plans";
      break;
    }
    count_kinds(**plan, seen);
  }
  return seen;
}

// A class without a source would make plans that nobody can carry out.
void drop_unused(std::vector<SourceView>& classes, std::vector<SourceIndex>& class_of) {
  const std::set<SourceIndex> used(class_of.begin(), class_of.end());
  std::vector<SourceView> kept;
  for (const SourceIndex index : used) kept.push_back(classes[index]);
  for (SourceIndex& index : class_of) {
    index = static_cast<SourceIndex>(std::distance(used.begin(), used.find(index)));
  }
  classes = std::move(kept);
}

// The plan is made over one source of each class and carried out with the scenario's sources.
TEST(PlanProperty, APlanOfClassesServesTheSourcesOfEachClass) {
  const std::uint64_t base = from_environment("REKINDLE_SEED", std::random_device{}());
  fmt::print("seed {}\n", base);
  std::uint64_t shared = 0;
  for (std::uint64_t i = 0; i < from_environment("REKINDLE_CASES", 400); ++i) {
    const std::uint64_t seed = base + i;
    Random random(seed);
    Scenario scenario = random_scenario(random, chance(random, 0.5) ? Size::kTiny : Size::kTiled);
    for (Scenario::Source& source : scenario.sources) source.held.reset();
    std::vector<SourceView> classes;
    for (const auto& layout : scenario.layouts) {
      classes.push_back({layout.get(), nullptr, false});
      classes.push_back({layout.get(), nullptr, true});
    }
    std::vector<SourceIndex> class_of;
    for (const auto& source : scenario.sources) {
      class_of.push_back(static_cast<SourceIndex>(2 * source.layout + source.proves_parts));
    }
    drop_unused(classes, class_of);
    shared += class_of.size() > classes.size();
    auto by_class = plan_pull(
        {scenario.checkpoint.get(), scenario.destination.get(), classes, scenario.have.get()},
        scenario.options);
    ASSERT_TRUE(by_class) << "seed " << seed << ": " << by_class.error().message();
    const auto plan = plan_for_sources(std::move(*by_class), class_of);
    for (const std::string& failure : check_plan(scenario, *plan, random)) {
      FAIL() << "seed " << seed << ": " << failure;
    }
  }
  EXPECT_GT(shared, 0u);
}

TEST(PlanProperty, SmallTensorsArriveOnceAndRight) {
  const Coverage seen =
      run_cases([](Random& random) { return random_scenario(random, Size::kTiny); },
                rekindle::testing::effort(4000));
  EXPECT_GT(seen.direct, 0u);
  EXPECT_GT(seen.staged, 0u);
  EXPECT_GT(seen.range, 0u);
  EXPECT_GT(seen.grouped, 0u);
  EXPECT_GT(seen.missing, 0u);
}

TEST(PlanProperty, TiledTensorsArriveOnceAndRight) {
  const Coverage seen =
      run_cases([](Random& random) { return random_scenario(random, Size::kTiled); }, 400);
  EXPECT_GT(seen.direct, 0u);
  EXPECT_GT(seen.staged, 0u);
  EXPECT_GT(seen.range, 0u);
  EXPECT_GT(seen.grouped, 0u);
  EXPECT_GT(seen.missing, 0u);
}

TEST(PlanProperty, LargeTensorsArriveOnceAndRight) {
  const Coverage seen =
      run_cases([](Random& random) { return random_scenario(random, Size::kBanded); }, 160);
  EXPECT_GT(seen.direct, 0u);
  EXPECT_GT(seen.grouped, 0u);
}

TEST(PlanProperty, ShardsBecomeShardsOfAnotherDegree) {
  const Coverage seen = run_cases(sharded_scenario, rekindle::testing::effort(1500));
  EXPECT_GT(seen.direct, 0u);
  EXPECT_GT(seen.staged, 0u);
  EXPECT_GT(seen.range, 0u);
  EXPECT_GT(seen.grouped, 0u);
  EXPECT_EQ(seen.missing, 0u);
}

// One case in five lacks something, so 60 cases without any would be a miracle.
TEST(PlanProperty, ShardsProveThePartsThatTheyHold) {
  const Coverage seen = run_cases(large_shards_scenario, rekindle::testing::effort(300));
  EXPECT_GT(seen.direct, 0u);
  EXPECT_GT(seen.range, 0u);
  EXPECT_GT(seen.missing, 0u);
}

}  // namespace
}  // namespace rekindle::planner::testing
