#include "recovery/device/device_life.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace rekindle::device {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;

const Error kKilled(ErrorCode::kPeerLost, "it was killed");

class DeviceLifeTest : public ::testing::Test {
 protected:
  DeviceLifeTest() { life_.start(); }
  void launch() {
    life_.launching(now_);
    life_.launched(100);
  }
  Result<void> greet(std::vector<DeviceInfo> devices = {{"GPU-1", "H100", 80}}) {
    return life_.greeted(now_, std::move(devices), "no driver");
  }

  TimePoint now_{1h};
  DeviceLife life_{{.first_pause = 250ms,
                    .longest_pause = 700ms,
                    .healthy = 60s,
                    .hello = 120s,
                    .silence = 10s}};
};

TEST_F(DeviceLifeTest, ServesTheDevicesThatItNames) {
  EXPECT_EQ(life_.check_ready("GPU-1").error().code(), ErrorCode::kUnavailable);
  launch();
  EXPECT_EQ(life_.name(), "");
  ASSERT_TRUE(greet());
  EXPECT_EQ(life_.state(), DeviceLife::State::kServing);
  EXPECT_TRUE(life_.check_ready("GPU-1"));
  const auto other = life_.check_ready("GPU-2");
  EXPECT_EQ(other.error().code(), ErrorCode::kNotFound);
  EXPECT_THAT(other.error().message(), HasSubstr("it sees GPU-1"));
  EXPECT_EQ(life_.name(), "100.0");
  EXPECT_EQ(greet().error().code(), ErrorCode::kInvalid) << "twice";
}

TEST_F(DeviceLifeTest, AHostWithoutGpusTurnsItOff) {
  launch();
  EXPECT_EQ(greet({}).error().code(), ErrorCode::kUnavailable);
  EXPECT_FALSE(life_.ended(now_, kKilled));
  EXPECT_EQ(life_.state(), DeviceLife::State::kOff);
  EXPECT_EQ(life_.pid(), 0u);
  EXPECT_THAT(life_.check_ready("GPU-1").error().message(), HasSubstr("no driver"));
}

TEST_F(DeviceLifeTest, GpusThatHaveVanishedMayComeBack) {
  launch();
  ASSERT_TRUE(greet());
  EXPECT_TRUE(life_.ended(now_, kKilled));
  launch();
  EXPECT_FALSE(greet({}));
  EXPECT_TRUE(life_.ended(now_, kKilled));
  EXPECT_EQ(life_.state(), DeviceLife::State::kRestarting);
}

TEST_F(DeviceLifeTest, PausesDoubleUntilAProcessWasHealthy) {
  std::vector<std::chrono::milliseconds> pauses;
  for (int i = 0; i < 4; ++i) {
    launch();
    ASSERT_TRUE(greet());
    pauses.push_back(*life_.ended(now_ += 1s, kKilled));
  }
  EXPECT_THAT(pauses, ::testing::ElementsAre(250ms, 500ms, 700ms, 700ms));
  EXPECT_EQ(life_.restarts(), 4u);
  EXPECT_EQ(life_.problem(), "it was killed");
  launch();
  ASSERT_TRUE(greet());
  EXPECT_EQ(life_.ended(now_ += 60s, kKilled), 250ms);
}

TEST_F(DeviceLifeTest, AProcessThatSaysNoHelloHangs) {
  launch();
  EXPECT_FALSE(life_.check(now_ + 120s).hangs);
  EXPECT_FALSE(life_.check(now_ + 120s).ask);
  EXPECT_TRUE(life_.check(now_ + 121s).hangs);
}

TEST_F(DeviceLifeTest, AProcessIsAskedEverySecondAndHangsAfterSilence) {
  launch();
  ASSERT_TRUE(greet());
  EXPECT_TRUE(life_.check(now_).ask);
  EXPECT_FALSE(life_.check(now_ + 999ms).ask);
  EXPECT_TRUE(life_.check(now_ + 1s).ask);
  life_.heard(now_ + 2s);
  EXPECT_FALSE(life_.check(now_ + 12s).hangs);
  EXPECT_TRUE(life_.check(now_ + 12s + 1ms).hangs);
  life_.excuse(now_ + 13s);
  EXPECT_FALSE(life_.check(now_ + 13s).hangs);
}

}  // namespace
}  // namespace rekindle::device
