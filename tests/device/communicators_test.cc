#include "recovery/device/process/communicators.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "src/bucket/double_device.h"

namespace rekindle::device {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class Counted final : public bucket::Collective {
 public:
  explicit Counted(int& alive) : alive_(alive) { ++alive_; }
  ~Counted() override { --alive_; }
  std::uint32_t rank() const override { return 0; }
  std::uint32_t ranks() const override { return 2; }
  Result<void> spread(bucket::DeviceAddress, std::uint64_t, std::span<const std::uint32_t>,
                      bucket::Stream&) override {
    return {};
  }
  Result<bool> settled() override { return true; }
  void abort() override {}

 private:
  int& alive_;
};

class CommunicatorsTest : public ::testing::Test {
 protected:
  void keep(const std::string& device, const std::string& name) {
    communicators_.keep(device, name, std::make_unique<Counted>(alive_));
  }
  Result<std::unique_ptr<bucket::Collective>> take(const std::string& name) {
    SpreadOrder order;
    order.communicator = name;
    order.ranks = 2;
    return communicators_.take(*device_, order);
  }

  int alive_ = 0;
  const std::unique_ptr<bucket::Device> device_ = bucket::make_double_device("double:0", 1 << 20);
  Communicators communicators_{Communicators::loader(true)};
};

TEST_F(CommunicatorsTest, AreDroppedOnceTheyAreIdle) {
  EXPECT_EQ(communicators_.idle_at(), std::nullopt);
  keep("double:0", "1-1");
  const auto idle_at = communicators_.idle_at();
  ASSERT_TRUE(idle_at);
  communicators_.drop_idle(*idle_at - Duration(1));
  EXPECT_EQ(alive_, 1);
  communicators_.drop_idle(*idle_at);
  EXPECT_EQ(alive_, 0);
  EXPECT_EQ(communicators_.idle_at(), std::nullopt);
  EXPECT_THAT(communicators_.kept("double:0"), IsEmpty());
  EXPECT_EQ(take("1-1").error().code(), ErrorCode::kStale);
}

TEST_F(CommunicatorsTest, StayForASessionThatHasSaidThatTheyAreKept) {
  keep("double:0", "1-1");
  keep("double:1", "1-2");
  const TimePoint idle_at = *communicators_.idle_at();
  TimePoint later = idle_at;
  // Waits until the clock has advanced.
  while (later == idle_at) {
    EXPECT_THAT(communicators_.kept("double:0"), ElementsAre("1-1"));
    EXPECT_THAT(communicators_.kept("double:1"), ElementsAre("1-2"));
    later = *communicators_.idle_at();
  }
  communicators_.drop_idle(idle_at);
  EXPECT_EQ(alive_, 2);
  const auto taken = take("1-1");
  ASSERT_TRUE(taken) << taken.error().message();
  communicators_.drop_idle(TimePoint::max());
  EXPECT_EQ(alive_, 1) << "the one that is in a round";
}

}  // namespace
}  // namespace rekindle::device
