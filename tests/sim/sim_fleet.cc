#include "tests/sim/sim_fleet.h"

#include <algorithm>

namespace rekindle::sim {

namespace {

constexpr const char* kModels[] = {"m", "n"};
constexpr std::uint64_t kVersions = 5;
constexpr std::uint32_t kWorld = 2;

}  // namespace

Totals& Totals::operator+=(const Totals& other) {
  steps += other.steps;
  answers += other.answers;
  copies += other.copies;
  recopies += other.recopies;
  commits += other.commits;
  return *this;
}

Limits Fleet::make_limits(World& world) {
  Limits limits;
  limits.max_pullers_per_source = 2 + world.pick(2);
  limits.max_sources_per_pull = 3 + world.pick(2);
  limits.replicas = static_cast<std::uint32_t>(world.pick(3));
  return limits;
}

Fleet::Fleet(std::uint64_t seed, bool verbose)
    : world_(seed), coordinator_(world_, make_limits(world_)) {
  world_.set_verbose(verbose);
  const std::size_t count = 3 + world_.pick(3);
  const bool racks = world_.chance(50);
  for (std::size_t i = 0; i < count; ++i) {
    agents_.push_back(std::make_unique<SimAgent>(
        world_, coordinator_, agents_, fmt::format("n{}", i),
        racks ? fmt::format("rack{}", i % 3) : "", kVersionBytes * (2 + world_.pick(5))));
  }
  if (world_.chance(30)) {
    agents_.push_back(
        std::make_unique<SimAgent>(world_, coordinator_, agents_, "n0", "", kVersionBytes * 2));
    impostor_ = agents_.back().get();
  }
  may_lose_state_ = world_.chance(10);
  has_instance_ = world_.chance(60);
  if (world_.chance(30)) coordinator_.set_disk_faults(3, 1);
}

Totals Fleet::run() {
  coordinator_.start();
  for (const auto& agent : agents_) agent->start();
  world_.after(world_.between(0ms, 500ms), [this] { act(); });
  run_for(world_.between(15s, 40s));
  heal();
  const bool long_calm = world_.chance(12);
  // Leases of lost pulls end.
  run_for(13s);
  for (int i = 0; i < 4; ++i) {
    for (const auto& agent : agents_) {
      if (agent->running()) agent->pull("m", std::nullopt);
    }
    run_for(3s);
  }
  if (long_calm) run_for(180s);
  settle();
  if (long_calm) check_replicas();
  Totals totals;
  totals.steps = world_.steps();
  totals.answers = coordinator_.answers();
  totals.recopies = coordinator_.core()->replicas().assigned_count();
  for (const auto& agent : agents_) {
    totals.copies += agent->store().size();
    if (agent->instance_state() == InstanceState::kCommitted) ++totals.commits;
  }
  return totals;
}

// Gives the work that is under way the time to end.
void Fleet::settle() {
  for (int i = 0; i < 50; ++i) {
    try {
      check_recovered();
      return;
    } catch (const Violation&) {
      run_for(100ms);
    }
  }
  check_recovered();
}

void Fleet::run_for(Duration duration) {
  const TimePoint end = world_.now() + duration;
  while (world_.step(end)) coordinator_.check();
}

ModelVersion Fleet::some_version() {
  return {kModels[world_.pick(4) == 0 ? 1 : 0], 1 + world_.pick(kVersions)};
}

void Fleet::act() {
  if (healed_) return;
  // Its disk may have killed it. An operator starts it again.
  if (coordinator_.core() == nullptr && world_.chance(10)) coordinator_.start();
  if (world_.chance(75)) {
    work();
  } else {
    break_something();
  }
  world_.after(world_.between(20ms, 400ms), [this] { act(); });
}

void Fleet::work() {
  SimAgent& agent = some_agent();
  if (!agent.running()) return;
  const ModelVersion id = some_version();
  switch (world_.pick(12)) {
    case 0:
    case 1: {
      std::optional<std::uint32_t> replicas;
      if (world_.chance(30)) replicas = static_cast<std::uint32_t>(world_.pick(4));
      world_.trace("{} publishes {}", agent.name(), id.to_string());
      return agent.publish(id, replicas);
    }
    case 2:
      if (!world_.chance(30)) return;
      world_.trace("{} asks to retire {}", agent.name(), id.to_string());
      return agent.retire(id);
    case 3: {
      if (!world_.chance(40)) return;
      const bool drained = world_.chance(50);
      const SimAgent& other = some_agent();
      world_.trace("{} asks to {}drain {}", agent.name(), drained ? "" : "un", other.name());
      return agent.drain(other.name(), drained);
    }
    case 4:
    case 5:
      if (!has_instance_) return;
      if (generation_ == 0 || world_.chance(10)) ++generation_;
      for (std::uint32_t rank = 0; rank < kWorld; ++rank) {
        if (agents_[rank]->running() && world_.chance(80)) {
          world_.trace("rank {} attaches, generation {}", rank, generation_);
          agents_[rank]->attach(rank, kWorld, generation_);
        }
      }
      return;
    case 6:
      return agent.kill_worker();
    default: {
      const bool latest = world_.chance(50);
      world_.trace("{} pulls {}{}", agent.name(), id.to_string(), latest ? " (latest)" : "");
      agent.pull(id.model, latest ? std::nullopt : std::optional(id.version));
    }
  }
}

void Fleet::break_something() {
  switch (world_.pick(4)) {
    case 0:
      return break_coordinator();
    case 1:
    case 2:
      return break_agent();
    default:
      return break_network();
  }
}

void Fleet::break_network() {
  if (world_.chance(20)) {
    constexpr int kLosses[] = {0, 2, 15, 40};
    return world_.set_loss(kLosses[world_.pick(4)]);
  }
  const ProcessId from = some_agent().process();
  const ProcessId to = world_.chance(60) ? coordinator_.process() : some_agent().process();
  const bool forth = world_.chance(70);
  const bool back = !forth || world_.chance(50);
  world_.trace("cut {} {} {}", from, forth && back ? "and" : forth ? "to" : "from", to);
  if (forth) world_.cut(from, to, true);
  if (back) world_.cut(to, from, true);
  world_.after(world_.between(300ms, 8s), [this, from, to] {
    world_.cut(from, to, false);
    world_.cut(to, from, false);
  });
}

void Fleet::break_agent() {
  SimAgent& agent = some_agent();
  if (!agent.running()) return;
  switch (world_.pick(6)) {
    case 0:
      return agent.set_corrupts(world_.chance(30) ? 40 : 0);
    case 1:
    case 2:
      world_.trace("{} pauses", agent.name());
      return world_.pause(agent.process(), world_.between(300ms, 6s));
    default: {
      const bool power = world_.chance(25);
      world_.trace("{} {}", agent.name(), power ? "loses power" : "is killed");
      if (power) {
        agent.lose_power();
      } else {
        agent.crash();
      }
      world_.after(world_.between(1ms, 5s), [this, &agent] {
        if (!agent.running() && !healed_) agent.start();
      });
    }
  }
}

void Fleet::break_coordinator() {
  if (coordinator_.core() == nullptr) return;
  switch (world_.pick(4)) {
    case 0:
      world_.trace("the coordinator pauses");
      return world_.pause(coordinator_.process(), world_.between(500ms, 12s));
    case 1:
      if (!world_.chance(30)) return;
      world_.trace("the coordinator's clock jumps");
      return coordinator_.jump_clock(world_.between(1s, 1h));
    default:
      world_.trace("the coordinator is killed");
      coordinator_.crash();
      if (may_lose_state_ && world_.chance(20)) coordinator_.lose_state();
      world_.after(world_.between(1ms, 4s), [this] {
        if (coordinator_.core() == nullptr && !healed_) coordinator_.start();
      });
  }
}

void Fleet::heal() {
  world_.trace("everything is healed");
  healed_ = true;
  world_.heal();
  coordinator_.set_disk_faults(0, 0);
  if (coordinator_.core() == nullptr) coordinator_.start();
  if (impostor_ != nullptr && impostor_->running()) impostor_->crash();
  for (const auto& agent : agents_) {
    agent->set_corrupts(0);
    if (!agent->running() && agent.get() != impostor_) agent->start();
  }
  world_.after(4s, [this] {
    for (const auto& agent : agents_) {
      if (agent.get() != impostor_) agent->drain(agent->name(), false);
    }
  });
}

void Fleet::check_agent(const SimAgent& agent) const {
  const auto& members = coordinator_.core()->fleet().members.all();
  const auto found = members.find(agent.name());
  require(agent.registered() && found != members.end() &&
              found->second.info.incarnation == agent.info().incarnation &&
              found->second.state == NodeState::kAlive,
          "{} has not come back", agent.name());
  for (const auto& [id, copy] : agent.store()) {
    if (!copy.committed) continue;
    const DurableVersion* version = coordinator_.core()->fleet().catalog.find(id);
    // A conflict was answered, and the copy is left out.
    if (version == nullptr || version->root != copy.root) continue;
    require(found->second.holdings.holds_whole(id, copy.root),
            "{} holds {}, the catalog does not know", agent.name(), id.to_string());
    require(!version->retiring || agent.readers_of(id) > 0, "{} was retired and {} still holds it",
            id.to_string(), agent.name());
  }
  for (const auto& [key, holding] : found->second.holdings.all()) {
    const auto copy = agent.store().find(key.id);
    require(!holding.complete || (copy != agent.store().end() && copy->second.committed),
            "{} does not hold {}, the catalog says so", agent.name(), key.id.to_string());
  }
}

void Fleet::check_recovered() const {
  require(coordinator_.core() != nullptr, "the coordinator has not come back");
  const Core& core = *coordinator_.core();
  std::size_t pulling = 0;
  for (const auto& agent : agents_) {
    if (agent.get() == impostor_) continue;
    check_agent(*agent);
    if (agent->pulling()) ++pulling;
  }
  require(core.pulls().table().all().size() <= pulling, "{} pulls are open, {} run",
          core.pulls().table().all().size(), pulling);
  require(core.pulls().waiting() <= pulling, "{} pulls wait, {} run", core.pulls().waiting(),
          pulling);
  check_instance();
  // Every agent that could get the newest version has it.
  const auto newest = core.fleet().catalog.latest("m");
  if (!newest || coordinator_.state_was_lost()) return;
  if (core.readiness().state_of(*newest) != VersionState::kReady) return;
  const bool good_source = std::ranges::any_of(core.fleet().members.all(), [&](const auto& entry) {
    return entry.second.standing.quarantined_until() <= coordinator_.clock() - 12s &&
           entry.second.holdings.holds_whole(*newest, core.fleet().catalog.find(*newest)->root);
  });
  for (const auto& agent : agents_) {
    if (agent.get() == impostor_ || !good_source || agent->pulling()) continue;
    const auto copy = agent->store().find(*newest);
    const bool has = copy != agent->store().end() && copy->second.committed;
    const bool room = copy != agent->store().end() || agent->free_bytes() >= kVersionBytes;
    require(has || !room, "{} did not get {}", agent->name(), newest->to_string());
  }
}

void Fleet::check_instance() const {
  if (!has_instance_ || generation_ == 0) return;
  bool all = true;
  for (std::uint32_t rank = 0; rank < kWorld; ++rank) {
    all = all && agents_[rank]->worker_loaded() && agents_[rank]->generation() == generation_;
  }
  if (!all) return;
  for (std::uint32_t rank = 0; rank < kWorld; ++rank) {
    require(agents_[rank]->instance_state() == InstanceState::kCommitted,
            "all ranks have loaded, rank {} was not told to commit", rank);
  }
}

// After a long calm every version has its copies, or the reason for the shortage is known.
void Fleet::check_replicas() const {
  const Core& core = *coordinator_.core();
  for (const auto& [id, shortage] : core.replicas().shortages()) {
    require(!shortage.why.empty() || core.replicas().tasks().contains(id),
            "{} lacks copies and nobody knows why", id.to_string());
  }
}

}  // namespace rekindle::sim
