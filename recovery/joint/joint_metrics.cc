#include "recovery/joint/joint_metrics.h"

#include <string>

namespace rekindle::joint {

JointMetrics::JointMetrics(metrics::Metrics& metrics)
    : outcomes_(metrics.counters("rekindle_joint_publications_total",
                                 "Joint publications with ranks here that have ended, by result.")),
      ranks_(metrics.counter("rekindle_joint_ranks_total",
                             "Ranks of this host in joint publications that succeeded.")),
      bytes_(metrics.counter("rekindle_joint_published_bytes_total",
                             "Payload bytes of this host's copies that these published.")) {
  auto& phases = metrics.histograms("rekindle_joint_phase_seconds",
                                    "How long the phases of joint publications took.");
  for (const std::string_view phase : kJointPhases) {
    phases_[phase] = &metrics::add_seconds(phases, {{"phase", std::string(phase)}});
  }
}

void JointMetrics::count(const Result<void>& outcome, const JointWork& work) {
  outcomes_.count(outcome);
  if (!outcome) return;
  ranks_.Increment(static_cast<double>(work.ranks));
  bytes_.Increment(static_cast<double>(work.bytes));
  for (const auto& [phase, histogram] : phases_) {
    const auto took = work.phases.find(std::string(phase));
    if (took != work.phases.end()) metrics::observe(*histogram, took->second);
  }
}

}  // namespace rekindle::joint
