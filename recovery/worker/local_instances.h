#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <string_view>

#include "recovery/worker/core/fleet_report.h"
#include "recovery/worker/core/instance.h"
#include "recovery/worker/core/readiness.h"
#include "recovery/worker/event_log.h"

namespace rekindle::worker {

// DIR/agent/ready/INSTANCE: exists while the instance is ready, and holds one line of JSON. A file
// is written aside and renamed, so that a reader never sees a part of it. Small files on tmpfs:
// the calls block, on any thread.
class ReadyFiles {
 public:
  // Creates the directory, and removes the files of the agent's last life.
  static Result<ReadyFiles> open(const std::filesystem::path& directory);

  Result<void> write(const std::string& instance, std::string_view line) const;
  Result<void> remove(const std::string& instance) const;  // succeeds without a file, too

 private:
  explicit ReadyFiles(std::filesystem::path directory) : directory_(std::move(directory)) {}
  std::filesystem::path directory_;
};

// The instances whose ranks attached to this agent, and their announcement to the outside: the
// board behind the health endpoint, the files, and events. Control thread only.
class LocalInstances {
 public:
  LocalInstances(ReadyFiles files, EventLog& events) : files_(std::move(files)), events_(events) {}

  struct Entry {
    Instance state;
    bool named = true;
    bool announced = false;  // the outside knows it as ready
    std::uint64_t last_use = 0;
    FleetReport fleet;
    // Since when it is unfit without a rank here.
    TimePoint idle_since = TimePoint::max();
    // By rank: how long it took to see the death of the rank's last worker, and when it was seen.
    struct Detection {
      Duration took{};
      TimePoint seen;
    };
    std::map<std::uint32_t, Detection> detections;
  };
  // The instance of that name. For "" a new one that has only this session. kInvalid: no valid
  // name. kExhausted: there are too many.
  Result<Entry*> get(const std::string& name, SessionId session);
  Entry* find(const std::string& key) const;

  // Takes "ready" back if it no longer holds. The caller does this before anybody else hears of
  // the change.
  void take_back(Entry& entry);
  // Announces "ready" if it holds now. The caller does this when everybody else has heard of the
  // change. Forgets an instance whose ranks have all detached, and one without a name when its
  // last rank has gone in whatever way: `entry` is invalid then.
  void settle(Entry& entry);

  // Forgets instances whose ranks all died at least `after` ago. A router that asks then learns
  // that no rank has attached.
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
