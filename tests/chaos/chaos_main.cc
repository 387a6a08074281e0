// Random faults to a fleet of real processes for a while, then quiet. At every step: no worker was
// ever ready with a wrong byte, and nothing ended by itself. At the end: every worker serves the
// newest version, and neither descriptor nor mapping, file or process is left over.
//   chaos [--seed N] [--seconds N] [--hosts N] [--keep DIR]
// A failing run prints its seed; the order of faults is the same in a repeated run, what the
// processes do between them need not be.
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>

#include "tests/chaos/faults.h"
#include "tests/chaos/leaks.h"
#include "tests/chaos/world.h"

namespace rekindle::testing::chaos {
namespace {

constexpr milliseconds kSettle{90'000};  // from the last mending on, on a loaded machine
constexpr int kSkipped = 77;
constexpr int kRounds = 4;  // of workers killed, to find what leaks

struct Options {
  std::uint64_t seed = 1;
  int seconds = 20;
  int hosts = 4;
  std::filesystem::path keep;
};

Options options_of(int argc, char** argv) {
  Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    if (name == "--seed")
      options.seed = std::stoull(argv[i + 1]);
    else if (name == "--seconds")
      options.seconds = std::stoi(argv[i + 1]);
    else if (name == "--hosts")
      options.hosts = std::stoi(argv[i + 1]);
    else if (name == "--keep")
      options.keep = argv[i + 1];
    else
      throw std::invalid_argument("unknown option " + name);
  }
  if (argc % 2 == 0) throw std::invalid_argument("an option without a value");
  return options;
}

void expect(bool fact, const std::string& otherwise) {
  if (!fact) throw std::runtime_error(otherwise);
}

void expect_all_serve(World& world, const std::string& version) {
  std::string late;
  const bool done = eventually(
      [&] {
        world.judge();
        late.clear();
        for (const Host& host : world.hosts()) {
          if (host.serving != version) late += " " + host.name + " (" + host.serving + ")";
        }
        return late.empty();
      },
      kSettle);
  expect(done, "these workers do not serve " + version + " after all faults have ended:" + late);
}

void expect_nothing_unfinished(World& world) {
  for (const Host& host : world.hosts()) {
    std::vector<std::string> left;
    const bool clean =
        eventually([&] { return (left = unfinished_files(host.store)).empty(); }, kSettle);
    expect(clean, "host " + host.name + " keeps " + (left.empty() ? "" : left.front()));
  }
}

// A leak of each death shows as many times as workers died.
void expect_no_growth(World& world, const std::string& version) {
  std::vector<Holdings> before;
  for (Host& host : world.hosts()) before.push_back(holdings_of(host.agent->pid()));
  for (int round = 0; round < kRounds; ++round) {
    for (Host& host : world.hosts()) {
      world.kill_worker(host);
      host.serving.clear();
    }
    expect_all_serve(world, version);
  }
  for (std::size_t i = 0; i < before.size(); ++i) {
    Host& host = world.hosts()[i];
    Holdings now;
    const bool same = eventually(
        [&] {
          now = holdings_of(host.agent->pid());
          return now.descriptors < before[i].descriptors + kRounds &&
                 now.mappings < before[i].mappings + kRounds &&
                 now.threads < before[i].threads + kRounds;
        },
        kSettle);
    expect(same, "agent " + host.name + " went from " + std::to_string(before[i].descriptors) +
                     " descriptors, " + std::to_string(before[i].mappings) + " mappings, " +
                     std::to_string(before[i].threads) + " threads to " +
                     std::to_string(now.descriptors) + ", " + std::to_string(now.mappings) + ", " +
                     std::to_string(now.threads));
  }
}

void expect_orderly_end(World& world) {
  for (Host& host : world.hosts()) {
    host.supervisor->signal(SIGTERM);
    expect(host.supervisor->wait().has_value(), "rekindle run of " + host.name + " does not end");
    host.supervisor.reset();
  }
  for (Host& host : world.hosts()) {
    host.agent->signal(SIGTERM);
    const auto exit = host.agent->wait();
    expect(exit && exit->code == 0, "agent " + host.name + " does not end in order");
    host.agent.reset();
  }
  world.coordinator().signal(SIGTERM);
  const auto exit = world.coordinator().wait();
  expect(exit && exit->code == 0, "the coordinator does not end in order");
  std::vector<std::string> left;
  const bool gone =
      eventually([&] { return (left = processes_that_name(world.directory())).empty(); });
  expect(gone, "a process is left: " + (left.empty() ? "" : left.front()));
}

void break_and_judge(const Options& options, World& world) {
  world.start_coordinator();
  for (Host& host : world.hosts()) world.start_agent(host);
  expect(world.publish(1, kSettle), "m@1 could not be published");
  for (Host& host : world.hosts()) world.start_worker(host);

  Faults faults(world, options.seed);
  std::mt19937_64 pauses(options.seed + 1);
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(options.seconds);
  while (std::chrono::steady_clock::now() < end) {
    faults.step();
    std::this_thread::sleep_for(milliseconds(100 + pauses() % 500));
    world.judge();
  }
  faults.heal();

  const std::string newest = "m@" + std::to_string(faults.newest_version());
  expect(eventually([&] { return world.publish(faults.newest_version(), kSettle); }, kSettle),
         newest + " could not be published though all faults have ended");
  expect_all_serve(world, newest);
  expect_nothing_unfinished(world);
  expect_no_growth(world, newest);
  expect_orderly_end(world);
  for (const auto& [what, count] : faults.counts()) std::printf("%5d  %s\n", count, what.c_str());
}

int main_of(int argc, char** argv) {
  const Options options = options_of(argc, argv);
  if (!user_namespaces()) {
    std::printf("skipped: no user namespaces here\n");
    return kSkipped;
  }
  World world(options.hosts, options.keep);
  try {
    break_and_judge(options, world);
  } catch (const std::exception& error) {
    std::printf("FAILED: %s\nagain: chaos --seed %llu --seconds %d --hosts %d\n", error.what(),
                static_cast<unsigned long long>(options.seed), options.seconds, options.hosts);
    world.keep_logs();
    return 1;
  }
  std::printf("seed %llu: every worker serves the newest version\n",
              static_cast<unsigned long long>(options.seed));
  return 0;
}

}  // namespace
}  // namespace rekindle::testing::chaos

int main(int argc, char** argv) {
  try {
    return rekindle::testing::chaos::main_of(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "chaos: %s\n", error.what());
    return 2;
  }
}
