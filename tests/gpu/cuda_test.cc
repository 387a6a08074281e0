// What only a real GPU has.
#include "tests/gpu/gpu_workers.h"

namespace rekindle::testing {
namespace {

using CudaWorkers = GpuWorkers;

TEST_F(CudaWorkers, LoadATensorOfMoreThanFourGiB) {
  const Checkpoint checkpoint(
      {{"small", DType::kU8, {3}}, {"huge", DType::kBF16, {33'001, 70'001}}}, 16);
  start_agent();
  publish("m@1", checkpoint);
  const auto one = worker();
  expect_loads(*one, "attach m@1", checkpoint.sums());
}

TEST_F(CudaWorkers, Row37WithLittleMemoryBucketsAreSmallerAndBytesRight) {
  const auto checkpoint = plain_checkpoint(72, 17);
  start_agent();
  publish("m@1", checkpoint);
  const auto one = worker();
  ASSERT_TRUE(is_ok(one->ask("hog 600000000")));
  ASSERT_TRUE(is_ok(one->ask("attach m@1")));
  const auto taken = one->ask("take all");
  ASSERT_TRUE(is_ok(taken)) << taken;
  EXPECT_EQ(taken["path"], "ipc");
  EXPECT_LE(taken["largest"], 16u << 20);
  EXPECT_EQ(sums_of(*one), checkpoint.sums());
}

TEST_F(CudaWorkers, Row37WithTooLittleTheErrorSaysWhatWouldBeNeededAndMoreMemoryHelps) {
  const auto checkpoint = plain_checkpoint(72, 18);
  start_agent();
  publish("m@1", checkpoint);
  const auto one = worker();
  ASSERT_TRUE(is_ok(one->ask("hog 140000000")));
  ASSERT_TRUE(is_ok(one->ask("attach m@1")));
  const auto taken = one->ask("take all");
  EXPECT_EQ(taken["code"], "EXHAUSTED") << taken;
  EXPECT_NE(taken.value("message", "").find("one bucket takes 16"), std::string::npos) << taken;
  EXPECT_TRUE(is_ok(one->ask("detach")));
  EXPECT_TRUE(is_ok(one->ask("hog 0")));
  expect_loads(*one, "attach m@1", checkpoint.sums());
}

TEST_F(CudaWorkers, OnAGpuThatTheAgentDoesNotSeeUploadByThemselves) {
  const auto checkpoint = odd_checkpoint(19);
  fleet_.start_agent("a", {"--gpu", "auto"}, "127.0.0.1:0", {"env", "CUDA_VISIBLE_DEVICES="});
  publish("m@1", checkpoint);
  const auto one = worker();
  expect_loads(*one, "attach m@1", checkpoint.sums(), "upload: ");
}

TEST_F(CudaWorkers, HearWhichGpuTheyDoNotSee) {
  start_agent();
  publish("m@1", odd_checkpoint(20));
  const std::string uuid = "GPU-00000000-0000-0000-0000-000000000001";
  const auto refused = worker()->ask("attach m@1 device=" + uuid);
  EXPECT_EQ(refused["code"], "NOT_FOUND") << refused;
  EXPECT_NE(refused.value("message", "").find(uuid), std::string::npos) << refused;
}

}  // namespace
}  // namespace rekindle::testing
