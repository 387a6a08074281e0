// A path allocates nothing per op, and little when it is made.
#include <gtest/gtest.h>

#include "tests/support/allocation_meter.h"
#include "tests/verbs/verbs_lab.h"

namespace rekindle::transport::verbs {
namespace {

namespace allocations = rekindle::testing::allocations;

// A fake device allocates where a real one does not: the calls of the data path are not counted.
class UncountedVerbs final : public FakeVerbs {
 public:
  using FakeVerbs::FakeVerbs;
  int post_send(ibv_qp* qp, ibv_send_wr* requests, ibv_send_wr** bad) override {
    const allocations::Uncounted inside;
    return FakeVerbs::post_send(qp, requests, bad);
  }
  int poll_cq(ibv_cq* cq, int count, ibv_wc* completions) override {
    const allocations::Uncounted inside;
    return FakeVerbs::poll_cq(cq, count, completions);
  }
  int req_notify_cq(ibv_cq* cq, int solicited_only) override {
    const allocations::Uncounted inside;
    return FakeVerbs::req_notify_cq(cq, solicited_only);
  }
  int get_cq_event(ibv_comp_channel* channel, ibv_cq** cq, void** context) override {
    const allocations::Uncounted inside;
    return FakeVerbs::get_cq_event(channel, cq, context);
  }
};

// Posts and polls `ops` over and over; how often that allocated after the first time.
std::uint64_t allocations_of(Path& path, std::span<const ReadOp> ops, int rounds) {
  std::array<Completion, 64> some;
  std::uint64_t before = 0;
  for (int round = 0; round <= rounds; ++round) {
    if (round == 1) before = allocations::by_this_thread();
    std::size_t posted = 0, done = 0;
    while (done < ops.size()) {
      posted += path.post(ops.subspan(posted)).value_or(0);
      const std::size_t count = path.poll(some);
      for (std::size_t i = 0; i < count; ++i) EXPECT_EQ(some[i].status, OpStatus::kOk);
      done += count;
      if (count == 0) (void)path.arm();
      (void)path.wake_at();
    }
  }
  return allocations::by_this_thread() - before;
}

TEST(VerbsPathMemory, NothingIsAllocatedPerOp) {
  const testing::TestSegment segment(8 * kMiB);
  FakeNetwork network;
  FakeVerbs source_api(network, "source");
  UncountedVerbs puller_api(network, "puller");
  source_api.add_device({.name = "mlx5_0"});
  puller_api.add_device({.name = "mlx5_0"});
  VerbsSource source(source_api, {}, {}, {.registration_patience = 10s});
  VerbsPuller puller(puller_api, {});
  const RegionKey key = source.serve(segment);
  std::vector<std::byte> local(8 * kMiB), unregistered(8 * kMiB);
  const auto used = puller.use(local);
  for (const std::uint64_t rate : {0ul, 1ul << 40}) {
    auto paths = puller.connect(source, source.admit({key}, rate));
    ASSERT_TRUE(paths) << paths.error().message();
    Path& path = *paths->front();
    for (auto* const memory : {&local, &unregistered}) {
      std::vector<ReadOp> ops;
      for (std::uint64_t i = 0; i < 300; ++i) {
        ReadOp op{.wr_id = i,
                  .remote = key,
                  .remote_offset = i * 16 * kKiB,
                  .local = memory->data() + i * 16 * kKiB,
                  .run_bytes = 16 * kKiB};
        if (i % 3 == 1) {  // covering reads
          op.run_bytes = 100;
          op.count = 30;
          op.remote_stride = op.local_stride = 400;
        } else if (i % 3 == 2) {  // a request per run
          op.run_bytes = 512;
          op.count = 3;
          op.remote_stride = op.local_stride = 5 * kKiB;
        }
        ops.push_back(op);
      }
      EXPECT_EQ(allocations_of(path, ops, 20), 0u) << "rate " << rate;
    }
  }
}

}  // namespace
}  // namespace rekindle::transport::verbs
