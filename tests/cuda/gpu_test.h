#pragma once

#include <cstdlib>
#include <memory>
#include <vector>

#include <gtest/gtest.h>

#include "src/cuda/device.h"

namespace rekindle::cuda::testing {

// Skips without a GPU. Fails if REKINDLE_REQUIRE_GPU is set.
class GpuTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto driver = Driver::load();
    if (driver) {
      driver_ = std::move(*driver);
      auto devices = list_devices(*driver_);
      ASSERT_TRUE(devices) << devices.error().message();
      devices_ = std::move(*devices);
      return;
    }
    if (std::getenv("REKINDLE_REQUIRE_GPU") != nullptr) FAIL() << driver.error().message();
    GTEST_SKIP() << driver.error().message();
  }

  std::shared_ptr<const Driver> driver_;
  std::vector<DeviceSummary> devices_;
};

}  // namespace rekindle::cuda::testing
