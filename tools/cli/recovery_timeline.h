#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "proto/agent.pb.h"

namespace rekindle::cli {

// Where the time went between the death of a worker and its first answer. Pure: the caller passes
// the agent's events and times in seconds since it has killed the worker.
class RecoveryTimeline {
 public:
  struct Phase {
    // detect; takeover, or restart and start; load, commit, first_token.
    std::string name;
    double begin_s = 0;
    double took_s = 0;
    std::string what;
  };

  RecoveryTimeline(std::uint32_t victim_pid, std::uint32_t rank)
      : victim_pid_(victim_pid), rank_(rank) {}

  // An event of the instance. `arrived_s`: when it was received. The events after the death are
  // placed by the agent's clock, because several of them may arrive at once.
  void add(const proto::AgentEvent& event, double arrived_s);
  // A request has succeeded.
  void first_token(double at_s) { first_token_s_ = at_s; }

  bool worker_has_ended() const { return died_s_.has_value(); }
  bool ready() const { return ready_s_.has_value(); }
  // Those that are over, in order.
  std::vector<Phase> phases() const;

 private:
  double at(const proto::AgentEvent& event) const;

  const std::uint32_t victim_pid_;
  const std::uint32_t rank_;
  std::optional<double> died_s_, attached_s_, loaded_s_, ready_s_, first_token_s_;
  std::uint64_t died_unix_us_ = 0;
  // Of the worker that has attached. nullopt: the agent does not know.
  std::optional<double> process_age_s_;
  // It had started before the death.
  bool takes_over_ = false;
  std::string rung_;
};

}  // namespace rekindle::cli
