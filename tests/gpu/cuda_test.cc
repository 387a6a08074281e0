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

// By the time it uploads its own memory is back.
TEST_F(CudaWorkers, Row37WhenTheDeviceProcessHasNoRoomTheWorkerUploadsByItself) {
  const auto checkpoint = plain_checkpoint(72, 21);
  start_agent();
  publish("m@1", checkpoint);
  const auto one = worker();
  ASSERT_TRUE(is_ok(one->ask("hog 140000000")));
  ASSERT_TRUE(is_ok(one->ask("attach m@1")));
  ASSERT_TRUE(eventually_no_sessions()) << devices();
  ASSERT_TRUE(is_ok(one->ask("hog 0")));
  const auto taken = one->ask("take all");
  ASSERT_TRUE(is_ok(taken)) << taken;
  const auto path = taken.value("path", "");
  EXPECT_TRUE(path.starts_with("upload: ")) << path;
  EXPECT_NE(path.find("one bucket takes 16"), std::string::npos) << path;
  EXPECT_EQ(sums_of(*one), checkpoint.sums());
  EXPECT_EQ(devices().value("restarts", -1), 0) << "want of memory ends nothing";
}

// Their device process traps in the upload of that number, in each of its lives.
class CudaTraps : public GpuWorkers {
 protected:
  void serve(int upload) {
    const auto failpoint = "REKINDLE_FAILPOINTS=cuda.upload=error:EIO@" + std::to_string(upload);
    fleet_.start_agent("a", {"--gpu", agent_gpu()}, "127.0.0.1:0", {"env", failpoint});
    ASSERT_TRUE(eventually_serving(0)) << devices();
    publish("m@1", checkpoint_);
  }
  const Checkpoint checkpoint_ = plain_checkpoint(32, 22);
  static constexpr const char* kAttach = "attach m@1 bucket=1048576";
};

TEST_F(CudaTraps, Row38AStickyErrorEndsTheDeviceProcessAndTheNextOneServes) {
  ASSERT_NO_FATAL_FAILURE(serve(48));  // the second session's, in the middle
  const pid_t first = device_process();
  const auto one = worker();
  expect_loads(*one, kAttach, checkpoint_.sums());
  EXPECT_TRUE(is_ok(one->ask("loaded")));
  EXPECT_EQ(device_process(), first);
  const auto other = worker();
  ASSERT_TRUE(is_ok(other->ask(kAttach)));
  const auto lost = other->ask("take all");
  EXPECT_FALSE(is_ok(lost)) << lost;
  EXPECT_NE(lost.value("message", ""), "");
  ASSERT_TRUE(eventually_serving(1)) << devices();
  EXPECT_NE(device_process(), first);
  EXPECT_TRUE(fleet_.agent("a").process->running());
  EXPECT_EQ(sums_of(*one), checkpoint_.sums()) << "who has loaded is not harmed";
  expect_loads(*other, kAttach, checkpoint_.sums());
  EXPECT_TRUE(is_ok(other->ask("loaded")));
}

TEST_F(CudaTraps, Row38AtTheFirstBucketTheWorkerUploadsByItself) {
  ASSERT_NO_FATAL_FAILURE(serve(1));
  const auto one = worker();
  expect_loads(*one, kAttach, checkpoint_.sums(), "upload: ");
  EXPECT_TRUE(is_ok(one->ask("loaded")));
  EXPECT_TRUE(eventually_serving(1)) << devices();
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
