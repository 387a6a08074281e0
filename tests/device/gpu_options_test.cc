#include "recovery/device/gpu_options.h"

#include <gtest/gtest.h>

namespace rekindle::device {
namespace {

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
