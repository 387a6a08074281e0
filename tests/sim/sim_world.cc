#include "tests/sim/sim_world.h"

namespace rekindle::sim {

ProcessId World::add_process() {
  processes_.emplace_back();
  return processes_.size() - 1;
}

void World::start(ProcessId process) {
  ++processes_[process].life;
  processes_[process].running = true;
  processes_[process].paused_until = {};
}

void World::kill(ProcessId process) {
  processes_[process].running = false;
  ++processes_[process].life;
  processes_[process].parked.clear();
}

void World::pause(ProcessId process, Duration duration) {
  processes_[process].paused_until = std::max(processes_[process].paused_until, now() + duration);
}

void World::run_in_life(ProcessId process, std::uint64_t life, std::function<void()> run) {
  Process& state = processes_[process];
  if (!state.running || state.life != life) return;
  if (state.paused_until <= now() && state.parked.empty()) return run();
  // An event that comes while others wait for the end of the pause comes after them.
  state.parked.push_back({life, std::move(run)});
  if (state.parked.size() == 1)
    after(state.paused_until - now(), [this, process] { wake(process); });
}

void World::wake(ProcessId process) {
  Process& state = processes_[process];
  if (state.paused_until > now()) {
    return after(state.paused_until - now(), [this, process] { wake(process); });
  }
  while (!state.parked.empty() && state.paused_until <= now()) {
    const Parked next = std::move(state.parked.front());
    state.parked.pop_front();
    if (state.running && state.life == next.life) next.run();
  }
  if (!state.parked.empty()) after(state.paused_until - now(), [this, process] { wake(process); });
}

void World::in_process(ProcessId process, Duration delay, std::function<void()> run) {
  after(delay, [this, process, life = processes_[process].life, run = std::move(run)]() mutable {
    run_in_life(process, life, std::move(run));
  });
}

void World::deliver(ProcessId to, Duration delay, std::function<void()> run) {
  after(delay, [this, to, run = std::move(run)]() mutable {
    run_in_life(to, processes_[to].life, std::move(run));
  });
}

void World::send(ProcessId from, ProcessId to, std::function<void()> run) {
  if (cuts_.contains({from, to})) return;
  const auto delay = [this] {
    return calm_ || chance(80) ? between(50us, 3ms) : between(1ms, 1200ms);
  };
  if (!calm_ && chance(loss_percent_)) return;
  if (!calm_ && chance(3)) deliver(to, delay(), run);
  deliver(to, delay(), std::move(run));
}

void World::cut(ProcessId from, ProcessId to, bool is_cut) {
  if (is_cut) {
    cuts_.insert({from, to});
  } else {
    cuts_.erase({from, to});
  }
}

void World::heal() {
  cuts_.clear();
  calm_ = true;
  for (ProcessId process = 0; process < processes_.size(); ++process) {
    processes_[process].paused_until = {};
    wake(process);
  }
}

}  // namespace rekindle::sim
