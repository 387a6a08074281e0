// How fast `rekindle update` moves the workers of a host's GPUs to another version by broadcast,
// beside uploads of an N-th of as many bytes to each of N GPUs at once, which is what a round that
// shares the work evenly cannot be faster than; in the same run and in turn.
//
//   update_bench [--gib N] [--tensors N] [--gpus N] [--runs N] [--device cuda|double]
//                [--bucket MIB]
//
// Prints the medians and their ratios, and whether every byte on the devices is right after the
// last one: they are overwritten before each update.
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

using Workers = DeviceWorkers;
using Options = DeviceBenchOptions;

struct Times {
  std::vector<double> limit, spread, total;
  std::size_t by_broadcast = 0;
};

void move_to(int version, const Options& options, const std::string& coordinator, Workers& workers,
             Times& times) {
  (void)slowest(workers, "limit");  // overwrites what is there
  times.limit.push_back(slowest(workers, fmt::format("share {}", options.gpus)));
  const Json said = update_to(kRekindle, coordinator, version, "g", workers);
  times.spread.push_back(said["spread_ms"].get<double>() / 1e3);
  times.total.push_back(said["elapsed_ms"].get<double>() / 1e3);
  times.by_broadcast = 0;
  for (const auto& member : said["members"]) {
    times.by_broadcast += member["spread_bytes"] == member["bytes"] ? 1 : 0;
  }
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = options_of(argc, argv, {.gpus = 2});
  const TempDir directory(true);
  const std::string store = directory / "store";
  const std::uint64_t payload = make_model(
      directory / "model", static_cast<std::uint64_t>(options.gib * (1ull << 30)), options.tensors);
  const std::string gpu =
      options.kind == "double" ? fmt::format("double:{}", options.gpus) : "auto";
  std::string coordinator;
  const auto running = start_coordinator(kRekindle, directory / "state", coordinator);
  std::vector<std::string> arguments{"--gpu", gpu, "--coordinator", coordinator};
  if (!options.bucket.empty()) {
    arguments.insert(arguments.end(), {"--gpu-bucket", options.bucket + "MiB"});
  }
  const auto agent = start_agent(kRekindle, store, arguments);
  for (const char* version : {"m@1", "m@2"}) {  // the same files, so the same memory
    const auto published = run({kRekindle, "publish", version, directory / "model", "--store",
                                store, "--coordinator", coordinator, "--quiet"},
                               kLong);
    if (published.exit.code != 0) give_up("publish: " + published.err);
    wait_until_pinned(kRekindle, store, payload);  // that writes to the files, as it looks
  }
  Workers workers;
  for (std::size_t i = 0; i < options.gpus; ++i) {
    workers.push_back(
        std::make_unique<DeviceWorker>(kWorker, store, fmt::format("{}:{}", options.kind, i), "g"));
    (void)workers.back()->answer();
  }
  (void)slowest(workers, "join");
  Times first, times;
  move_to(2, options, coordinator, workers, first);  // makes the communicators
  for (std::size_t i = 0; i < options.runs; ++i) {
    move_to(i % 2 == 0 ? 1 : 2, options, coordinator, workers, times);
  }
  const double limit = median(times.limit);
  fmt::print("{:.1f} GiB in {} tensors to {} x {}, {} updates, {} members by broadcast\n",
             options.gib, options.tensors, options.gpus, options.kind, options.runs,
             times.by_broadcast);
  fmt::print("  uploads of a share to each  {:.3f} s  {:.1f} GB/s together\n", limit,
             static_cast<double>(payload) / limit / 1e9);
  fmt::print("  spreading                   {:.3f} s  {:.3f} x the uploads\n", median(times.spread),
             median(times.spread) / limit);
  fmt::print("  update, asked to ready      {:.3f} s  (the first: {:.3f} s)\n", median(times.total),
             first.total.front());
  const std::uint64_t wrong = wrong_words(workers);
  fmt::print("  wrong words: {}\n", wrong);
  return wrong == 0 && times.by_broadcast == options.gpus ? 0 : 1;
}
