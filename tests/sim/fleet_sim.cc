// fleet_sim [--seeds N] [--first SEED] [--seed SEED] [--bug NAME] [--list-bugs]
//
// Runs a fleet in virtual time with each seed. Without --bug every seed must pass; with it the
// mistake is seeded and must be found.
#include <charconv>
#include <cstdio>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <string_view>

#include "tests/sim/faulty_core.h"
#include "tests/sim/sim_fleet.h"

namespace rekindle::sim {
namespace {

const std::map<std::string, SeededBug> kBugs = {
    {"commit-without-all", SeededBug::kCommitWithoutAll},
    {"dead-offered", SeededBug::kDeadOffered},
    {"drained-offered", SeededBug::kDrainedOffered},
    {"epoch-not-raised", SeededBug::kEpochNotRaised},
    {"id-taken", SeededBug::kIdTaken},
    {"latest-goes-back", SeededBug::kLatestGoesBack},
    {"resolved-twice", SeededBug::kResolvedTwice},
    {"retired-under-readers", SeededBug::kRetiredUnderReaders},
    {"share-leaked", SeededBug::kShareLeakedAtClose},
    {"tombstone-forgotten", SeededBug::kTombstoneForgotten},
    {"two-recopies", SeededBug::kTwoRecopies},
};

struct Options {
  std::uint64_t seeds = 1000;
  std::uint64_t first = 0;
  // --seed: trace the run.
  bool one = false;
  std::string bug;
};

bool parse_number(std::string_view text, std::uint64_t& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size();
}

bool parse(int argc, char** argv, Options& options) {
  for (int i = 1; i < argc; ++i) {
    const std::string_view name = argv[i];
    if (name == "--list-bugs") {
      for (const auto& [bug, value] : kBugs) fmt::print("{}\n", bug);
      std::exit(0);
    }
    if (i + 1 == argc) return false;
    const std::string_view value = argv[++i];
    if (name == "--seeds") {
      if (!parse_number(value, options.seeds)) return false;
    } else if (name == "--first" && value == "random") {
      options.first = (std::uint64_t{std::random_device()()} << 32) | std::random_device()();
    } else if (name == "--first") {
      if (!parse_number(value, options.first)) return false;
    } else if (name == "--seed") {
      if (!parse_number(value, options.first)) return false;
      options.seeds = 1;
      options.one = true;
    } else if (name == "--bug" && kBugs.contains(std::string(value))) {
      options.bug = value;
    } else {
      return false;
    }
  }
  return true;
}

// The bug must be found: a simulation that cannot fail finds nothing.
int find_bug(const Options& options) {
  seeded_bug = kBugs.at(options.bug);
  for (std::uint64_t i = 0; i < options.seeds; ++i) {
    try {
      Fleet(options.first + i, options.one).run();
    } catch (const Violation& violation) {
      fmt::print("{}: found by seed {}, the {}th: {}\n", options.bug, options.first + i, i + 1,
                 violation.what());
      return 0;
    }
  }
  fmt::print("{}: not found by {} seeds from {}\n", options.bug, options.seeds, options.first);
  return 1;
}

int run_seeds(const Options& options) {
  Totals totals;
  for (std::uint64_t i = 0; i < options.seeds; ++i) {
    const std::uint64_t seed = options.first + i;
    try {
      totals += Fleet(seed, options.one).run();
    } catch (const std::exception& error) {
      fmt::print("seed {}: {}\nrepeat it with: fleet_sim --seed {}\n", seed, error.what(), seed);
      return 1;
    }
  }
  fmt::print("{} seeds from {}: {} steps, {} answers, {} copies, {} re-copies, {} commits\n",
             options.seeds, options.first, totals.steps, totals.answers, totals.copies,
             totals.recopies, totals.commits);
  if (options.seeds < 100) return 0;
  const bool alive = totals.answers > 100 * options.seeds && totals.copies > options.seeds &&
                     totals.recopies > options.seeds / 20 && totals.commits > options.seeds / 20;
  if (!alive) fmt::print("the world must not be all refusals\n");
  return alive ? 0 : 1;
}

}  // namespace
}  // namespace rekindle::sim

int main(int argc, char** argv) {
  rekindle::sim::Options options;
  if (!rekindle::sim::parse(argc, argv, options)) {
    std::fputs(
        "usage: fleet_sim [--seeds N] [--first SEED|random] [--seed SEED] [--bug NAME] "
        "[--list-bugs]\n",
        stderr);
    return 2;
  }
  return options.bug.empty() ? rekindle::sim::run_seeds(options) : rekindle::sim::find_bug(options);
}
