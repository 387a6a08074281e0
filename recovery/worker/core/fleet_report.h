#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "recovery/worker/core/instance.h"
#include "src/base/clock.h"

namespace rekindle::worker {

// One rank on this host, as reported to the coordinator: the ranks of an instance may live on
// several hosts.
struct RankReport {
  enum class State { kAttached, kLoaded, kFailed, kGone };
  std::string instance;
  std::uint64_t generation = 0;
  std::uint32_t rank = 0;
  std::uint32_t world = 1;
  std::string model;
  std::optional<std::uint64_t> version;  // asked for; nullopt: the newest
  std::optional<ModelVersion> has;       // what it was resolved to
  State state = State::kAttached;
  std::uint64_t sequence = 0;
  std::string why;  // of kFailed and kGone
};

// The coordinator's verdict on all ranks of an instance.
struct InstanceVerdict {
  enum class State { kLoading, kCommitted, kUnfit };
  ModelVersion id;
  State state = State::kLoading;
  std::string why;         // of kUnfit: "rank 3 on b: the node died"
  std::uint64_t term = 0;  // of the coordinator that says so
};

// What the coordinator has heard of one instance's ranks on this host, and what follows from its
// verdicts. Pure.
class FleetReport {
 public:
  // The ranks here have changed. `number` grows with every change of any instance.
  void change(std::uint64_t number) { changed_ = number; }
  std::uint64_t last_change() const { return changed_; }
  // The version that the ranks ask for; nullopt: the newest.
  void ask_for(std::optional<std::uint64_t> version) { asked_ = version; }

  // A failed rank whose instance has no other rank here is reported once, not for ever.
  bool is_due(const Instance& instance) const {
    return instance.has_sessions() || changed_ != reported_;
  }
  // Empty while no rank knows its version.
  std::vector<RankReport> reports(const Instance& instance) const;
  RankReport report_of(const Instance& instance, const Instance::RankView& rank) const;

  struct Answers {
    std::uint64_t change = 0;                // last_change() when the reports were made
    std::map<std::uint32_t, Error> refused;  // ranks here that do not belong to the instance
    // The last answer about a rank that was not refused. None: every rank was refused.
    std::optional<Result<InstanceVerdict>> verdict;
  };
  struct Ruling {
    std::vector<std::pair<SessionId, Error>> failed;  // sessions that end
    Instance::Change change;                          // already made to the instance
  };
  // `patience`: how long a new coordinator may take to hear of all ranks.
  Ruling hear(Instance& instance, const Answers& answers, TimePoint now, Duration patience);

 private:
  bool has_heard_all(std::uint64_t term, TimePoint now, Duration patience);

  std::optional<std::uint64_t> asked_;
  std::uint64_t changed_ = 0;
  std::uint64_t reported_ = 0;        // the change that the last verdict knew of
  std::uint64_t committed_term_ = 0;  // the last term that said COMMITTED
  std::uint64_t loading_term_ = 0;    // the last term that said LOADING before COMMITTED
  TimePoint loading_since_{};         // of loading_term_
};

// The coordinator was asked, and the rank does not belong to that instance.
bool is_refusal(const Error& error);

}  // namespace rekindle::worker
