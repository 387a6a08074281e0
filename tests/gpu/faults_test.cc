// Workers, agents and device processes that die or stop while weights are on their way to a device.
#include <csignal>

#include "tests/gpu/gpu_workers.h"

namespace rekindle::testing {
namespace {

class GpuFaults : public GpuWorkers {
 protected:
  void serve(std::vector<std::string> more = {}) {
    start_agent("a", std::move(more));
    publish("m@1", checkpoint_);
  }
  const Checkpoint checkpoint_ = plain_checkpoint(32, 11);
  static constexpr const char* kAttach = "attach m@1 bucket=1048576";
};

TEST_F(GpuFaults, Row38AKilledDeviceProcessIsAnErrorToItsWorkerAndBackForTheNextAttach) {
  serve();
  const auto one = worker_in_the_middle();
  ASSERT_EQ(::kill(device_process(), SIGKILL), 0);
  const auto lost = one->ask("take all");
  EXPECT_EQ(lost["code"], "UNAVAILABLE") << lost;
  EXPECT_NE(lost.value("message", "").find("device process"), std::string::npos) << lost;
  EXPECT_TRUE(fleet_.agent("a").process->running());
  ASSERT_TRUE(eventually_serving(1)) << devices();
  expect_loads(*one, kAttach, checkpoint_.sums());
  EXPECT_TRUE(is_ok(one->ask("loaded")));
}

TEST_F(GpuFaults, Row38ItsRestartHarmsNoWorkerThatHasLoaded) {
  serve();
  const auto one = worker();
  expect_loads(*one, kAttach, checkpoint_.sums());
  ASSERT_EQ(::kill(device_process(), SIGKILL), 0);
  ASSERT_TRUE(eventually_serving(1)) << devices();
  EXPECT_EQ(sums_of(*one), checkpoint_.sums());
  EXPECT_TRUE(is_ok(one->ask("loaded")));
}

TEST_F(GpuFaults, Row39OfAWorkerThatIsKilledWhileItLoadsNothingIsLeft) {
  serve();
  const auto at_rest = bytes_used_at_rest();
  const pid_t process = device_process();
  const auto one = worker_in_the_middle();
  EXPECT_GT(device_bytes_used(process), at_rest);
  EXPECT_EQ(devices().value("sessions", 0), 1) << devices();
  one->process().kill();
  const auto other = worker();
  expect_loads(*other, kAttach, checkpoint_.sums());
  EXPECT_TRUE(is_ok(other->ask("detach")));
  EXPECT_TRUE(eventually_no_sessions()) << devices();
  other->process().kill();
  EXPECT_TRUE(eventually_uses_at_most(at_rest))
      << device_bytes_used(process) << ", at rest " << at_rest;
  EXPECT_EQ(device_process(), process);
}

TEST_F(GpuFaults, Row39OfAWorkerThatIsKilledOnceItHasLoadedNothingIsLeft) {
  serve();
  const auto at_rest = bytes_used_at_rest();
  const pid_t process = device_process();
  const auto one = worker();
  expect_loads(*one, kAttach, checkpoint_.sums());
  one->process().kill();
  EXPECT_TRUE(eventually_no_sessions()) << devices();
  EXPECT_TRUE(eventually_uses_at_most(at_rest))
      << device_bytes_used(process) << ", at rest " << at_rest;
  EXPECT_EQ(device_process(), process);
  expect_loads(*worker(), kAttach, checkpoint_.sums());
}

TEST_F(GpuFaults, Row40AStoppedWorkerHoldsUpNoOtherAndItsBucketsAreFreed) {
  serve({"--load-timeout", "5s"});
  const auto at_rest = bytes_used_at_rest();
  const pid_t process = device_process();
  const auto stopped = worker_in_the_middle();
  stopped->process().signal(SIGSTOP);
  const auto other = worker();
  expect_loads(*other, kAttach, checkpoint_.sums());
  EXPECT_TRUE(is_ok(other->ask("loaded")));
  other->process().kill();
  EXPECT_TRUE(eventually_no_sessions()) << devices();
  stopped->process().signal(SIGCONT);
  const auto late = stopped->ask("take all");
  EXPECT_FALSE(is_ok(late)) << late;
  expect_loads(*stopped, kAttach, checkpoint_.sums());
  stopped->process().kill();
  EXPECT_TRUE(eventually_uses_at_most(at_rest))
      << device_bytes_used(process) << ", at rest " << at_rest;
}

TEST_F(GpuFaults, Row40AWorkerThatReleasesNothingLosesItsSessionOnly) {
  serve({"--load-timeout", "5s"});
  const auto at_rest = bytes_used_at_rest();
  const pid_t process = device_process();
  const auto idle = worker_in_the_middle();
  const auto other = worker();
  expect_loads(*other, kAttach, checkpoint_.sums());
  EXPECT_TRUE(is_ok(other->ask("loaded")));
  other->process().kill();
  EXPECT_TRUE(eventually_no_sessions()) << devices();
  EXPECT_EQ(device_process(), process);
  const auto late = idle->ask("take all");
  EXPECT_FALSE(is_ok(late)) << late;
  expect_loads(*idle, kAttach, checkpoint_.sums());
  idle->process().kill();
  EXPECT_TRUE(eventually_uses_at_most(at_rest))
      << device_bytes_used(process) << ", at rest " << at_rest;
}

TEST_F(GpuFaults, Row41AWorkerHearsOfItsAgentsDeathAndAttachesToItsNextLife) {
  serve();
  const auto one = worker_in_the_middle();
  fleet_.agent("a").process->kill();
  const auto lost = one->ask("take all");
  const bool by_agent = lost["code"] == "PEER_LOST";
  EXPECT_TRUE(by_agent || lost["code"] == "UNAVAILABLE") << lost;  // which is seen first
  EXPECT_NE(lost.value("message", "").find(by_agent ? "agent" : "device process"),
            std::string::npos)
      << lost;
  start_agent();
  EXPECT_TRUE(is_ok(one->ask("connect")));
  expect_loads(*one, kAttach, checkpoint_.sums());
  EXPECT_TRUE(is_ok(one->ask("loaded")));
}

}  // namespace
}  // namespace rekindle::testing
