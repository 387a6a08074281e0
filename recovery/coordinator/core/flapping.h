#pragma once

#include <cstdint>

#include "recovery/coordinator/core/types.h"

namespace rekindle::coordinator {

// The deaths of a node id, over all its lives. Two within a minute: it is left out from its return
// on, for 10 s at first, twice as long each time.
struct Flapping {
  void died(const Timing& timing, TimePoint now);
  void returned(TimePoint now);

  TimePoint left_out_until{};
  TimePoint last_death{};
  std::uint32_t deaths = 0;
  std::uint32_t strikes = 0;
  Duration owed{};
};

}  // namespace rekindle::coordinator
