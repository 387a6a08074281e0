// How fast a worker whose agent lives has its weights on its GPU again, beside plain uploads of as
// many bytes from pinned memory, in the same run and in turn. With several GPUs all load at once.
//
//   device_bench [--gib N] [--tensors N] [--gpus N] [--runs N] [--device cuda|double] [--bucket
//   MIB]
//
// Prints the medians of both and their ratio (1 = the speed of plain uploads), and whether every
// byte on the device is right.
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "tests/bench/device_fleet.h"

namespace {

using namespace rekindle::bench;    // NOLINT(google-build-using-namespace)
using namespace rekindle::testing;  // NOLINT(google-build-using-namespace)

const std::string kRekindle = program(REKINDLE_BINARY);
const std::string kWorker = program(DEVICE_WORKER);

using Workers = std::vector<std::unique_ptr<DeviceWorker>>;

// Of all at once: the slowest is what counts.
double seconds_of(Workers& workers, const std::string& word, Json* last = nullptr) {
  for (const auto& worker : workers) worker->say(word);
  double slowest = 0;
  for (const auto& worker : workers) {
    const Json said = worker->answer();
    slowest = std::max(slowest, said["seconds"].get<double>());
    if (last != nullptr) *last = said;
  }
  return slowest;
}

}  // namespace

int main(int argc, char** argv) {
  double gib = 32;
  std::uint64_t tensors = 512;
  std::size_t gpus = 1;
  std::size_t runs = 5;
  std::string kind = "cuda";
  std::string bucket = "64";
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    if (name == "--gib") gib = std::atof(argv[i + 1]);
    if (name == "--tensors") tensors = static_cast<std::uint64_t>(std::atoll(argv[i + 1]));
    if (name == "--gpus") gpus = static_cast<std::size_t>(std::atoi(argv[i + 1]));
    if (name == "--runs") runs = static_cast<std::size_t>(std::atoi(argv[i + 1]));
    if (name == "--device") kind = argv[i + 1];
    if (name == "--bucket") bucket = argv[i + 1];
  }
  const auto bytes = static_cast<std::uint64_t>(gib * (1ull << 30));
  const TempDir directory(true);
  const std::string store = directory / "store";
  const std::uint64_t payload = make_model(directory / "model", bytes, tensors);
  const std::string gpu = kind == "double" ? fmt::format("double:{}", gpus) : "auto";
  const auto agent = start_agent(kRekindle, store, {"--gpu", gpu, "--gpu-bucket", bucket + "MiB"});
  const auto published =
      run({kRekindle, "publish", "m@1", directory / "model", "--store", store, "--quiet"}, kLong);
  if (published.exit.code != 0) give_up("publish: " + published.err);
  wait_until_pinned(kRekindle, store, payload);

  Workers workers;
  for (std::size_t i = 0; i < gpus; ++i) {
    workers.push_back(
        std::make_unique<DeviceWorker>(kWorker, store, fmt::format("{}:{}", kind, i)));
    (void)workers.back()->answer();
  }
  Json last;
  const double first = seconds_of(workers, "load", &last);  // allocates, opens IPC
  const std::uint64_t moved = last["bytes"].get<std::uint64_t>();
  std::vector<double> limits, loads, attaches;
  for (std::size_t i = 0; i < runs; ++i) {
    limits.push_back(seconds_of(workers, "limit"));
    loads.push_back(seconds_of(workers, "load", &last));
    attaches.push_back(last["attach_seconds"].get<double>());
  }
  std::uint64_t wrong = 0;
  for (const auto& worker : workers) worker->say("check");
  for (const auto& worker : workers) wrong += worker->answer()["wrong"].get<std::uint64_t>();

  const auto rate = [&](double seconds) { return static_cast<double>(moved) / seconds / 1e9; };
  fmt::print("{:.1f} GiB in {} tensors to {} x {} at once, {} runs, buckets of {} MiB, path {}\n",
             gib, tensors, gpus, kind, runs, bucket, last["path"].get<std::string>());
  fmt::print("  plain uploads      {:.3f} s  {:.1f} GB/s each\n", median(limits),
             rate(median(limits)));
  fmt::print(
      "  attach and load    {:.3f} s  {:.1f} GB/s each (attach {:.1f} ms; first time {:.3f} s)\n",
      median(loads), rate(median(loads)), median(attaches) * 1e3, first);
  fmt::print("  ratio {:.3f}   wrong words: {}\n", median(limits) / median(loads), wrong);
  return wrong == 0 ? 0 : 1;
}
