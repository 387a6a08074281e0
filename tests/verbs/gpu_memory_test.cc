#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/process.h"
#include "tests/verbs/stub_devices.h"
#include "transport/verbs/memory/device_share.h"

namespace rekindle::transport::verbs {
namespace {

using ::testing::HasSubstr;

class GpuMemory : public ::testing::Test {
 protected:
  GpuMemory() {
    api_.add("mlx5_0");
    FabricOptions options;
    options.sysfs = sysfs_.path();
    fabric_ = std::move(*Fabric::open(api_, options));
  }
  const Device& device() { return *fabric_->devices()[0]; }

  StubApi api_;
  rekindle::testing::TempDir sysfs_;
  std::unique_ptr<Fabric> fabric_;
};

TEST_F(GpuMemory, ADriverThatComplainsAboutTheDescriptorTakesDmabufs) {
  EXPECT_TRUE(takes_dmabuf(device()));
  for (const int error : {EOPNOTSUPP, EPROTONOSUPPORT, ENOSYS, EINVAL}) {
    api_.dmabuf_errno = error;
    EXPECT_FALSE(takes_dmabuf(device())) << error;
  }
  EXPECT_EQ(api_.mrs, 0);
}

TEST_F(GpuMemory, ARangeIsRegisteredAsLongAsItsHandle) {
  constexpr std::uint64_t kBytes = 4 << 20;
  {
    const auto mr = register_gpu_range(device(), 7, 0, kBytes, 0x7f00'0000'0000, 0);
    ASSERT_TRUE(mr) << mr.error().message();
    EXPECT_EQ((*mr)->length, kBytes);
    EXPECT_EQ(api_.mrs, 1);
  }
  EXPECT_EQ(api_.mrs, 0);
}

TEST_F(GpuMemory, ARefusalSaysWhatAndWhere) {
  api_.dmabuf_errno = ENOMEM;
  const auto mr = register_gpu_range(device(), 7, 0, 4 << 20, 0x7f00'0000'0000, 0);
  ASSERT_FALSE(mr);
  EXPECT_EQ(mr.error().code(), ErrorCode::kExhausted);
  EXPECT_THAT(mr.error().message(), HasSubstr("4.00 MiB of GPU memory with mlx5_0"));
}

}  // namespace
}  // namespace rekindle::transport::verbs
