// Uploads to one device that use the links of another: two devices, workers that compare every
// byte.
#include <csignal>
#include <cstdlib>

#include "tests/gpu/gpu_workers.h"

namespace rekindle::testing {
namespace {

constexpr const char* kColumns = R"({"name": "test", "rules": [
  {"match": "cols", "kind": "split", "dim": 1}, {"match": "rows", "kind": "split", "dim": 0},
  {"match": "**", "kind": "replicate"}]})";
const std::string kAttach = "attach m@1 bucket=1048576";

class SharedLinks : public GpuWorkers {
 protected:
  void SetUp() override {
    const std::string why = gpus_missing(2);
    if (why.empty()) return;
    if (std::getenv("REKINDLE_REQUIRE_GPU") != nullptr) FAIL() << why;
    GTEST_SKIP() << why;
  }
  // Its device process has opened both devices, and serves nobody.
  void start(std::vector<std::string> more = {}) {
    more.insert(more.end(), {"--gpu", agent_gpus(2)});
    start_agent("a", std::move(more));
    publish("m@1", checkpoint_);
    load_once(1);
  }
  void load_once(int device) {
    const auto one = worker_on(device);
    expect_loads(*one, kAttach, checkpoint_.sums());
    EXPECT_TRUE(is_ok(one->ask("detach")));
    EXPECT_TRUE(eventually_no_sessions()) << devices();
  }
  std::unique_ptr<DeviceClient> worker_on(int device, const std::string& spec = "") {
    std::vector<std::pair<std::string, std::string>> env{
        {"REKINDLE_DEVICE", worker_device(device)}};
    if (!spec.empty()) env.emplace_back("WORKER_SPEC", spec);
    return worker("a", std::move(env));
  }
  // Uploads so far that others have helped with.
  std::size_t helped() {
    const std::string log = fleet_.agent("a").process->err();
    std::size_t count = 0;
    for (std::size_t at = 0; (at = log.find("device.helped ", at)) != std::string::npos; ++at) {
      ++count;
    }
    return count;
  }
  void expect_helped_load(DeviceClient& worker, const std::string& attach, const Sums& sums) {
    const std::size_t before = helped();
    expect_loads(worker, attach, sums);
    EXPECT_TRUE(eventually([&] { return helped() == before + 1; }))
        << fleet_.agent("a").process->err();
  }

  const Checkpoint checkpoint_ = plain_checkpoint(64, 31);
};

TEST_F(SharedLinks, BringEveryByteToOneDevice) {
  start();
  const auto one = worker_on(0);
  expect_helped_load(*one, kAttach, checkpoint_.sums());
  expect_helped_load(*one, "attach m@1 bucket=100000", checkpoint_.sums());
}

TEST_F(SharedLinks, BringTheRowsAndColumnsOfAShard) {
  const auto checkpoint = odd_checkpoint(33);
  start();
  publish("m@2", checkpoint);
  auto sums = checkpoint.sums();
  sums.erase("cols");
  sums.erase("rows");
  sums["cols@[0,515]"] = checkpoint.sum_of("cols", 0, 515, 511, 515);
  sums["rows@[257,0]"] = checkpoint.sum_of("rows", 257, 0, 257, 333);
  const auto one = worker_on(0, kColumns);
  expect_helped_load(*one, "attach m@2 shard=tp=1/2 bucket=100000", sums);
}

TEST_F(SharedLinks, BringBytesThatTheDeviceVerifies) {
  start({"--verify-gpu"});
  const auto one = worker_on(0);
  expect_helped_load(*one, kAttach, checkpoint_.sums());
}

TEST_F(SharedLinks, AreNotUsedWithoutHelpers) {
  start({"--gpu-helpers", "none"});
  const auto one = worker_on(0);
  expect_loads(*one, kAttach, checkpoint_.sums());
  EXPECT_TRUE(is_ok(one->ask("detach")));
  EXPECT_TRUE(eventually_no_sessions()) << devices();
  EXPECT_EQ(helped(), 0u);
}

TEST_F(SharedLinks, AWorkerThatComesToTheHelperLoadsBesideTheOther) {
  start();
  const auto one = worker_on(0);
  ASSERT_TRUE(is_ok(one->ask(kAttach)));
  ASSERT_TRUE(is_ok(one->ask("take 2")));
  const auto other = worker_on(1);
  expect_loads(*other, kAttach, checkpoint_.sums());
  ASSERT_TRUE(is_ok(one->ask("take all")));
  EXPECT_EQ(sums_of(*one), checkpoint_.sums());
  EXPECT_EQ(devices().value("restarts", -1), 0);
}

TEST_F(SharedLinks, AWorkerThatIsKilledLeavesTheHelperToItsSuccessor) {
  start();
  {
    const auto one = worker_on(0);
    ASSERT_TRUE(is_ok(one->ask(kAttach)));
    ASSERT_TRUE(is_ok(one->ask("take 2")));
    one->process().kill();
    EXPECT_TRUE(eventually_no_sessions()) << devices();
  }
  const auto next = worker_on(0);
  expect_helped_load(*next, kAttach, checkpoint_.sums());
}

TEST_F(SharedLinks, ADeviceProcessThatIsKilledAmidHelpIsReplaced) {
  start();
  const auto one = worker_on(0);
  ASSERT_TRUE(is_ok(one->ask(kAttach)));
  ASSERT_TRUE(is_ok(one->ask("take 2")));
  ASSERT_EQ(::kill(device_process(), SIGKILL), 0);
  ASSERT_TRUE(eventually_serving(1)) << devices();
  load_once(1);
  const auto next = worker_on(0);
  expect_helped_load(*next, kAttach, checkpoint_.sums());
}

}  // namespace
}  // namespace rekindle::testing
