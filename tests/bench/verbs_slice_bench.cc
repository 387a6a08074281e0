// What the data path costs the CPU for a slice: posting, polling, reporting, on a device that does
// every request at once and for nothing. Beside it the time that the slice takes on a NIC.
//   verbs_slice_bench [--slices N] [--row I]
// Instructions instead of time, which no neighbour disturbs (twice, with different N: the
// difference is that of 5 N slices):
//   valgrind --tool=callgrind --callgrind-out-file=/dev/null .../verbs_slice_bench --row 0 --slices
//   N
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <ctime>
#include <memory>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include "src/base/units.h"
#include "tests/verbs/fake_verbs.h"
#include "tests/verbs/verbs_hosts.h"

namespace rekindle::transport::verbs {
namespace {

using namespace std::chrono_literals;

constexpr std::uint64_t kSlice = 4 * kMiB;
constexpr std::uint64_t kSegment = 32 * kMiB;
constexpr double kNicBytesPerNanosecond = 50.0;  // 400 Gb/s
constexpr int kRounds = 5;
constexpr std::uint64_t kOps = 4;

// From start() on requests are done when they are posted, and nothing is moved.
class FreeVerbs final : public FakeVerbs {
 public:
  using FakeVerbs::FakeVerbs;
  void start() { free_ = true; }
  std::uint64_t requests() const { return requests_; }

  int post_send(ibv_qp* qp, ibv_send_wr* requests, ibv_send_wr** bad) override {
    if (!free_) return FakeVerbs::post_send(qp, requests, bad);
    for (const ibv_send_wr* wr = requests; wr != nullptr; wr = wr->next) {
      ++requests_;
      if ((wr->send_flags & IBV_SEND_SIGNALED) != 0) ids_[tail_++ % ids_.size()] = wr->wr_id;
    }
    return 0;
  }
  int poll_cq(ibv_cq* cq, int count, ibv_wc* completions) override {
    if (!free_) return FakeVerbs::poll_cq(cq, count, completions);
    int done = 0;
    for (; done < count && head_ != tail_; ++done) {
      completions[done].wr_id = ids_[head_++ % ids_.size()];
      completions[done].status = IBV_WC_SUCCESS;
    }
    return done;
  }

