// What it costs a broadcast that a host which lacks the version keeps what passes
// (docs/internals/rounds.md), and what that is worth. Two agents on this host share its devices
// evenly; one has the versions, the other keeps with its default rate, or with --keep-rate 0: two
// groups of workers, one for each, are updated in turn, --runs times each, twice; not one by one: a
// device keeps one communicator.
//
//   keep_bench [--gib N] [--tensors N] [--gpus N] [--runs N] [--device cuda|double] [--bucket MIB]
//
// Prints medians: of the spreading with and without, and how long after it the host has a whole
// copy of its own. `--gpus` is even.
#include <algorithm>
#include <chrono>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "tests/bench/device_fleet.h"

namespace {

using namespace rekindle::bench;    // NOLINT(google-build-using-namespace)
using namespace rekindle::testing;  // NOLINT(google-build-using-namespace)
using Clock = std::chrono::steady_clock;

const std::string kRekindle = program(REKINDLE_BINARY);
const std::string kWorker = program(DEVICE_WORKER);

// A host that lacks what is spread, with the workers of a group on it and on the other host.
struct Keeper {
  std::string group, store;
  std::vector<std::string> arguments;
  std::unique_ptr<Process> agent;
  DeviceWorkers workers;
  std::vector<double> spread, total, whole;
  std::uint64_t kept = 0, bytes = 0;
  int version = 1;
};

Json holdings(const std::string& store) {
  const auto status = run({kRekindle, "status", "--json", "--store", store});
  const auto said = Json::parse(status.out, nullptr, false);
  return said.is_discarded() ? Json::array() : said["holdings"];
}

void wait_until_whole(const std::string& store, int version) {
  const bool done = eventually(
      [&] {
        const Json held = holdings(store);
        return std::ranges::any_of(held, [&](const Json& one) {
          return one["version"] == version && one["complete"] == true && one["whole"] == true;
        });
      },
      kLong);
  if (!done) give_up("no whole copy after the update");
}

// All copies of a version go at once.
void retire_all_but(const Keeper& keeper, int version) {
  std::set<int> others;
  for (const Json& one : holdings(keeper.store)) others.insert(one["version"].get<int>());
  others.erase(version);
  for (const int other : others) {
    const bool gone = eventually(  // it may still be committed
        [&] {
          const auto retired =
              run({kRekindle, "retire", fmt::format("m@{}", other), "--store", keeper.store});
          return retired.exit.code == 0;
        },
        kLong);
    if (!gone) give_up("retire: " + keeper.agent->err());
  }
}

void move_to(int version, const std::string& coordinator, Keeper& keeper, bool counts) {
  (void)slowest(keeper.workers, "limit");  // overwrites what is there
  const Json said = update_to(kRekindle, coordinator, version, keeper.group, keeper.workers);
  const auto over = Clock::now();
  wait_until_whole(keeper.store, version);
  const double later = std::chrono::duration<double>(Clock::now() - over).count();
  retire_all_but(keeper, version);
  if (!counts) return;
  keeper.spread.push_back(said["spread_ms"].get<double>() / 1e3);
  keeper.total.push_back(said["elapsed_ms"].get<double>() / 1e3);
  keeper.whole.push_back(later);
  for (const Json& member : said["members"]) {
    if (member["node"] != keeper.group) continue;
    keeper.kept += member["kept_bytes"].get<std::uint64_t>();
    keeper.bytes = member["bytes"].get<std::uint64_t>();
  }
}

void print(const Keeper& keeper, const char* what) {
  fmt::print(
      "  {:9} spreading {:.3f} s, all ready {:.3f} s; kept {:.0f} %, a whole copy {:.2f} s later\n",
      what, median(keeper.spread), median(keeper.total),
      100.0 * static_cast<double>(keeper.kept) /
          static_cast<double>(std::max<std::uint64_t>(1, keeper.bytes * keeper.spread.size())),
      median(keeper.whole));
}

}  // namespace

int main(int argc, char** argv) {
  const DeviceBenchOptions options = options_of(argc, argv, {.gib = 8, .gpus = 2});
  const TempDir directory(true);
  const std::string owner = directory / "owner";
  const std::uint64_t payload = make_model(
      directory / "model", static_cast<std::uint64_t>(options.gib * (1ull << 30)), options.tensors);
  std::string coordinator;
  const auto running = start_coordinator(kRekindle, directory / "state", coordinator);
  std::vector<std::string> common{
      "--gpu", options.kind == "double" ? fmt::format("double:{}", options.gpus) : "auto",
      "--coordinator", coordinator};
  if (!options.bucket.empty()) {
    common.insert(common.end(), {"--gpu-bucket", options.bucket + "MiB"});
  }
  const auto start = [&](const std::string& node, const std::string& store,
                         std::vector<std::string> more) {
    more.insert(more.end(), common.begin(), common.end());
    more.insert(more.end(), {"--node-id", node});
    return start_agent(kRekindle, store, more);
  };
  const auto agent = start("owner", owner, {});
  Keeper keepers[2] = {
      {.group = "keeps", .store = directory / "keeps", .arguments = {}},
      {.group = "not", .store = directory / "not", .arguments = {"--keep-rate", "0"}}};
  for (const char* version : {"m@1", "m@2"}) {  // the same files, so the same memory
    const auto published = run({kRekindle, "publish", version, directory / "model", "--store",
                                owner, "--coordinator", coordinator, "--quiet"},
                               kLong);
    if (published.exit.code != 0) give_up("publish: " + published.err);
    wait_until_pinned(kRekindle, owner, payload);
  }
  for (Keeper& keeper : keepers) {
    keeper.agent = start(keeper.group, keeper.store, keeper.arguments);
    for (std::size_t i = 0; i < options.gpus; ++i) {
      const bool here = i >= options.gpus / 2;
      keeper.workers.push_back(std::make_unique<DeviceWorker>(kWorker, here ? keeper.store : owner,
                                                              fmt::format("{}:{}", options.kind, i),
                                                              keeper.group));
      (void)keeper.workers.back()->answer();
    }
    (void)slowest(keeper.workers, "join");
    wait_until_whole(keeper.store, 1);
  }
  constexpr std::size_t kWarm = 2;  // updates until memory is pinned and communicators are made
  for (std::size_t block = 0; block < 2; ++block) {
    for (Keeper& keeper : keepers) {
      for (std::size_t i = 0; i < options.runs + kWarm; ++i) {
        keeper.version = 3 - keeper.version;
        move_to(keeper.version, coordinator, keeper, i >= kWarm);
      }
    }
  }
  fmt::print("{:.1f} GiB in {} tensors to {} x {} of two agents, {} updates of each\n", options.gib,
             options.tensors, options.gpus, options.kind, 2 * options.runs);
  print(keepers[0], "keeping");
  print(keepers[1], "not");
  fmt::print("  spreading takes {:.3f} x as long with it\n",
             median(keepers[0].spread) / median(keepers[1].spread));
  const std::uint64_t wrong = wrong_words(keepers[0].workers) + wrong_words(keepers[1].workers);
  fmt::print("  wrong words: {}\n", wrong);
  return wrong == 0 ? 0 : 1;
}
