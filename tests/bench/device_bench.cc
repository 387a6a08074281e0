// How fast a worker whose agent lives has its weights on its GPU again, beside plain uploads of as
// many bytes from pinned memory, in the same run and in turn. With several GPUs all load at once.
//
//   device_bench [--gib N] [--tensors N] [--gpus N] [--runs N] [--device cuda|double] [--bucket
//   MIB]
//
// Prints the medians of both and their ratio (1 = the speed of plain uploads), and whether every
// byte on the device is right. Then the first worker is killed amid its load, and how soon the next
// one is ready beyond its own start and CUDA's.
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <fmt/format.h>

#include "tests/bench/device_fleet.h"

namespace {

using namespace rekindle::bench;    // NOLINT(google-build-using-namespace)
using namespace rekindle::testing;  // NOLINT(google-build-using-namespace)

const std::string kRekindle = program(REKINDLE_BINARY);
const std::string kWorker = program(DEVICE_WORKER);

using Workers = DeviceWorkers;
using Options = DeviceBenchOptions;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::unique_ptr<DeviceWorker> start_worker(const Options& options, const std::string& store,
                                           std::size_t number) {
  auto worker =
      std::make_unique<DeviceWorker>(kWorker, store, fmt::format("{}:{}", options.kind, number));
  (void)worker->answer();
  return worker;
}

void compare_with_uploads(const Options& options, Workers& workers) {
  Json last;
  const double first = slowest(workers, "load", &last);  // allocates, opens IPC
  const std::uint64_t moved = last["bytes"].get<std::uint64_t>();
  std::vector<double> limits, loads, attaches;
  for (std::size_t i = 0; i < options.runs; ++i) {
    limits.push_back(slowest(workers, "limit"));
    loads.push_back(slowest(workers, "load", &last));
    attaches.push_back(last["attach_seconds"].get<double>());
  }
  const auto rate = [&](double seconds) { return static_cast<double>(moved) / seconds / 1e9; };
  fmt::print("{:.1f} GiB in {} tensors to {} x {} at once, {} runs, buckets of {} MiB, path {}\n",
             options.gib, options.tensors, options.gpus, options.kind, options.runs, options.bucket,
             last["path"].get<std::string>());
  fmt::print("  plain uploads      {:.3f} s  {:.1f} GB/s each\n", median(limits),
             rate(median(limits)));
  fmt::print(
      "  attach and load    {:.3f} s  {:.1f} GB/s each (attach {:.1f} ms; first time {:.3f} s)\n",
      median(loads), rate(median(loads)), median(attaches) * 1e3, first);
  fmt::print("  ratio {:.3f}   wrong words: {}\n", median(limits) / median(loads),
             wrong_words(workers));
}

// The first worker is killed amid its load; another one takes its place.
void crash_and_come_back(const Options& options, const std::string& store, Workers& workers) {
  std::vector<double> started, ready;
  for (std::size_t i = 0; i < options.runs; ++i) {
    workers.front()->say("load");
    std::this_thread::sleep_for(std::chrono::milliseconds(50 + 40 * i));
    workers.front()->kill();
    const double killed = now();
    auto next = start_worker(options, store, 0);
    started.push_back(now() - killed);
    ready.push_back(next->ask("load")["seconds"].get<double>());
    workers.front() = std::move(next);
  }
  fmt::print(
      "  killed amid its load: the next one's own start and CUDA {:.3f} s, then ready in {:.3f} "
      "s\n",
      median(started), median(ready));
  const auto events = run({kRekindle, "events", "--json", "--store", store});
  const std::size_t at = events.out.rfind("\"phases_us\"");
  if (at != std::string::npos) {
    fmt::print("  of the last one: {}\n", events.out.substr(at, events.out.find('}', at) - at + 1));
  }
  fmt::print("  wrong words: {}\n", wrong_words(workers));
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = options_of(argc, argv, {.bucket = "64"});
  const TempDir directory(true);
  const std::string store = directory / "store";
  const std::uint64_t payload = make_model(
      directory / "model", static_cast<std::uint64_t>(options.gib * (1ull << 30)), options.tensors);
  const std::string gpu =
      options.kind == "double" ? fmt::format("double:{}", options.gpus) : "auto";
  const auto agent =
      start_agent(kRekindle, store, {"--gpu", gpu, "--gpu-bucket", options.bucket + "MiB"});
  const auto published =
      run({kRekindle, "publish", "m@1", directory / "model", "--store", store, "--quiet"}, kLong);
  if (published.exit.code != 0) give_up("publish: " + published.err);
  wait_until_pinned(kRekindle, store, payload);
  Workers workers;
  for (std::size_t i = 0; i < options.gpus; ++i) {
    workers.push_back(start_worker(options, store, i));
  }
  compare_with_uploads(options, workers);
  crash_and_come_back(options, store, workers);
  return 0;
}