 private:
  bool free_ = false;
  std::uint64_t requests_ = 0;
  std::array<std::uint64_t, 4096> ids_{};
  std::size_t head_ = 0, tail_ = 0;
};

double thread_nanoseconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e9 + static_cast<double>(now.tv_nsec);
}

void run_slices(Path& path, std::span<const ReadOp> ops, std::size_t slices) {
  std::array<Completion, 64> completions;
  std::size_t posted = 0, done = 0;
  while (done < slices) {
    if (posted < slices) {
      const std::size_t at = posted % ops.size();
      const std::size_t count = std::min(ops.size() - at, slices - posted);
      posted += path.post(ops.subspan(at, count)).value_or(0);
    }
    const std::size_t count = path.poll(completions);
    for (std::size_t i = 0; i < count; ++i) {
      if (completions[i].status != OpStatus::kOk) std::abort();
    }
    done += count;
  }
}

struct Row {
  std::string_view name;
  // The gaps between the runs at the source, and here.
  std::uint64_t run = 0, gap = 0, local_gap = 0;
};
constexpr std::array<Row, 9> kRows{
    {{"in one piece", kSlice},
     {"rows of 64 KiB, 64 KiB apart", 64 * kKiB, 64 * kKiB},
     {"rows of 4 KiB, 16 KiB apart", 4 * kKiB, 16 * kKiB},
     {"rows of 4 KiB, 16 KiB apart at both ends", 4 * kKiB, 16 * kKiB, 16 * kKiB},
     {"rows of 4 KiB, 4 KiB apart here only", 4 * kKiB, 0, 4 * kKiB},
     {"rows of 2 KiB, 2 KiB apart", 2 * kKiB, 2 * kKiB},
     {"rows of 1 KiB, 1 KiB apart", kKiB, kKiB},
     {"rows of 512 B, 512 B apart (copied)", 512, 512},
     {"rows of 256 B, 256 B apart (copied)", 256, 256}}};

std::vector<ReadOp> slices_of(RegionKey key, std::span<std::byte> local, const Row& row) {
  std::vector<ReadOp> ops;
  for (std::uint64_t i = 0; i < kOps; ++i) {
    ReadOp op{.wr_id = i,
              .remote = key,
              .local = local.data() + i * local.size() / kOps,
              .run_bytes = row.run};
    op.count = kSlice / row.run;
    op.remote_stride = row.run + row.gap;
    op.local_stride = row.run + row.local_gap;
    ops.push_back(op);
  }
  return ops;
}

int run(std::size_t slices, std::span<const Row> rows) {
  FakeNetwork network;
  FakeVerbs source_api(network, "source");
  FreeVerbs puller_api(network, "puller");
  source_api.add_device({.name = "mlx5_0"});
  puller_api.add_device({.name = "mlx5_0"});
  const testing::TestSegment segment(kSegment);
  VerbsSource source(source_api, {}, {}, {.registration_patience = 10s});
  VerbsPuller puller(puller_api, {});
  std::vector<std::byte> local(kOps * kSegment);
  const auto used = puller.use(local);
  const RegionKey key = source.serve(segment);
  auto paths = puller.connect(source, source.admit({key}));
  if (!paths) {
    fmt::print(stderr, "verbs_slice_bench: {}\n", paths.error().message());
    return 1;
  }
  puller_api.start();
  fmt::print("{} slices of 4 MiB, median of {} rounds; a NIC of 400 Gb/s takes {:.0f} ns for one\n",
             slices, kRounds, static_cast<double>(kSlice) / kNicBytesPerNanosecond);
  fmt::print("{:<44} {:>9} {:>9} {:>11} {:>10}\n", "slice", "requests", "ns/slice", "ns/request",
             "of a core");
  for (const Row& row : rows) {
    const auto ops = slices_of(key, local, row);
    std::vector<double> spent;
    std::uint64_t requests = 0;
    run_slices(*paths->front(), ops, 16);
    for (int round = 0; round < kRounds; ++round) {
      requests = puller_api.requests();
      const double before = thread_nanoseconds();
      run_slices(*paths->front(), ops, slices);
      spent.push_back((thread_nanoseconds() - before) / static_cast<double>(slices));
      requests = puller_api.requests() - requests;
    }
    std::nth_element(spent.begin(), spent.begin() + kRounds / 2, spent.end());
    const double median = spent[kRounds / 2];
    const double each = static_cast<double>(requests) / static_cast<double>(slices);
    fmt::print("{:<44} {:>9.0f} {:>9.0f} {:>11.1f} {:>9.2f}%\n", row.name, each, median,
               median / each,
               100 * median / (static_cast<double>(kSlice) / kNicBytesPerNanosecond));
  }
  return 0;
}

}  // namespace
}  // namespace rekindle::transport::verbs

int main(int argc, char** argv) {
  using namespace rekindle::transport::verbs;
  std::size_t slices = 2000;
  std::size_t row = kRows.size();  // all
  bool good = argc % 2 == 1;
  for (int i = 1; good && i < argc; i += 2) {
    const std::string_view name = argv[i];
    const std::uint64_t value = std::strtoull(argv[i + 1], nullptr, 10);
    if (name == "--slices" && value > 0) {
      slices = value;
    } else if (name == "--row" && value < kRows.size()) {
      row = value;
    } else {
      good = false;
    }
  }
  if (!good) {
    fmt::print(stderr, "usage: verbs_slice_bench [--slices N] [--row 0..{}]\n", kRows.size() - 1);
    return 2;
  }
  const std::span<const Row> rows(kRows);
  return run(slices, row < rows.size() ? rows.subspan(row, 1) : rows);
}
