#include "transport/verbs/host/gpu_direct.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/process.h"

namespace rekindle::transport::verbs {
namespace {

using ::testing::HasSubstr;

TEST(GpuDirect, TheBestWayThatBothEndsHaveIsTaken) {
  for (unsigned bits = 0; bits < 16; ++bits) {
    const GpuDirectFacts facts{(bits & 1U) != 0, (bits & 2U) != 0, (bits & 4U) != 0,
                               (bits & 8U) != 0};
    const GpuDirect expected = !facts.gpu                                ? GpuDirect::kHostStaging
                               : facts.driver_dmabuf && facts.nic_dmabuf ? GpuDirect::kDmabuf
                               : facts.peermem                           ? GpuDirect::kPeermem
                                                                         : GpuDirect::kHostStaging;
    const GpuDirectDecision decision = decide_gpu_direct(facts);
    EXPECT_EQ(decision.how, expected) << bits;
    EXPECT_NE(decision.why, "") << bits;
    // Advice where something could be had, and only there.
    EXPECT_EQ(decision.advice.empty(), !facts.gpu || expected != GpuDirect::kHostStaging) << bits;
  }
}

TEST(GpuDirect, TheReasonNamesTheEndThatLacksIt) {
  EXPECT_THAT(decide_gpu_direct({.gpu = true, .driver_dmabuf = true}).why, HasSubstr("NIC"));
  EXPECT_THAT(decide_gpu_direct({.gpu = true, .nic_dmabuf = true}).why, HasSubstr("GPU driver"));
  EXPECT_THAT(decide_gpu_direct({.gpu = true, .nic_dmabuf = true}).advice,
              HasSubstr("open kernel"));
}

TEST(GpuDirect, PeermemIsAModule) {
  const rekindle::testing::TempDir dir;
  EXPECT_FALSE(peermem_loaded(dir.path()));
  std::filesystem::create_directories(dir / "module/nvidia_peermem");
  EXPECT_TRUE(peermem_loaded(dir.path()));
}

TEST(GpuDirect, WithoutADriverThereIsAnErrorAndNotACrash) {
  const auto cuda = CudaExport::load();
  if (!cuda) {
    EXPECT_EQ(cuda.error().code(), ErrorCode::kNotFound);
    EXPECT_THAT(cuda.error().message(), HasSubstr("CUDA driver"));
  } else {
    EXPECT_GE((*cuda)->gpus(), 0);
    EXPECT_FALSE((*cuda)->export_range(1, 1));  // not pages, not an allocation
  }
}

}  // namespace
}  // namespace rekindle::transport::verbs
