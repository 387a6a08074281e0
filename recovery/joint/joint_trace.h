#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "recovery/joint/joint_roster.h"
#include "recovery/trace/tracer.h"
#include "src/base/clock.h"
#include "src/base/result.h"

namespace rekindle::joint {

// The spans of one agent's share in a joint publication (docs/internals/tracing.md): its phases,
// and those of its ranks. Which trace they belong to is known with the roster, so they are recorded
// at the end. Without a tracer there are none. Control thread only.
class JointTrace {
 public:
  // The spans of more ranks are left out.
  static constexpr std::size_t kMostRanks = 64;

  explicit JointTrace(trace::Tracer* tracer) : tracer_(tracer) {}

  // The phase before it ends.
  void enter_phase(std::string name) { enter(phases_, std::move(name)); }
  void enter_phase(std::uint32_t rank, std::string name) {
    if (ranks_.contains(rank) || ranks_.size() < kMostRanks) enter(ranks_[rank], std::move(name));
  }
  void end_phase(std::uint32_t rank);
  // Of each phase of this agent, after end().
  std::map<std::string, Duration> took() const;
  // Nothing is recorded if the roster is not complete.
  void end(const Roster& roster, const Result<void>& outcome);

 private:
  struct Phase {
    std::string name;
    TimePoint began{};
    TimePoint ended{};  // TimePoint(): it runs
  };
  using Phases = std::vector<Phase>;
  static void close(Phases& phases);
  static void enter(Phases& phases, std::string name);
  void record(const trace::Context& parent, const std::string& name, Phases& phases,
              std::vector<trace::Attribute> attributes, const std::string& error);

  trace::Tracer* const tracer_;
  Phases phases_;
  std::map<std::uint32_t, Phases> ranks_;
};

}  // namespace rekindle::joint
