#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <random>
#include <string>

#include "tests/chaos/world.h"

namespace rekindle::testing::chaos {

// What happens to a world, chosen by a seed: each step breaks something and plans its mending. The
// order of faults is the seed's; what the processes do meanwhile is theirs.
class Faults {
 public:
  Faults(World& world, std::uint64_t seed);

  // One random fault now, and all mending that is due.
  void step();
  // Ends every fault: all processes run, all links pass.
  void heal();

  std::uint64_t newest_version() const { return version_; }
  const std::map<std::string, int>& counts() const { return counts_; }

 private:
  using Clock = std::chrono::steady_clock;

  Host& any_host();
  milliseconds up_to(milliseconds limit);
  void later(milliseconds delay, std::function<void()> mend);
  void mend_what_is_due();
  void say(const std::string& what);

  void kill_worker();
  void stop_worker();
  void kill_agent();
  void stop_agent();
  void lose_host();
  void kill_coordinator();
  void stop_coordinator();
  void cut_off();  // from the coordinator, one way or both
  void break_data();
  void publish();
  void restart_agent(Host& host);
  void restart_coordinator();

  World& world_;
  std::mt19937_64 random_;
  const Clock::time_point started_ = Clock::now();
  std::uint64_t version_ = 1;
  std::multimap<Clock::time_point, std::function<void()>> mending_;
  std::map<std::string, int> counts_;
};

}  // namespace rekindle::testing::chaos
