// Where a double's size and name can be chosen, and what it holds be seen.
#include <csignal>
#include <fstream>
#include <iterator>

#include <sys/stat.h>

#include "tests/gpu/gpu_workers.h"

namespace rekindle::testing {
namespace {

using DoubleWorkers = GpuWorkers;

TEST_F(DoubleWorkers, Row37WithLittleMemoryBucketsAreSmallerAndBytesRight) {
  const auto checkpoint = plain_checkpoint(72, 13);
  start_agent("a", {"--gpu", "double:1:512MiB"});
  publish("m@1", checkpoint);
  const auto one = worker();
  ASSERT_TRUE(is_ok(one->ask("attach m@1")));
  const auto taken = one->ask("take all");
  ASSERT_TRUE(is_ok(taken)) << taken;
  EXPECT_EQ(taken["path"], "ipc");
  EXPECT_LE(taken["largest"], 16u << 20);
  EXPECT_EQ(sums_of(*one), checkpoint.sums());
}

TEST_F(DoubleWorkers, Row37WithTooLittleTheWorkerUploadsAndSaysWhatWouldBeNeeded) {
  const auto checkpoint = plain_checkpoint(72, 14);
  start_agent("a", {"--gpu", "double:1:64MiB"});
  publish("m@1", checkpoint);
  const auto one = worker();
  ASSERT_TRUE(is_ok(one->ask("attach m@1")));
  const auto taken = one->ask("take all");
  ASSERT_TRUE(is_ok(taken)) << taken;
  const auto path = taken.value("path", "");
  EXPECT_TRUE(path.starts_with("upload: ")) << path;
  EXPECT_NE(path.find("one bucket takes 16"), std::string::npos) << path;
  EXPECT_EQ(sums_of(*one), checkpoint.sums());
  EXPECT_TRUE(eventually_no_sessions()) << devices();
  expect_loads(*one, "attach m@1 bucket=1048576", checkpoint.sums());
}

TEST_F(DoubleWorkers, AreServedByAProcessThatIsWrapped) {
  const auto checkpoint = plain_checkpoint(8, 17);
  start_agent("a", {"--gpu", "double:1", "--gpu-wrapper", "env REKINDLE_TEST_WRAPPED=1"});
  publish("m@1", checkpoint);
  const auto one = worker();
  expect_loads(*one, "attach m@1", checkpoint.sums());
  std::ifstream environment("/proc/" + std::to_string(device_process()) + "/environ");
  const std::string words(std::istreambuf_iterator<char>(environment), {});
  EXPECT_NE(words.find("REKINDLE_TEST_WRAPPED=1"), std::string::npos);
}

TEST_F(DoubleWorkers, Row40AreFreedOfTheirBucketsWhileTheyAreStopped) {
  start_agent("a", {"--load-timeout", "3s"});
  publish("m@1", plain_checkpoint(32, 16));
  const auto stopped = worker_in_the_middle();
  EXPECT_GT(device_bytes_used(device_process()), 0u);
  stopped->process().signal(SIGSTOP);
  EXPECT_TRUE(eventually_no_sessions()) << devices();
  EXPECT_TRUE(eventually_uses_at_most(0));
}

// Its library has mapped the files to upload from them.
TEST_F(DoubleWorkers, MayReadWhatWasRetiredUnderThemForAsLongAsTheyLive) {
  start_agent();
  const auto publish_copy = [&](const std::string& version, std::uint64_t seed) {
    plain_checkpoint(8, seed).write(fleet_.dir(version));
    const auto done = fleet_.run_command(
        {"publish", version, fleet_.dir(version), "--store", fleet_.agent("a").store});
    EXPECT_EQ(done.exit_code, 0) << done.err;
  };
  const auto inode = [&] {
    struct stat status {};
    const auto path = find_file(fleet_.agent("a").store / "models", "model.safetensors");
    EXPECT_EQ(::stat(path.c_str(), &status), 0);
    return status.st_ino;
  };
  publish_copy("m@1", 61);
  const auto one = worker();
  ASSERT_TRUE(is_ok(one->ask("attach m@1 device=double:7")));
  ASSERT_TRUE(is_ok(one->ask("take 1")));
  const auto before = inode();
  const auto retired = fleet_.run_command({"retire", "m@1", "--store", fleet_.agent("a").store});
  ASSERT_EQ(retired.exit_code, 0) << retired.err;
  publish_copy("m@2", 62);
  EXPECT_NE(inode(), before);
}

TEST_F(DoubleWorkers, OnADeviceThatTheAgentDoesNotSeeUploadByThemselves) {
  const auto checkpoint = odd_checkpoint(15);
  start_agent();
  publish("m@1", checkpoint);
  const auto one = worker();
  expect_loads(*one, "attach m@1 device=double:7", checkpoint.sums(), "upload: ");
  const auto path = one->ask("take 1").value("path", "");
  EXPECT_NE(path.find("double:7"), std::string::npos) << path;
}

}  // namespace
}  // namespace rekindle::testing
