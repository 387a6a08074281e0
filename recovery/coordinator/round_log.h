#pragma once

#include <cstddef>
#include <map>
#include <set>

#include "recovery/coordinator/core/rounds.h"

namespace rekindle::coordinator {

// Logs the news of the rounds since the last look.
class RoundLog {
 public:
  void look(const Rounds& rounds);

 private:
  struct Said {
    std::size_t parties = 0;
    std::set<std::uint32_t> stopped;
    bool over = false;
  };
  static void look(const Round& round, Said& said);

  std::map<RoundId, Said> said_;
};

}  // namespace rekindle::coordinator
