// Many pullers connect to one source at once, on scripted devices: what a handshake costs this
// program, and what a connection keeps. Beside it the same queue pairs alone, which is the limit
// here; a real NIC takes longer for them than all of this.
//   verbs_connect_bench [--peers N] [--threads N] [--queue-pairs N]
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <unistd.h>

#include <fmt/format.h>

#include "src/base/units.h"
#include "tests/support/allocation_meter.h"
#include "tests/verbs/fake_verbs.h"
#include "tests/verbs/verbs_hosts.h"
#include "transport/verbs/link/verbs_connection.h"

namespace rekindle::transport::verbs {
namespace {

using Clock = std::chrono::steady_clock;

struct Options {
  std::size_t peers = 256;
  std::size_t threads = 16;
  std::size_t queue_pairs = 2;
};

std::int64_t resident_bytes() {
  std::ifstream statm("/proc/self/statm");
  std::int64_t size = 0, resident = 0;
  statm >> size >> resident;
  return resident * ::sysconf(_SC_PAGESIZE);
}

struct Usage {
  std::int64_t resident = resident_bytes();
  std::int64_t allocated = rekindle::testing::allocations::live_bytes();
  TimePoint at = Clock::now();
};

void print(const char* what, const Options& options, const Usage& before, const Usage& after) {
  const double seconds = std::chrono::duration<double>(after.at - before.at).count();
  const auto each = [&](std::int64_t bytes) {
    return bytes / static_cast<std::int64_t>(options.peers);
  };
  fmt::print("{:<24} {:>8.0f}/s  {:>6.1f} ms  resident {:>7} B each  allocated {:>7} B each\n",
             what, static_cast<double>(options.peers) / seconds, seconds * 1e3,
             each(after.resident - before.resident), each(after.allocated - before.allocated));
}

// work(i) for every peer, on all threads.
template <typename Work>
void at_once(const Options& options, const Work& work) {
  std::atomic<std::size_t> next = 0;
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < options.threads; ++i) {
    threads.emplace_back([&] {
      for (std::size_t peer = next++; peer < options.peers; peer = next++) work(peer);
    });
  }
  for (auto& thread : threads) thread.join();
}

struct Hosts {
  Hosts() {
    source_api.add_device({.name = "mlx5_0"});
    puller_api.add_device({.name = "mlx5_0"});
  }
  FakeNetwork network;
  FakeVerbs source_api{network, "source"}, puller_api{network, "puller"};
};

// What both ends need of their devices for one peer, and no more.
void bare(const Options& options) {
  Hosts hosts;
  const auto source = VerbsSource::open(hosts.source_api, {});
  const auto puller = VerbsSource::open(hosts.puller_api, {});
  std::vector<std::unique_ptr<Connection>> made(2 * options.peers);
  const Usage before;
  at_once(options, [&](std::size_t peer) {
    ConnectionOptions ends{.queue_pairs = options.queue_pairs};
    ends.max_sge = 16;
    auto here = Connection::create(*puller->rails().front(), ends).value();
    auto there = Connection::create(*source->rails().front(), ends).value();
    const auto address = [](const Connection& end) { return end.rail().state().address; };
    if (!here->connect({address(*there), 4096, 16, there->ends()}, ConnectionRole::kReads) ||
        !there->connect({address(*here), 4096, 16, here->ends()}, ConnectionRole::kServes)) {
      throw std::runtime_error("queue pairs do not connect");
    }
    made[2 * peer] = std::move(here);
    made[2 * peer + 1] = std::move(there);
  });
  print("bare queue pairs", options, before, {});
}

// Each peer with a session of its own: offer, answer, windows, first reads, a path.
void handshakes(const Options& options) {
  Hosts hosts;
  const testing::TestSegment segment(64 * kMiB);
  VerbsSource source(hosts.source_api, {}, {}, {.registration_patience = std::chrono::seconds(10)});
  VerbsPuller puller(hosts.puller_api, {}, {.queue_pairs = options.queue_pairs});
  const RegionKey key = source.serve(segment);
  {
    auto warm = puller.connect(source, source.admit({key}));  // registration, bounce buffers
    if (!warm) throw std::runtime_error(warm.error().message());
  }
  std::vector<Paths> paths(options.peers);
  const Usage before;
  at_once(options, [&](std::size_t peer) {
    auto made = puller.connect(source, source.admit({key}));
    if (!made) throw std::runtime_error(made.error().message());
    paths[peer] = std::move(*made);
  });
  print("handshakes", options, before, {});
}

std::size_t number(const char* text) {
  const long value = std::strtol(text, nullptr, 10);
  if (value < 1) throw std::invalid_argument(fmt::format("'{}' is not a number above 0", text));
  return static_cast<std::size_t>(value);
}

int run(int argc, char** argv) {
  Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    if (name == "--peers") options.peers = number(argv[i + 1]);
    if (name == "--threads") options.threads = number(argv[i + 1]);
    if (name == "--queue-pairs") options.queue_pairs = number(argv[i + 1]);
  }
  fmt::print("{} peers, {} threads, {} queue pairs each; both ends in this process, on fakes\n",
             options.peers, options.threads, options.queue_pairs);
  bare(options);
  handshakes(options);
  return 0;
}

}  // namespace
}  // namespace rekindle::transport::verbs

int main(int argc, char** argv) {
  try {
    return rekindle::transport::verbs::run(argc, argv);
  } catch (const std::exception& error) {
    fmt::print(stderr, "verbs_connect_bench: {}\n", error.what());
    return 1;
  }
}
