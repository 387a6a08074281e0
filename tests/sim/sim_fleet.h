#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tests/sim/sim_agent.h"
#include "tests/sim/sim_coordinator.h"
#include "tests/sim/sim_world.h"

namespace rekindle::sim {

// Totals of a run. They reveal a world in which everything is refused.
struct Totals {
  std::uint64_t steps = 0;
  std::uint64_t answers = 0;
  // Committed, at the end.
  std::uint64_t copies = 0;
  std::uint64_t recopies = 0;
  // Committed instances, at the end.
  std::uint64_t commits = 0;
  Totals& operator+=(const Totals& other);
};

// One seed: a fleet works while everything fails that can fail, then it is left alone and must
// recover by itself. Throws Violation.
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
  // Has the node id of another agent.
  SimAgent* impostor_ = nullptr;
  bool may_lose_state_ = false;
  bool has_instance_ = false;
  std::uint64_t generation_ = 0;
  bool healed_ = false;
};

}  // namespace rekindle::sim
