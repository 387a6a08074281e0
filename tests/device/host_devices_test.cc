#include "recovery/device/process/host_devices.h"

#include <atomic>
#include <future>
#include <latch>

#include <gtest/gtest.h>

#include "recovery/device/gpu_options.h"
#include "src/bucket/double_device.h"

namespace rekindle::device {
namespace {

const std::vector<Devices::One> kTwo{{"double:0", "double:0", 4096},
                                     {"double:1", "double:1", 4096}};

Result<std::unique_ptr<bucket::Device>> make(const Devices::One& one) {
  return bucket::make_double_device(one.id, one.total_bytes);
}

TEST(Devices, OneThatIsBeingOpenedHoldsUpNobodyElse) {
  std::latch begun(1);
  std::latch go_on(1);
  std::atomic<int> opened = 0;
  Devices devices(kTwo, [&](const Devices::One& one) -> Result<std::unique_ptr<bucket::Device>> {
    ++opened;
    if (one.id == "double:1") {
      begun.count_down();
      go_on.wait();
    }
    return make(one);
  });
  const auto open_slow = [&] { return *devices.open("double:1"); };
  auto first = std::async(std::launch::async, open_slow);
  begun.wait();
  EXPECT_EQ((*devices.open("double:0"))->id(), "double:0");
  auto second = std::async(std::launch::async, open_slow);
  go_on.count_down();
  bucket::Device* const device = first.get();
  EXPECT_EQ(device->id(), "double:1");
  EXPECT_EQ(second.get(), device) << "it is opened once";
  EXPECT_EQ(opened.load(), 2);
}

TEST(Devices, OneThatDoesNotOpenIsTriedAgain) {
  int tries = 0;
  Devices devices(kTwo, [&](const Devices::One& one) -> Result<std::unique_ptr<bucket::Device>> {
    if (++tries == 1) return fail(ErrorCode::kUnavailable, "in use");
    return make(one);
  });
  EXPECT_EQ(devices.open("double:0").error().code(), ErrorCode::kUnavailable);
  EXPECT_TRUE(devices.open("double:0"));
  EXPECT_EQ(devices.open("double:7").error().code(), ErrorCode::kNotFound);
  EXPECT_EQ(tries, 2);
}

TEST(Devices, TheFirstThatOpensLeadsTheList) {
  Devices devices(kTwo, [](const Devices::One& one) -> Result<std::unique_ptr<bucket::Device>> {
    if (one.id == "double:0") return fail(ErrorCode::kUnavailable, "in use");
    return make(one);
  });
  EXPECT_EQ(devices.open_first()->id(), "double:1");
  EXPECT_EQ(devices.all().size(), 1u);
  EXPECT_FALSE(devices.contains("double:0"));
  EXPECT_NE(devices.problem().find("in use"), std::string::npos);
}

TEST(GpuOptions, AreAutoNoneOrDoubles) {
  EXPECT_EQ(parse_gpu("auto")->use, GpuOptions::Use::kAuto);
  EXPECT_EQ(parse_gpu("none")->use, GpuOptions::Use::kNone);
  const auto doubles = parse_gpu("double:2:512MiB");
  ASSERT_TRUE(doubles);
  EXPECT_EQ(doubles->use, GpuOptions::Use::kDouble);
  EXPECT_EQ(doubles->doubles.count, 2u);
  EXPECT_EQ(doubles->doubles.bytes, 512 * kMiB);
  EXPECT_EQ(parse_gpu("double:1")->doubles.bytes, kGiB);
  for (const char* wrong : {"", "all", "double", "double:", "double:0", "double:x", "double:1:",
                            "double:1:0", "double:-1", "double:1000", "double:1:5:5"}) {
    EXPECT_FALSE(parse_gpu(wrong)) << wrong;
  }
}

}  // namespace
}  // namespace rekindle::device
