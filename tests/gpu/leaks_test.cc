#include "tests/chaos/leaks.h"

#include "tests/gpu/gpu_workers.h"

namespace rekindle::testing {
namespace {

using chaos::Holdings;
using chaos::holdings_of;

constexpr int kRounds = 50;

class GpuRounds : public GpuWorkers {
 protected:
  void round(DeviceClient& worker) {
    ASSERT_TRUE(is_ok(worker.ask("attach m@1 bucket=1048576")));
    const auto taken = worker.ask("take all");
    ASSERT_TRUE(is_ok(taken)) << taken;
    EXPECT_EQ(taken["path"], "ipc");
    ASSERT_TRUE(is_ok(worker.ask("detach")));
  }
  void half_a_round(DeviceClient& worker) {
    ASSERT_TRUE(is_ok(worker.ask("attach m@1 bucket=1048576")));
    ASSERT_TRUE(is_ok(worker.ask("take 1")));
    ASSERT_TRUE(is_ok(worker.ask("detach")));
  }
  // What comes and goes by itself is allowed; one thing per round is not.
  static void expect_no_more(const std::string& who, pid_t pid, const Holdings& before) {
    EXPECT_TRUE(eventually([&] {
      const Holdings now = holdings_of(pid);
      return now.descriptors <= before.descriptors && now.threads <= before.threads &&
             now.mappings < before.mappings + kRounds / 2;
    })) << who
        << ": " << before.descriptors << " descriptors, " << before.mappings << " mappings, "
        << before.threads << " threads became " << holdings_of(pid).descriptors << ", "
        << holdings_of(pid).mappings << ", " << holdings_of(pid).threads;
  }
};

TEST_F(GpuRounds, LeaveNothingInWorkerAgentAndDeviceProcess) {
  start_agent();
  publish("m@1", plain_checkpoint(4, 12));
  const auto one = worker();
  for (int i = 0; i < 3; ++i) {
    round(*one);
    half_a_round(*one);
  }
  ASSERT_TRUE(eventually_no_sessions()) << devices();
  const std::pair<std::string, pid_t> watched[] = {{"worker", one->process().pid()},
                                                   {"agent", fleet_.agent("a").process->pid()},
                                                   {"device process", device_process()}};
  std::vector<Holdings> before;
  for (const auto& [who, pid] : watched) before.push_back(holdings_of(pid));
  const std::uint64_t used = device_bytes_used(watched[2].second);
  for (int i = 0; i < kRounds; ++i) {
    round(*one);
    if (i % 5 == 0) half_a_round(*one);
    if (HasFatalFailure()) return;
  }
  EXPECT_TRUE(eventually_no_sessions()) << devices();
  for (std::size_t i = 0; i < before.size(); ++i) {
    expect_no_more(watched[i].first, watched[i].second, before[i]);
  }
  EXPECT_TRUE(eventually_uses_at_most(used))
      << device_bytes_used(watched[2].second) << " > " << used;
  EXPECT_EQ(device_process(), watched[2].second);
}

}  // namespace
}  // namespace rekindle::testing
