#include "tests/chaos/leaks.h"
#include "tests/gpu/round_workers.h"

namespace rekindle::testing {
namespace {

using chaos::Holdings;
using chaos::holdings_of;

constexpr int kUpdates = 50;

using RoundLeaks = RoundWorkers;

// Two versions in turn, on the same devices: communicators, buckets and pinned memory are those of
// the first rounds.
TEST_F(RoundLeaks, FiftyUpdatesLeaveNothingInWorkersAgentAndDeviceProcess) {
  start_agents({"a"});
  const Checkpoint checkpoints[] = {plain_checkpoint(4, 41), plain_checkpoint(4, 42)};
  publish("m@1", checkpoints[0]);
  for (const int device : {0, 1}) {
    auto& member = add_member("a", device);
    attach(member, 1);
    ASSERT_TRUE(is_ok(member.client->ask("take all")));
    ASSERT_TRUE(is_ok(member.client->ask("loaded")));
  }
  publish("m@2", checkpoints[1]);
  const auto move = [&](int i) {
    const auto update = move_all(2 - i % 2);
    ASSERT_EQ(update.exit_code, 0) << update.err << update.json;
    ASSERT_EQ(broadcast_in(update.json), 2) << update.json;
  };
  for (int i = 0; i < 4; ++i) ASSERT_NO_FATAL_FAILURE(move(i));
  ASSERT_TRUE(eventually_no_sessions()) << devices();
  std::vector<std::pair<std::string, pid_t>> watched{{"agent", fleet_.agent("a").process->pid()},
                                                     {"device process", device_process()}};
  for (auto& member : members_) watched.emplace_back("worker", member->client->process().pid());
  std::vector<Holdings> before;
  for (const auto& [who, pid] : watched) before.push_back(holdings_of(pid));
  const std::uint64_t used = device_bytes_used(watched[1].second);
  const auto pinned = devices().value("pinned_bytes", std::uint64_t{0});
  for (int i = 0; i < kUpdates; ++i) ASSERT_NO_FATAL_FAILURE(move(i));
  EXPECT_TRUE(eventually_no_sessions()) << devices();
  for (std::size_t i = 0; i < before.size(); ++i) {
    EXPECT_TRUE(eventually([&] {
      const Holdings now = holdings_of(watched[i].second);
      return now.descriptors <= before[i].descriptors && now.threads <= before[i].threads &&
             now.mappings < before[i].mappings + kUpdates / 2;
    })) << watched[i].first;
  }
  EXPECT_LE(device_bytes_used(watched[1].second), used);
  EXPECT_EQ(devices().value("pinned_bytes", std::uint64_t{0}), pinned);
  EXPECT_EQ(device_process(), watched[1].second);
  for (auto& member : members_) {
    EXPECT_EQ(sums_of(*member->client), checkpoints[0].sums());
  }
}

}  // namespace
}  // namespace rekindle::testing
