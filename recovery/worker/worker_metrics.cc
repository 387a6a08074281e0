#include "recovery/worker/worker_metrics.h"

#include <array>
#include <chrono>
#include <string>

namespace rekindle::worker {

namespace {

// As in Event::kind. Other kinds are counted as "other".
constexpr std::array kKinds{
    "attach",
    "register",
    "wire",
    "install",
    "loaded",
    "switch",
    "committed",
    "died",
    "failed",
    "detached",
    "joined",
    "spreading",
    "spread",
    "alone",
    "direct",
    "not_direct",
    "device_failed",
    "ready",
    "unfit",
    "forgotten",
    "copy_rotten",
    "copy_mended",
    "copy_lost",
    "resident",
    "resident_dropped",
    "resident_damaged",
    "resident_mended",
    "no_resident",
    "switched",
    "not_switched",
    "other",
};

}  // namespace

WorkerMetrics::WorkerMetrics(metrics::Metrics& metrics) {
  auto& events = metrics.counters("rekindle_worker_events_total",
                                  "Events of workers, instances and copies, by kind.");
  for (const char* kind : kKinds) {
    kinds_[kind] = &events.Add({{"kind", kind}});
  }
  auto& attach = metrics.histograms("rekindle_attach_phase_seconds",
                                    "How long the phases of attaches took that were committed.");
  for (std::size_t i = 0; i < kPhaseCount; ++i) {
    const auto phase = static_cast<Phase>(i);
    attach_phases_[phase] =
        &metrics::add_seconds(attach, {{"phase", std::string(to_string(phase))}});
  }
  auto& update = metrics.histograms("rekindle_update_phase_seconds",
                                    "How long the phases of updates took in one rank.");
  for (const std::string_view phase : rpc::kUpdatePhases) {
    update_phases_[phase] = &metrics::add_seconds(update, {{"phase", std::string(phase)}});
  }
}

void WorkerMetrics::count(const Event& event) {
  const auto found = kinds_.find(event.kind);
  (found != kinds_.end() ? found->second : kinds_["other"])->Increment();
  if (event.kind != "committed" || !event.phases) return;
  for (const auto& [phase, histogram] : attach_phases_) {
    const Duration took = (*event.phases)[static_cast<std::size_t>(phase)];
    // A phase that did not take place, such as the detection of a death before the first attach.
    if (took > Duration::zero()) metrics::observe(*histogram, took);
  }
}

void WorkerMetrics::count(const rpc::PhaseTimes& phases) {
  for (const auto& phase : phases) {
    const auto found = update_phases_.find(phase.name());
    if (found == update_phases_.end()) continue;
    metrics::observe(*found->second, std::chrono::microseconds(phase.elapsed_us()));
  }
}

}  // namespace rekindle::worker
