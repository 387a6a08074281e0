// Measures an upload to one GPU that uses the links of idle GPUs as well. Two agents on this host
// have one copy each; GPUs help in one of them only. Their workers on the first GPU load in turn,
// and the order changes with each run. The other GPUs are idle.
//
//   link_share_bench [--gib N] [--tensors N] [--gpus N] [--runs N] [--device cuda|double]
//                    [--bucket MIB]
//
// Prints the medians of attach and load over the own link and over all links, and their ratio,
// beside two limits of the same runs: plain uploads of as many bytes from pinned memory to the
// first GPU, and to all GPUs at once. The latter together are the most that the links carry. The
// host has room for the model three times, the first GPU twice.
#include <algorithm>
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
  std::string helpers;
  std::unique_ptr<Process> agent = nullptr;
  // On the first GPU.
  DeviceWorkers worker = {};
  std::vector<double> loads = {};
  std::vector<double> attaches = {};
  Json last = {};
};

std::unique_ptr<DeviceWorker> start_worker(const DeviceBenchOptions& options,
                                           const std::string& store, std::size_t gpu) {
  auto worker =
      std::make_unique<DeviceWorker>(kWorker, store, fmt::format("{}:{}", options.kind, gpu));
  (void)worker->answer();
  return worker;
}

// Each GPU has loaded once, so its device process has opened all of them. Returns the workers of
// the other GPUs.
DeviceWorkers start(Side& side, const DeviceBenchOptions& options, const TempDir& directory,
                    std::uint64_t payload) {
  const std::string store = directory / side.name;
  const std::string gpu =
      options.kind == "double" ? fmt::format("double:{}", options.gpus) : "auto";
  std::vector<std::string> arguments{"--gpu", gpu, "--gpu-helpers", side.helpers};
  if (!options.bucket.empty()) {
    arguments.insert(arguments.end(), {"--gpu-bucket", options.bucket + "MiB"});
  }
  side.agent = start_agent(kRekindle, store, arguments);
  const auto published =
      run({kRekindle, "publish", "m@1", directory / "model", "--store", store, "--quiet"}, kLong);
  if (published.exit.code != 0) give_up("publish: " + published.err);
  wait_until_pinned(kRekindle, store, payload);
  DeviceWorkers others;
  for (std::size_t gpu_number = 1; gpu_number < options.gpus; ++gpu_number) {
    others.push_back(start_worker(options, store, gpu_number));
    (void)others.back()->ask("load");
  }
  side.worker.push_back(start_worker(options, store, 0));
  (void)slowest(side.worker, "load");
  return others;
}

void load(Side& side) {
  side.loads.push_back(slowest(side.worker, "load", &side.last));
  side.attaches.push_back(side.last["attach_seconds"].get<double>());
}

void print(const std::string& what, double seconds, double bytes, const std::string& more = {}) {
  fmt::print("  {:34} {:.3f} s  {:.1f} GB/s{}\n", what, seconds, bytes / seconds / 1e9, more);
}

}  // namespace

int main(int argc, char** argv) {
  const DeviceBenchOptions options = options_of(argc, argv, {.gib = 16, .gpus = 2, .runs = 5});
  if (options.gpus < 2) give_up("--gpus: 2 at least");
  const TempDir directory(true);
  const std::uint64_t payload = make_model(
      directory / "model", static_cast<std::uint64_t>(options.gib * (1ull << 30)), options.tensors);
  Side own{.name = "own", .helpers = "none"};
  Side all{.name = "all", .helpers = std::to_string(options.gpus - 1)};
  DeviceWorkers others = start(own, options, directory, payload);
  (void)start(all, options, directory, payload);  // its other workers end
  std::filesystem::remove_all(directory / "model");
  std::vector<double> own_limits, all_limits;
  for (std::size_t i = 0; i < options.runs; ++i) {
    own_limits.push_back(slowest(own.worker, "limit"));
    others.push_back(std::move(own.worker.front()));
    all_limits.push_back(slowest(others, "limit"));
    own.worker.front() = std::move(others.back());
    others.pop_back();
    load(i % 2 == 0 ? own : all);
    load(i % 2 == 0 ? all : own);
  }
  const auto bytes = own.last["bytes"].get<double>();
  const auto attach = [](const Side& side) {
    return fmt::format("  (attach {:.1f} ms)", median(side.attaches) * 1e3);
  };
  fmt::print("{:.1f} GiB in {} tensors to 1 of {} x {}, {} runs of each, path {} and {}\n",
             options.gib, options.tensors, options.gpus, options.kind, options.runs,
             own.last["path"].get<std::string>(), all.last["path"].get<std::string>());
  print("plain uploads to this GPU", median(own_limits), bytes);
  print("plain uploads to all GPUs, together", median(all_limits),
        bytes * static_cast<double>(options.gpus));
  print("attach and load, own link", median(own.loads), bytes, attach(own));
  print("attach and load, all links", median(all.loads), bytes, attach(all));
  fmt::print("  all links: {:.2f} x the own link, {:.2f} of what all links carry\n",
             median(own.loads) / median(all.loads),
             median(all_limits) / static_cast<double>(options.gpus) / median(all.loads));
  const std::uint64_t wrong = wrong_words(own.worker) + wrong_words(all.worker);
  fmt::print("  wrong words: {}\n", wrong);
  return wrong == 0 ? 0 : 1;
}
