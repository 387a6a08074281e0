#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tests/sim/agent.h"
#include "tests/sim/coordinator.h"
#include "tests/sim/world.h"

namespace rekindle::sim {

// What a run saw, so that a world of refusals only is noticed.
struct Totals {
  std::uint64_t steps = 0;
  std::uint64_t answers = 0;
  std::uint64_t copies = 0;  // committed, at the end
  std::uint64_t recopies = 0;
  std::uint64_t commits = 0;  // instances, at the end
  Totals& operator+=(const Totals& other);
};

// One seed: a fleet that works while everything that can fail does, then is left alone and must
// come back by itself. Throws Violation.
class Fleet {
 public:
  Fleet(std::uint64_t seed, bool verbose);
  Totals run();

 private:
  void act();
  void work();
  void break_something();
  void break_network();
  void break_agent();
  void break_coordinator();
  void heal();
  void run_for(Duration duration);
  void settle();
  void check_recovered() const;
  void check_agent(const SimAgent& agent) const;
  void check_instance() const;
  void check_replicas() const;
  SimAgent& some_agent() { return *agents_[world_.pick(agents_.size())]; }
  ModelVersion some_version();
  static Limits make_limits(World& world);

  World world_;
  SimCoordinator coordinator_;
  SimAgent::Peers agents_;
  SimAgent* impostor_ = nullptr;  // has the node id of another
  bool may_lose_state_ = false;
  bool has_instance_ = false;
  std::uint64_t generation_ = 0;
  bool healed_ = false;
};

}  // namespace rekindle::sim
