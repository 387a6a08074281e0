#include "src/cuda/driver.h"

#include <gtest/gtest.h>

namespace rekindle::cuda {
namespace {

TEST(CudaDriver, ThatIsNotHereIsNotFound) {
  const auto driver = Driver::load("libcuda-that-nobody-has.so.1");
  ASSERT_FALSE(driver);
  EXPECT_EQ(driver.error().code(), ErrorCode::kNotFound);
  EXPECT_EQ(driver.error().message(),
            "no CUDA driver (libcuda-that-nobody-has.so.1 is not here): install NVIDIA's driver, "
            "or give it to the container");
}

TEST(CudaDriver, IsNoOtherLibrary) {
  const auto driver = Driver::load("libc.so.6");
  ASSERT_FALSE(driver);
  EXPECT_EQ(driver.error().code(), ErrorCode::kNotFound);
  EXPECT_EQ(driver.error().message(),
            "libc.so.6 is no CUDA driver of version 12.0 or newer (it lacks cuGetProcAddress_v2): "
            "update NVIDIA's driver");
}

// With or without a GPU here.
TEST(CudaDriver, LoadsOrSaysWhyNot) {
  const auto driver = Driver::load();
  if (driver) {
    EXPECT_GE((*driver)->version(), 12'000);
  } else {
    EXPECT_FALSE(driver.error().message().empty());
    EXPECT_EQ(driver.error().message().find('\n'), std::string::npos);
  }
}

}  // namespace
}  // namespace rekindle::cuda
