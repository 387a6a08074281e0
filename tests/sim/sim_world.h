#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "src/base/clock.h"
#include "src/base/ids.h"
#include "src/base/result.h"
#include "tests/support/virtual_time.h"

// Virtual time, processes that die, pause and come back, and a network that loses, delays, reorders
// and repeats messages. Everything follows from the seed.
namespace rekindle::sim {

using namespace std::chrono_literals;

// A rule that must always hold is broken.
struct Violation : std::runtime_error {
  using std::runtime_error::runtime_error;
};
template <typename... Args>
void require(bool holds, fmt::format_string<Args...> format, Args&&... args) {
  if (!holds) throw Violation(fmt::format(format, std::forward<Args>(args)...));
}

using ProcessId = std::size_t;

class World {
 public:
  explicit World(std::uint64_t seed) : random_(seed) {}
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  TimePoint now() const { return time_.now(); }
  std::uint64_t pick(std::uint64_t below) { return random_() % below; }
  bool chance(int percent) { return pick(100) < static_cast<std::uint64_t>(percent); }
  Duration between(Duration least, Duration most) {
    return least + Duration(static_cast<Duration::rep>(
                       pick(static_cast<std::uint64_t>((most - least).count()) + 1)));
  }
  template <typename Id>
  Id id() {
    Id id;
    for (auto& byte : id.bytes) byte = static_cast<std::uint8_t>(random_());
    return id;
  }

  void after(Duration delay, std::function<void()> run) { time_.after(delay, std::move(run)); }
  // Runs the next event; false: none is left before `end`, and it is `end` now.
  bool step(TimePoint end) { return time_.step(end); }
  std::uint64_t steps() const { return time_.steps(); }

  ProcessId add_process();
  void start(ProcessId process);
  void kill(ProcessId process);
  void pause(ProcessId process, Duration duration);
  bool running(ProcessId process) const { return processes_[process].running; }
  // In this life of the process only; an event that falls into a pause comes at its end.
  void in_process(ProcessId process, Duration delay, std::function<void()> run);

  // One way. It reaches `to` in whatever life that has then.
  void send(ProcessId from, ProcessId to, std::function<void()> deliver);
  // Both ways. `done` gets the answer or kTimeout, in this life of the caller only. A request may
  // be served twice. `serve` returns nothing when the server dies in the call.
  template <typename T>
  void call(ProcessId from, ProcessId to, Duration deadline,
            std::function<std::optional<Result<T>>()> serve, std::function<void(Result<T>)> done);

  // The same for a server that answers later. It may never call the reply that it gets.
  template <typename T>
  using Reply = std::function<void(Result<T>)>;
  template <typename T>
  void call_later(ProcessId from, ProcessId to, Duration deadline,
                  std::function<void(Reply<T>)> serve, std::function<void(Result<T>)> done);

  void cut(ProcessId from, ProcessId to, bool is_cut);
  // Makes the network whole and calm for good.
  void heal();
  bool calm() const { return calm_; }
  void set_loss(int percent) { loss_percent_ = percent; }

  void set_verbose(bool verbose) { verbose_ = verbose; }
  template <typename... Args>
  void trace(fmt::format_string<Args...> format, Args&&... args) const {
    if (!verbose_) return;
    fmt::print("{:10.3f} {}\n", seconds(now().time_since_epoch()) - 3600,
               fmt::format(format, std::forward<Args>(args)...));
  }

 private:
  struct Parked {
    std::uint64_t life;
    std::function<void()> run;
  };
  struct Process {
    std::uint64_t life = 0;
    bool running = false;
    TimePoint paused_until{};
    // Events that came in a pause.
    std::deque<Parked> parked;
  };
  void wake(ProcessId process);
  void deliver(ProcessId to, Duration delay, std::function<void()> run);
  void run_in_life(ProcessId process, std::uint64_t life, std::function<void()> run);

  std::mt19937_64 random_;
  rekindle::testing::VirtualTime time_;
  std::vector<Process> processes_;
  std::set<std::pair<ProcessId, ProcessId>> cuts_;
  int loss_percent_ = 2;
  bool calm_ = false;
  bool verbose_ = false;
};

template <typename T>
void World::call_later(ProcessId from, ProcessId to, Duration deadline,
                       std::function<void(Reply<T>)> serve, std::function<void(Result<T>)> done) {
  const std::uint64_t life = processes_[from].life;
  auto finished = std::make_shared<bool>(false);
  auto finish = [finished, done = std::move(done)](Result<T> result) {
    if (!std::exchange(*finished, true)) done(std::move(result));
  };
  in_process(from, deadline, [finish] { finish(fail(ErrorCode::kTimeout, "no answer")); });
  send(from, to, [this, from, to, life, serve = std::move(serve), finish] {
    serve([this, from, to, life, finish](Result<T> answer) {
      send(to, from, [this, from, life, finish, answer = std::move(answer)] {
        if (processes_[from].life == life) finish(answer);
      });
    });
  });
}

template <typename T>
void World::call(ProcessId from, ProcessId to, Duration deadline,
                 std::function<std::optional<Result<T>>()> serve,
                 std::function<void(Result<T>)> done) {
  call_later<T>(
      from, to, deadline,
      [serve = std::move(serve)](const Reply<T>& reply) {
        if (auto answer = serve()) reply(std::move(*answer));
      },
      std::move(done));
}

}  // namespace rekindle::sim
