#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "recovery/metrics/metrics.h"
#include "src/base/clock.h"
#include "src/base/result.h"

namespace rekindle::joint {

// The steps of a joint publication, as one agent takes them (docs/internals/joint-publication.md).
inline constexpr std::array<std::string_view, 8> kJointPhases{
    "gather", "plan", "write", "digest", "finish", "claim", "commit", "confirm"};

// What one agent has had to do with one joint publication.
struct JointWork {
  std::uint64_t ranks = 0;  // of this agent
  std::uint64_t bytes = 0;  // of its copy
  std::map<std::string, Duration> phases;
};

// The metrics of the joint publications in which this agent takes part. Control thread only.
class JointMetrics {
 public:
  explicit JointMetrics(metrics::Metrics& metrics);
  void count(const Result<void>& outcome, const JointWork& work);

 private:
  metrics::OutcomeCounters outcomes_;
  prometheus::Counter& ranks_;
  prometheus::Counter& bytes_;
  std::map<std::string_view, prometheus::Histogram*> phases_;
};

}  // namespace rekindle::joint
