#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "src/base/clock.h"
#include "transport/engine.h"

namespace rekindle::pull {

// The rails of connected sources: which rails are alive, and when the missing ones are tried again.
// They may work by then: a link comes back, or a source finishes the registration of its memory.
// Pure: the transfer brings the time and does the handshakes.
class RailKeeper {
 public:
  struct LostRail {
    transport::SourceIndex source = 0;
    std::string rail;
  };
  enum class Join { kJoined, kNothingMissing, kFailed };

  // Takes in which paths are alive. Returns the rails that died of sources that go on over others.
  std::vector<LostRail> update(const transport::BatchProgress& progress);
  // NICs whose paths to this source are alive.
  std::vector<std::string> alive(transport::SourceIndex source) const;

  // For a connected source: whether to try to join its missing rails now. Each true is answered by
  // an end_join().
  bool begin_join(transport::SourceIndex source, TimePoint now);
  void end_join(transport::SourceIndex source, Join outcome, TimePoint now);
  bool joining(transport::SourceIndex source) const;

 private:
  struct Rails {
    std::set<std::string> alive;
    bool joining = false;
    // The epoch: the source has just been connected.
    TimePoint next_join{};
    Duration pause{};  // doubles while joins fail
  };

  std::map<transport::SourceIndex, Rails> rails_;
};

}  // namespace rekindle::pull
