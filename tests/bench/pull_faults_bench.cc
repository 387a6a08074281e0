// What a pull notices of a source or a coordinator that goes in the middle: two sources, real
// processes on loopback. Progress is the number of tiles marked in the resume file, looked at every
// 2 ms, so that a stall is the longest time in which nothing verified.
//   pull_faults_bench [--mib N] [--rate BYTES] [--rounds N]
#include <algorithm>
#include <charconv>
#include <csignal>
#include <cstring>
#include <fstream>
#include <functional>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "tests/support/fleet.h"

namespace rekindle::testing {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr std::size_t kTileCountAt = 40;  // in the resume file; see src/store/resume_file.cc
constexpr std::size_t kBitmapAt = 64;
constexpr auto kLook = 2ms;
constexpr auto kLongest = std::chrono::minutes(5);

struct Options {
  int mib = 512;
  std::string rate = "64MB";  // of each source
  int rounds = 3;
};

double seconds_of(Clock::duration time) { return std::chrono::duration<double>(time).count(); }

struct Marked {
  std::uint64_t tiles = 0;
  std::uint64_t of = 0;
};

Marked read_marked(const fs::path& resume_file) {
  std::ifstream file(resume_file, std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  Marked marked;
  if (bytes.size() < kBitmapAt) return marked;
  std::memcpy(&marked.of, bytes.data() + kTileCountAt, sizeof marked.of);
  for (std::uint64_t tile = 0; tile < marked.of && kBitmapAt + tile / 8 < bytes.size(); ++tile) {
    const auto byte = static_cast<unsigned char>(bytes[kBitmapAt + tile / 8]);
    marked.tiles += (byte >> (tile % 8)) & 1u;
  }
  return marked;
}

struct Measured {
  double rate = 0;     // bytes per second, from the fault (half of all tiles) to nine tenths
  double stall_s = 0;  // longest time without a tile in that part
  std::int64_t landed_twice = 0;
  std::int64_t rejected = 0;
};

class Bench {
 public:
  explicit Bench(const Options& options) : options_(options) {
    fleet_.start_coordinator();
    bytes_ = make_checkpoint(fleet_.dir("model"), options.mib / 8, 4096, 5);
  }

  using Fault = std::function<void(Fleet&)>;
  Measured pull(const Fault& fault) {
    for (const std::string name : {"a", "b"}) {
      fleet_.start_agent(name, {"--max-rate", options_.rate});
      fleet_.publish(name, "m@1", fleet_.dir("model"));
    }
    const auto& joiner = fleet_.start_agent("joiner");
    Process pull(
        fleet_.command({"pull", "m@1", "--store", joiner.store.string(), "--transport", "tcp"}));
    Measured measured = watch(pull, joiner.store, fault);
    const auto exit = pull.wait(60'000ms);
    const auto answer = Fleet::answer_of({exit.value_or(Exit{}), !exit, pull.out(), pull.err()});
    if (answer.exit_code != 0) throw std::runtime_error("the pull failed: " + answer.err);
    const auto manifest = find_file(joiner.store / "models", "rekindle.manifest");
    const auto differs = compare_checkpoints(fleet_.dir("model"), manifest.parent_path());
    if (!differs.empty()) throw std::runtime_error(differs);
    measured.landed_twice =
        answer.json["fetched_bytes"].get<std::int64_t>() - answer.json["bytes"].get<std::int64_t>();
    measured.rejected = answer.json["refetched_bytes"].get<std::int64_t>();
    for (const std::string name : {"a", "b", "joiner"}) {
      fleet_.agent(name).process->kill();
      fs::remove_all(fleet_.dir("store-" + name));
    }
    return measured;
  }

  Fleet& fleet() { return fleet_; }

 private:
  Measured watch(Process& pull, const fs::path& store, const Fault& fault) {
    const auto give_up = Clock::now() + kLongest;
    fs::path resume_file;
    std::optional<Clock::time_point> began;
    std::uint64_t at_begin = 0;
    Marked last;
    Clock::time_point last_news;
    Clock::duration stall{};
    while (pull.running() && Clock::now() < give_up) {
      std::this_thread::sleep_for(kLook);
      if (resume_file.empty()) {
        resume_file = find_resume_file(store);
        continue;
      }
      const Marked marked = read_marked(resume_file);
      const auto now = Clock::now();
      if (began && marked.tiles > last.tiles) {
        stall = std::max(stall, now - std::exchange(last_news, now));
      }
      if (marked.tiles > 0) last = marked;
      if (!began && last.tiles > 0 && last.tiles * 2 >= last.of) {
        if (fault) fault(fleet_);
        began = last_news = Clock::now();
        at_begin = last.tiles;
      }
      if (began && last.tiles * 10 >= last.of * 9) {
        const auto tiles = static_cast<double>(last.tiles - at_begin);
        const double bytes = tiles * static_cast<double>(bytes_) / static_cast<double>(last.of);
        return {bytes / seconds_of(now - *began), seconds_of(stall), 0, 0};
      }
    }
    throw std::runtime_error("the pull ended before it was measured: " + pull.err());
  }

  // Empty while there is none; directories come and go as it is looked for.
  static fs::path find_resume_file(const fs::path& store) {
    try {
      return find_file(store / "models", "rekindle.resume");
    } catch (const std::exception&) {
      return {};
    }
  }

  const Options options_;
  Fleet fleet_;
  std::uint64_t bytes_ = 0;
};

void report(const char* what, std::vector<Measured> rounds) {
  std::vector<double> rates, stalls_ms;
  std::int64_t landed_twice = 0;
  std::int64_t rejected = 0;
  for (const auto& round : rounds) {
    rates.push_back(round.rate / 1e6);
    stalls_ms.push_back(round.stall_s * 1e3);
    landed_twice = std::max(landed_twice, round.landed_twice);
    rejected = std::max(rejected, round.rejected);
  }
  std::sort(rates.begin(), rates.end());
  std::sort(stalls_ms.begin(), stalls_ms.end());
  const std::size_t middle = rounds.size() / 2;
  fmt::print(
      "{:<28} {:>6.1f} MB/s   longest stall {:>5.0f} ms, worst round {:>5.0f} ms   landed twice {} "
      "B   "
      "rejected {} B\n",
      what, rates[middle], stalls_ms[middle], stalls_ms.back(), landed_twice, rejected);
}

int run_bench(const Options& options) {
  Bench bench(options);
  std::vector<Measured> undisturbed, without_coordinator, source_killed, source_frozen;
  for (int round = 0; round < options.rounds; ++round) {
    undisturbed.push_back(bench.pull({}));
    without_coordinator.push_back(bench.pull([](Fleet& fleet) { fleet.coordinator().kill(); }));
    bench.fleet().start_coordinator();
    source_killed.push_back(bench.pull([](Fleet& fleet) { fleet.agent("a").process->kill(); }));
    source_frozen.push_back(
        bench.pull([](Fleet& fleet) { fleet.agent("a").process->signal(SIGSTOP); }));
  }
  fmt::print(
      "{} MiB from two sources of {}/s each, {} rounds: medians of what came after the fault\n",
      options.mib, options.rate, options.rounds);
  report("undisturbed", undisturbed);
  report("coordinator killed half-way", without_coordinator);
  report("one source killed half-way", source_killed);
  report("one source frozen half-way", source_frozen);
  return 0;
}

}  // namespace
}  // namespace rekindle::testing

int main(int argc, char** argv) {
  rekindle::testing::Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string_view name = argv[i];
    const std::string_view value = argv[i + 1];
    int* number = name == "--mib" ? &options.mib : name == "--rounds" ? &options.rounds : nullptr;
    if (name == "--rate") {
      options.rate = value;
    } else if (number == nullptr ||
               std::from_chars(value.data(), value.data() + value.size(), *number).ec !=
                   std::errc() ||
               *number < 1) {
      fmt::print(stderr, "usage: {} [--mib N] [--rate BYTES] [--rounds N]\n", argv[0]);
      return 2;
    }
  }
  try {
    return rekindle::testing::run_bench(options);
  } catch (const std::exception& error) {
    fmt::print(stderr, "pull_faults_bench: {}\n", error.what());
    return 1;
  }
}
