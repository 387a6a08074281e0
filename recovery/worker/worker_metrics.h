#pragma once

#include <map>
#include <string_view>

#include "recovery/metrics/metrics.h"
#include "recovery/rpc/update_phases.h"
#include "recovery/worker/event_log.h"

namespace rekindle::worker {

// Counts the events of workers, instances and copies, and how long the phases of attaches and
// updates took. Control thread only.
class WorkerMetrics {
 public:
  explicit WorkerMetrics(metrics::Metrics& metrics);

  void count(const Event& event);
  // As a worker reports them, when its update is over.
  void count(const rpc::PhaseTimes& phases);

 private:
  std::map<std::string_view, prometheus::Counter*> kinds_;
  std::map<Phase, prometheus::Histogram*> attach_phases_;
  std::map<std::string_view, prometheus::Histogram*> update_phases_;
};

}  // namespace rekindle::worker
