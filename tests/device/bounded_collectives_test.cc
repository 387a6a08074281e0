// Aborts that hang, and aborts that do not.
#include <gtest/gtest.h>

#include "recovery/device/process/communicators.h"
#include "src/bucket/double_device.h"
#include "tests/device/faulty_collectives.h"
#include "tests/support/process.h"

namespace rekindle::device {
namespace {

using namespace std::chrono_literals;
using testing::Gate;

class BoundedCollectivesTest : public ::testing::Test {
 protected:
  ~BoundedCollectivesTest() override {
    gate_->open();
    EXPECT_TRUE(rekindle::testing::eventually([this] { return gate_->waiting() == 0; }));
  }
  std::unique_ptr<bucket::Collectives> bound(std::unique_ptr<bucket::Collectives> collectives,
                                             std::chrono::milliseconds patience) {
    return bound_aborts(std::move(collectives), patience,
                        [this](Error why) { stuck_.push_back(std::move(why)); });
  }
  std::unique_ptr<bucket::Collective> meet_alone(bucket::Collectives& collectives) {
    return *collectives.meet(*device_, 0, 1, *collectives.make_id());
  }

  const std::shared_ptr<Gate> gate_ = std::make_shared<Gate>();
  const std::unique_ptr<bucket::Device> device_ =
      bucket::make_double_device("double:0", std::uint64_t{1} << 20);
  std::vector<Error> stuck_;
};

TEST_F(BoundedCollectivesTest, OneThatAbortsIsDoneForAndNothingIsSaid) {
  const auto collectives = bound(bucket::make_double_collectives(), 20s);
  const auto one = meet_alone(*collectives);
  EXPECT_EQ(one->rank(), 0u);
  EXPECT_EQ(one->ranks(), 1u);
  EXPECT_TRUE(*one->settled());
  one->abort();
  one->abort();
  const auto settled = one->settled();
  ASSERT_FALSE(settled);
  EXPECT_EQ(settled.error().code(), ErrorCode::kStale);
  EXPECT_EQ(one->ranks(), 1u);
  EXPECT_TRUE(stuck_.empty());
}

TEST_F(BoundedCollectivesTest, Row43AnAbortThatHangsIsLeftAndSaidOnce) {
  auto collectives = bound(std::make_unique<testing::StuckCollectives>(gate_), 50ms);
  auto one = meet_alone(*collectives);
  one->abort();
  ASSERT_EQ(stuck_.size(), 1u) << "before the abort returns";
  EXPECT_EQ(stuck_[0].code(), ErrorCode::kTimeout);
  EXPECT_NE(stuck_[0].message().find("double:0"), std::string::npos) << stuck_[0].message();
  EXPECT_FALSE(one->settled());
  one.reset();
  // The abort goes on elsewhere, with everything that it needs.
  collectives.reset();
  EXPECT_EQ(stuck_.size(), 1u);
  EXPECT_EQ(gate_->waiting(), 1);
}

TEST_F(BoundedCollectivesTest, Row43ADestructorWaitsNoLonger) {
  const auto collectives = bound(std::make_unique<testing::StuckCollectives>(gate_), 50ms);
  meet_alone(*collectives).reset();
  EXPECT_EQ(stuck_.size(), 1u);
}

}  // namespace
}  // namespace rekindle::device
