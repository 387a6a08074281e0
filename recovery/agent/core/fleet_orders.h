#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <vector>

#include "src/base/digest.h"
#include "src/base/ids.h"

namespace rekindle::agent {

// Decides what this agent does about the orders in the coordinator's answers to heartbeats: retire
// a version when its readers are done, fetch a whole copy of another, and stop a fetch that is no
// longer wanted. The next heartbeat reports the outcome. Pure: FleetDuties performs the actions.
class FleetOrders {
 public:
  // The part of an answer to a heartbeat that this class obeys.
  struct Answer {
    struct WantedCopy {
      ModelVersion id;
      Digest root;
      std::uint64_t max_bytes_per_second = 0;
    };
    std::uint64_t epoch = 0;
    bool drained = false;
    std::vector<ModelVersion> retiring;
    std::vector<ModelVersion> retire;
    std::vector<WantedCopy> fetch;
  };
  // The part of a heartbeat that this class knows.
  struct Report {
    std::vector<ModelVersion> failed_fetches;
    std::vector<ModelVersion> fetching;
  };
  struct Fetch {
    ModelVersion id;
    // For the log: the grants of the coordinator enforce it.
    std::uint64_t max_bytes_per_second = 0;
  };
  struct Actions {
    // Versions that admit no new readers.
    std::set<ModelVersion> draining;
    std::vector<ModelVersion> retire;
    std::vector<Fetch> fetch;
    std::vector<ModelVersion> cancel;
    // The coordinator has not heard yet of a copy that it asks for.
    bool announce = false;
  };
  // Whether this host has all of the version under this root.
  using HasWhole = std::function<bool(const ModelVersion&, const Digest& root)>;

  Report report();
  // Takes the answer to the heartbeat that had the last report. An order comes again with each
  // answer until it is done; an action is returned once.
  Actions take(const Answer& answer, const HasWhole& has_whole);
  // The outcomes of actions.
  void retired(const ModelVersion& id) { retiring_.erase(id); }
  void fetched(const ModelVersion& id, bool succeeded);
  // No action begins any more.
  void stop() { stopped_ = true; }

  // Whether the failure of a fetch is expected, because nobody wants it any more.
  bool was_cancelled(const ModelVersion& id) const;
  // The coordinator keeps new readers away from this host.
  bool is_drained() const { return drained_; }

 private:
  struct Running {
    Digest root;
    // Of the coordinator that wanted it last.
    std::uint64_t epoch = 0;
    enum class State { kWanted, kCancelled } state = State::kWanted;
  };
  void take_fetches(const Answer& answer, const HasWhole& has_whole, Actions& actions);

  std::set<ModelVersion> retiring_;
  std::map<ModelVersion, Running> fetching_;
  // Fetches that have failed, until a coordinator has heard of them.
  std::vector<ModelVersion> failed_;
  // How many of failed_ were in the last heartbeat.
  std::size_t reported_ = 0;
  bool drained_ = false;
  bool stopped_ = false;
};

}  // namespace rekindle::agent
