// The fabric on real devices: what it finds, and what it sees happen to a port.

#include "transport/verbs/device/fabric.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <thread>

#include <gtest/gtest.h>

#include "tests/rdma/rails.h"
#include "tests/support/process.h"
#include "transport/verbs/memory/device_share.h"

namespace rekindle::transport::verbs {
namespace {

using rekindle::testing::CableFault;

class RdmaFabric : public ::testing::Test {
 protected:
  void SetUp() override {
    names_ = rekindle::testing::rdma_rails();
    if (names_.a.empty()) GTEST_SKIP() << "this host has no RDMA device with an active port";
    auto fabric = Fabric::open(*api_, {});
    ASSERT_TRUE(fabric) << fabric.error().message();
    fabric_ = std::move(*fabric);
  }

  Rail& rail(const std::string& device) {
    const auto it = std::ranges::find_if(
        fabric_->rails(), [&](const auto& r) { return r->device().name() == device; });
    if (it == fabric_->rails().end()) throw std::runtime_error(device + " is no rail");
    return **it;
  }

  // Without refresh(): the monitor sees it by itself.
  static void await(const std::function<bool()>& done, const char* what) {
    const auto deadline = std::chrono::steady_clock::now() + rekindle::testing::kPatience;
    while (!done()) {
      ASSERT_LT(std::chrono::steady_clock::now(), deadline) << what;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }

  std::unique_ptr<Api> api_ = make_system_api();
  rekindle::testing::Rails names_;
  std::unique_ptr<Fabric> fabric_;
};

TEST_F(RdmaFabric, EveryNamedDeviceIsARailThatIsUp) {
  for (const auto* side : {&names_.a, &names_.b}) {
    for (const std::string& name : *side) {
      const Rail::State state = rail(name).state();
      EXPECT_TRUE(state.up) << name << ": " << state.why_down;
      EXPECT_TRUE(Rail::is_up(state.epoch)) << name;
      EXPECT_NE(kind_of(state.address.gid), GidKind::kNone) << name;
      EXPECT_GE(state.mtu_bytes, 256U) << name;
      EXPECT_GT(state.bytes_per_second, 0U) << name;
      const DeviceLimits& limits = rail(name).device().limits();
      EXPECT_GT(limits.max_mr, 0U) << name;
      EXPECT_GT(limits.max_qp_wr, 1U) << name;
      EXPECT_NE(fabric_->topology().nic(name), nullptr) << name;
    }
  }
}

TEST_F(RdmaFabric, TheFilterLeavesOneDevice) {
  FabricOptions options;
  options.hca = "=" + names_.a[0] + ":1";
  const auto one = Fabric::open(*api_, options);
  ASSERT_TRUE(one) << one.error().message();
  ASSERT_EQ((*one)->rails().size(), 1U);
  EXPECT_EQ((*one)->rails()[0]->name(), names_.a[0] + ":1");
  options.hca = "=no_such_device";
  const auto none = Fabric::open(*api_, options);
  EXPECT_NE((*none)->why_empty().find("matches none of"), std::string::npos);
}

TEST_F(RdmaFabric, AskingForDmabufIsAnsweredByEveryDevice) {
  for (const auto& device : fabric_->devices()) {
    const bool takes = takes_dmabuf(*device);
    RecordProperty(device->name(), takes ? "dmabuf" : "no dmabuf");
    // Soft-RoCE has no dmabuf regions.
    if (device->name().starts_with("rx")) {
      EXPECT_FALSE(takes) << device->name();
    }
  }
}

class RdmaFabricFaults : public RdmaFabric {
 protected:
  void SetUp() override {
    if (!rekindle::testing::rdma_cables_can_fail()) GTEST_SKIP() << "these are real cables";
    RdmaFabric::SetUp();
  }

  // Epochs of all rails that do not belong to cable 0.
  std::vector<std::uint32_t> others() {
    std::vector<std::uint32_t> epochs;
    for (const auto& r : fabric_->rails()) {
      const std::string& name = r->device().name();
      if (name != names_.a[0] && name != names_.b[0]) epochs.push_back(r->epoch());
    }
    return epochs;
  }
};

TEST_F(RdmaFabricFaults, ALinkThatGoesDownAndUpMovesTheEpochTwice) {
  Rail& near = rail(names_.a[0]);
  Rail& far = rail(names_.b[0]);
  const std::uint32_t before = near.epoch();
  const std::uint32_t far_before = far.epoch();
  const auto calm = others();
  {
    CableFault cut{"cut", "0"};
    await([&] { return !Rail::is_up(near.epoch()) && !Rail::is_up(far.epoch()); }, "still up");
    EXPECT_FALSE(near.state().up);
    EXPECT_NE(near.state().why_down, "");
    cut.repair();
  }
  await([&] { return Rail::is_up(near.epoch()) && Rail::is_up(far.epoch()); }, "still down");
  EXPECT_GT(near.epoch(), before);
  EXPECT_GT(far.epoch(), far_before);
  EXPECT_EQ(others(), calm);
  EXPECT_FALSE(near.device().dead());
}

TEST_F(RdmaFabricFaults, AnotherAddressMovesTheEpochOfItsPortOnly) {
  Rail& near = rail(names_.a[0]);
  Rail& far = rail(names_.b[0]);
  const std::uint32_t before = near.epoch();
  const std::uint32_t far_before = far.epoch();
  const std::string address = to_string(near.state().address);
  ASSERT_EQ(address, "10.10.0.1");
  CableFault readdress{"readdress", "0", "a"};
  await([&] { return Rail::is_up(near.epoch()) && near.epoch() > before; }, "nothing was seen");
  await([&] { return to_string(near.state().address) == "10.10.0.101"; }, "the old address stays");
  EXPECT_EQ(far.epoch(), far_before);
  const std::uint32_t moved = near.epoch();
  readdress.repair();
  await([&] { return to_string(near.state().address) == address; }, "it did not come back");
  EXPECT_GT(near.epoch(), moved);  // the first address again, but not the first epoch
}

TEST_F(RdmaFabricFaults, ADifferentAddressBesideTheFirstMovesNothing) {
  Rail& near = rail(names_.a[0]);
  const std::uint32_t before = near.epoch();
  const auto ip = [](const char* verb) {
    return rekindle::testing::run({"ip", "addr", verb, "10.10.0.77/24", "dev", "a0"}).exit.code;
  };
  ASSERT_EQ(ip("add"), 0);
  const auto has_77 = [&] {
    std::vector<ibv_gid_entry> entries(2000);
    const ssize_t count =
        api_->query_gid_table(near.device().context(), entries.data(), entries.size());
    return count > 0 && std::any_of(entries.begin(), entries.begin() + count, [](const auto& e) {
             return e.gid.raw[15] == 77 && e.gid.raw[12] == 10;
           });
  };
  await(has_77, "the device has no GID of it");
  fabric_->refresh();
  EXPECT_EQ(near.epoch(), before);
  ASSERT_EQ(ip("del"), 0);
  await([&] { return !has_77(); }, "the GID stays");
  fabric_->refresh();
  EXPECT_EQ(near.epoch(), before);
}

}  // namespace
}  // namespace rekindle::transport::verbs
