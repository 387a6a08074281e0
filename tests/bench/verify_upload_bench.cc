// Measures what `rekindle agent --verify-gpu` costs a worker that attaches. Two agents on this host
// have one copy each; one of them verifies. Their workers load in turn, and the order changes with
// each run. The first load, which compiles the kernels, is not counted.
//
//   verify_upload_bench [--gib N] [--tensors N] [--gpus N] [--runs N] [--device cuda|double]
//                       [--bucket MIB]
//
// Prints the medians of attach and load, without and with, and their ratio (the target is 1.05 at
// most), beside plain uploads of as many bytes; and whether every byte on the devices is right. The
// host has room for the model three times, each GPU twice.
#include <filesystem>
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

struct Side {
  std::string name;
  std::vector<std::string> arguments;
  std::unique_ptr<Process> agent;
  DeviceWorkers workers;
  std::vector<double> loads, attaches;
  Json last;
};

void start(Side& side, const DeviceBenchOptions& options, const TempDir& directory,
           std::uint64_t payload) {
  const std::string store = directory / side.name;
  side.arguments.insert(
      side.arguments.end(),
      {"--gpu", options.kind == "double" ? fmt::format("double:{}", options.gpus) : "auto"});
  if (!options.bucket.empty()) {
    side.arguments.insert(side.arguments.end(), {"--gpu-bucket", options.bucket + "MiB"});
  }
  side.agent = start_agent(kRekindle, store, side.arguments);
  const auto published =
      run({kRekindle, "publish", "m@1", directory / "model", "--store", store, "--quiet"}, kLong);
  if (published.exit.code != 0) give_up("publish: " + published.err);
  wait_until_pinned(kRekindle, store, payload);
  for (std::size_t i = 0; i < options.gpus; ++i) {
    side.workers.push_back(
        std::make_unique<DeviceWorker>(kWorker, store, fmt::format("{}:{}", options.kind, i)));
    (void)side.workers.back()->answer();
  }
  (void)slowest(side.workers, "load");  // allocates, opens IPC, has the kernels compiled
}

void load(Side& side) {
  side.loads.push_back(slowest(side.workers, "load", &side.last));
  side.attaches.push_back(side.last["attach_seconds"].get<double>());
}

void print(const Side& side, double bytes) {
  const double seconds = median(side.loads);
  fmt::print("  attach and load, {:10} {:.3f} s  {:.1f} GB/s each (attach {:.1f} ms)\n", side.name,
             seconds, bytes / seconds / 1e9, median(side.attaches) * 1e3);
}

}  // namespace

int main(int argc, char** argv) {
  const DeviceBenchOptions options = options_of(argc, argv, {.gib = 16, .runs = 9});
  const TempDir directory(true);
  const std::uint64_t payload = make_model(
      directory / "model", static_cast<std::uint64_t>(options.gib * (1ull << 30)), options.tensors);
  Side plain{.name = "plain", .arguments = {}};
  Side verified{.name = "verified", .arguments = {"--verify-gpu"}};
  start(plain, options, directory, payload);
  start(verified, options, directory, payload);
  std::filesystem::remove_all(directory / "model");
  std::vector<double> limits;
  for (std::size_t i = 0; i < options.runs; ++i) {
    limits.push_back(slowest(plain.workers, "limit"));
    load(i % 2 == 0 ? plain : verified);
    load(i % 2 == 0 ? verified : plain);
  }
  const auto bytes = plain.last["bytes"].get<double>();
  fmt::print("{:.1f} GiB in {} tensors to {} x {} at once, {} runs of each, path {} and {}\n",
             options.gib, options.tensors, options.gpus, options.kind, options.runs,
             plain.last["path"].get<std::string>(), verified.last["path"].get<std::string>());
  fmt::print("  plain uploads               {:.3f} s  {:.1f} GB/s each\n", median(limits),
             bytes / median(limits) / 1e9);
  print(plain, bytes);
  print(verified, bytes);
  fmt::print("  verified takes {:.3f} x as long (target: 1.05 at most)\n",
             median(verified.loads) / median(plain.loads));
  // "limit" has overwritten what the plain workers had; the last load has brought it again.
  const std::uint64_t wrong = wrong_words(plain.workers) + wrong_words(verified.workers);
  fmt::print("  wrong words: {}\n", wrong);
  return wrong == 0 ? 0 : 1;
}
