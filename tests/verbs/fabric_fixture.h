#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include <gtest/gtest.h>

#include "tests/support/process.h"
#include "tests/verbs/stub_devices.h"
#include "transport/verbs/device/fabric.h"

namespace rekindle::transport::verbs {

inline ibv_gid_entry roce(std::uint32_t index, std::uint8_t last_byte, bool v2 = true) {
  ibv_gid_entry entry{};
  entry.gid_index = index;
  entry.gid_type = v2 ? IBV_GID_TYPE_ROCE_V2 : IBV_GID_TYPE_ROCE_V1;
  const std::uint8_t raw[16] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, last_byte};
  std::copy(std::begin(raw), std::end(raw), entry.gid.raw);
  return entry;
}

class FabricTest : public ::testing::Test {
 protected:
  // A device with one RoCE port that is up, 10.0.0.`host`.
  StubDevice& add_nic(const std::string& name, std::uint8_t host, int ports = 1) {
    StubDevice& device = api_.add(name, ports);
    for (StubPort& port : device.ports) port.gids = {roce(0, host, false), roce(1, host)};
    return device;
  }

  std::unique_ptr<Fabric> open(const std::string& hca = "") {
    FabricOptions options;
    options.hca = hca;
    options.sysfs = sysfs_.path();
    return open_with(options);
  }

  std::unique_ptr<Fabric> open_with(const FabricOptions& options) {
    auto fabric = Fabric::open(api_, options);
    EXPECT_TRUE(fabric) << fabric.error().message();
    return fabric ? std::move(*fabric) : nullptr;
  }

  void set(const std::function<void()>& change) {
    const std::lock_guard lock(api_.mutex);
    change();
  }

  // The monitor thread gets there by itself.
  static void await(const std::function<bool()>& done) {
    const auto deadline = std::chrono::steady_clock::now() + rekindle::testing::kPatience;
    while (!done()) {
      ASSERT_LT(std::chrono::steady_clock::now(), deadline) << "it never happened";
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  void TearDown() override {
    EXPECT_EQ(api_.lists, 0);
    for (const auto& device : api_.devices) {
      EXPECT_EQ(device->contexts, 0) << device->name << " is left open";
      EXPECT_EQ(device->pds, 0);
    }
  }

  StubApi api_;
  rekindle::testing::TempDir sysfs_;
};

}  // namespace rekindle::transport::verbs
