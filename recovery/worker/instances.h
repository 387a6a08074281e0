#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "recovery/worker/core/instance.h"
#include "recovery/worker/core/readiness.h"
#include "recovery/worker/event_log.h"
#include "recovery/worker/ready_files.h"

namespace rekindle::worker {

// The instances that this agent knows, and what the outside is told of them: the board behind the
// health endpoint and the files. Control thread only.
class Instances {
 public:
  Instances(ReadyFiles files, EventLog& events) : files_(std::move(files)), events_(events) {}

  struct Entry {
    Instance state;
    bool named = true;
    bool announced = false;  // the outside is told that it is ready
    std::uint64_t last_use = 0;
    std::uint64_t changes = 0;                     // of its ranks here
    std::uint64_t reported = 0;                    // of them, to the coordinator
    std::optional<std::uint64_t> version;          // that its ranks ask for; nullopt: the newest
    std::uint64_t committed_in = 0;                // the last term that said COMMITTED
    std::uint64_t loading_in = 0;                  // the last term that said LOADING without
    TimePoint loading_since{};                     // having said COMMITTED; since then
    TimePoint idle_since = TimePoint::max();       // it is unfit, and no rank is here
    std::map<std::uint32_t, Duration> detections;  // of ranks that died: how long until it was seen
  };
  // Of that name, or, for "", one of its own. kInvalid: no name; kExhausted: too many.
  Result<Entry*> get(const std::string& name, SessionId session);

  // Before anyone is told what follows from a change: "ready" is taken back when it no longer
  // holds.
  void take_back(Entry& entry);
  // After everyone was told: "ready" is said when it holds. An instance that everybody has left
  // is forgotten, one without a name also when they died: `entry` is then gone.
  void settle(Entry& entry);

  // Instances whose ranks all died and did not come back for so long: nobody waits for them any
  // more. A router that asks learns that nobody has attached.
  void forget_idle(TimePoint now, Duration after);
  bool any_idle() const;

  const std::map<std::string, std::unique_ptr<Entry>>& all() const { return entries_; }
  const ReadyBoard& board() const { return board_; }

 private:
  Result<void> make_room();
  void note(const Entry& entry, const char* kind, const Readiness& readiness);

  ReadyFiles files_;
  EventLog& events_;
  ReadyBoard board_;
  std::map<std::string, std::unique_ptr<Entry>> entries_;
  std::uint64_t uses_ = 0;
};

}  // namespace rekindle::worker
