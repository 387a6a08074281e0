// How long it takes until the agent knows that a worker has died: from kill() to the callback, the
// worker holding memory of 4 KiB pages. `abort` dumps core where the machine does (ulimit -c, and
// a directory with room); `pidfd` shows what the backstop alone would take.
//   life_bench [--runs N] [--mib N] [--how kill|abort|pidfd]
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fmt/format.h>

#include "src/base/clock.h"
#include "src/ipc/life.h"

namespace {

using namespace rekindle;  // NOLINT(google-build-using-namespace)

struct Options {
  int runs = 50;
  std::size_t mib = 1024;
  std::string how = "kill";
};

struct Seen {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::uint64_t, std::pair<TimePoint, ipc::DeathSign>> deaths;
};

[[noreturn]] void be_a_worker(const ipc::LifePage& page, const Options& options, int ready) {
  ::alarm(120);
  if (options.how == "abort") {
    const rlimit unlimited{RLIM_INFINITY, RLIM_INFINITY};
    ::setrlimit(RLIMIT_CORE, &unlimited);
  }
  const std::size_t bytes = options.mib << 20;
  void* const memory =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) ::_exit(1);
  ::madvise(memory, bytes, MADV_NOHUGEPAGE);
  std::memset(memory, 0x5a, bytes);
  std::unique_ptr<ipc::LifeHold> hold;
  if (options.how != "pidfd") {
    auto opened = ipc::LifePage::open(UniqueFd(::dup(page.fd())));
    if (!opened) ::_exit(1);
    auto held = ipc::LifeHold::start(std::move(*opened));
    if (!held) ::_exit(1);
    hold = std::move(*held);
  }
  if (::write(ready, "r", 1) != 1) ::_exit(1);
  while (true) ::pause();
}

// Milliseconds from the signal to the callback.
double one_run(ipc::LifeWatch& watch, Seen& seen, std::uint64_t number, const Options& options,
               ipc::DeathSign& sign) {
  auto page = std::move(*ipc::LifePage::create());
  int ready[2];
  if (::pipe(ready) != 0) std::exit(1);
  const pid_t child = ::fork();
  if (child == 0) be_a_worker(*page, options, ready[1]);
  ::close(ready[1]);
  char byte;
  if (::read(ready[0], &byte, 1) != 1) {
    fmt::print(stderr, "the worker did not come up: is there memory for --mib {}?\n", options.mib);
    std::exit(1);
  }
  ::close(ready[0]);
  ipc::Peer peer{child, ::geteuid(),
                 UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, child, 0)))};
  if (!watch.add(number, std::move(page), std::move(peer))) std::exit(1);
  ::usleep(static_cast<useconds_t>(50'000 + 1000 * (number % 23)));  // at any phase of its looks
  const TimePoint begin = SteadyClock().now();
  ::kill(child, options.how == "abort" ? SIGABRT : SIGKILL);
  std::unique_lock lock(seen.mutex);
  if (!seen.changed.wait_for(lock, std::chrono::seconds(60),
                             [&] { return seen.deaths.count(number) != 0; })) {
    fmt::print(stderr, "a death was not seen\n");
    std::exit(1);
  }
  const auto [end, how] = seen.deaths[number];
  lock.unlock();
  sign = how;
  ::waitpid(child, nullptr, 0);
  return seconds(end - begin) * 1000;
}

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    if (name == "--runs") options.runs = std::atoi(argv[i + 1]);
    if (name == "--mib") options.mib = static_cast<std::size_t>(std::atoll(argv[i + 1]));
    if (name == "--how") options.how = argv[i + 1];
  }
  return options;
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = parse(argc, argv);
  Seen seen;
  auto watch = ipc::LifeWatch::start([&](const ipc::Death& death) {
    const TimePoint now = SteadyClock().now();
    const std::lock_guard lock(seen.mutex);
    seen.deaths[death.worker] = {now, death.sign};
    seen.changed.notify_all();
  });
  if (!watch) return 1;
  std::vector<double> times;
  std::map<std::string, int> signs;
  for (int i = 0; i < options.runs; ++i) {
    ipc::DeathSign sign{};
    times.push_back(one_run(**watch, seen, static_cast<std::uint64_t>(i), options, sign));
    ++signs[std::string(ipc::to_string(sign))];
  }
  std::sort(times.begin(), times.end());
  const auto at = [&](double part) {
    return times[std::min(times.size() - 1,
                          static_cast<std::size_t>(part * static_cast<double>(times.size())))];
  };
  fmt::print("{} of {} MiB, {} runs: p50 {:.2f} ms, p99 {:.2f} ms, max {:.2f} ms; seen by",
             options.how, options.mib, options.runs, at(0.5), at(0.99), times.back());
  for (const auto& [name, count] : signs) fmt::print(" {} {}", name, count);
  fmt::print("\n");
  return 0;
}
