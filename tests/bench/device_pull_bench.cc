// A worker's weights come from another agent while they go on to its GPU, beside each stage alone:
// the same pull without a GPU, and the load once they are here. In the same run and in turn; the
// agents share a host, so that bytes go through shared memory, or TCP when they are told that they
// do not.
//
//   device_pull_bench [--gib N] [--tensors N] [--runs N] [--device cuda|double] [--transport
//   shm|tcp]
//
// Prints medians, and the whole over the slower of its stages (1 = they overlap in full).
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

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void must_run(std::vector<std::string> argv) {
  const auto done = run(argv, kLong);
  if (done.exit.code != 0) give_up(argv[1] + ": " + done.err);
}

struct Options {
  double gib = 8;
  std::uint64_t tensors = 256;
  std::size_t runs = 3;
  std::string kind = "cuda";
  std::string transport = "shm";
};

class Bench {
 public:
  explicit Bench(const Options& options) : options_(options) {
    payload_ = make_model(directory_ / "model",
                          static_cast<std::uint64_t>(options.gib * (1ull << 30)), options.tensors);
    coordinator_ =
        std::make_unique<Process>(Spawn{.argv = {kRekindle, "coordinator", "--listen",
                                                 "127.0.0.1:0", "--state", directory_ / "state"}});
    address_ = coordinator_->value_after("coordinator listening on ");
    source_ = start_agent(
        kRekindle, directory_ / "a", {"--node-id", "a", "--gpu", "none", "--coordinator", address_},
        options.transport == "tcp" ? on_host(directory_.path(), 1) : std::vector<std::string>());
    must_run({kRekindle, "publish", "m@1", directory_ / "model", "--store", directory_ / "a",
              "--quiet"});
    std::filesystem::remove_all(directory_ / "model");
  }

  // Another host that has nothing yet.
  std::unique_ptr<Process> start_puller(const std::string& gpu) {
    std::filesystem::remove_all(directory_ / "b");
    auto agent = start_agent(
        kRekindle, directory_ / "b",
        {"--node-id", fmt::format("b{}", ++hosts_), "--gpu", gpu, "--coordinator", address_});
    return agent;
  }
  std::string gpu() const { return options_.kind == "double" ? "double:1" : "auto"; }

  double pull_alone() {
    const auto agent = start_puller("none");
    const double begin = now();
    must_run({kRekindle, "pull", "m@1", "--store", directory_ / "b", "--quiet"});
    return now() - begin;
  }

  // Both, then the load alone.
  std::pair<double, double> pull_and_load() {
    const auto agent = start_puller(gpu());
    wait_until_pinned(kRekindle, directory_ / "b", 0);
    DeviceWorker worker(kWorker, directory_ / "b", options_.kind + ":0");
    (void)worker.answer();
    const double both = worker.ask("load")["seconds"].get<double>();
    wait_until_pinned(kRekindle, directory_ / "b", payload_);
    const double load = worker.ask("load")["seconds"].get<double>();
    const auto wrong = worker.ask("check")["wrong"].get<std::uint64_t>();
    if (wrong != 0) give_up(fmt::format("{} wrong words on the device", wrong));
    return {both, load};
  }

 private:
  const Options& options_;
  const TempDir directory_{true};
  std::uint64_t payload_ = 0;
  int hosts_ = 0;
  std::unique_ptr<Process> coordinator_;
  std::string address_;
  std::unique_ptr<Process> source_;
};

}  // namespace

int main(int argc, char** argv) {
  Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    if (name == "--gib") options.gib = std::atof(argv[i + 1]);
    if (name == "--tensors") options.tensors = static_cast<std::uint64_t>(std::atoll(argv[i + 1]));
    if (name == "--runs") options.runs = static_cast<std::size_t>(std::atoi(argv[i + 1]));
    if (name == "--device") options.kind = argv[i + 1];
    if (name == "--transport") options.transport = argv[i + 1];
  }
  Bench bench(options);
  std::vector<double> pulls, wholes, loads;
  for (std::size_t i = 0; i < options.runs; ++i) {
    pulls.push_back(bench.pull_alone());
    const auto [whole, load] = bench.pull_and_load();
    wholes.push_back(whole);
    loads.push_back(load);
  }
  const double slower = std::max(median(pulls), median(loads));
  fmt::print("{:.1f} GiB in {} tensors over {}, {} runs\n", options.gib, options.tensors,
             options.transport, options.runs);
  fmt::print("  pull alone     {:.3f} s\n  load alone     {:.3f} s\n  pull and load  {:.3f} s\n",
             median(pulls), median(loads), median(wholes));
  fmt::print("  whole / slower stage {:.3f}\n", median(wholes) / slower);
  return 0;
}
