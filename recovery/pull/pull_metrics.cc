#include "recovery/pull/pull_metrics.h"

#include "src/base/clock.h"

namespace rekindle::pull {

PullMetrics::PullMetrics(metrics::Metrics& metrics)
    : started_(metrics.counter("rekindle_pulls_started_total", "Pulls that have begun.")),
      outcomes_(metrics.counters("rekindle_pulls_total", "Pulls that have ended, by result.")),
      took_(metrics::add_seconds(metrics.histograms(
          "rekindle_pull_seconds", "How long pulls took that brought their copy."))),
      moved_(metrics.counters("rekindle_pull_moved_bytes_total",
                              "Payload bytes that pulls have received, right or wrong.")),
      moving_(metrics.counters("rekindle_pull_moving_seconds_total",
                               "Seconds in which a pull had slices in flight on the rail.")),
      resumed_bytes_(
          metrics.counter("rekindle_pull_resumed_bytes_total",
                          "Bytes that pulls did not fetch, because they were here already.")),
      refetched_bytes_(metrics.counter("rekindle_pull_refetched_bytes_total",
                                       "Bytes that were fetched again, because they were wrong.")),
      retried_(metrics.counter("rekindle_pull_retried_slices_total",
                               "Slices that were asked for again after a failure.")),
      stolen_(metrics.counter("rekindle_pull_stolen_slices_total",
                              "Slices that were taken from a slow source.")),
      lost_(metrics.counter("rekindle_pull_lost_sources_total",
                            "Sources that a pull has lost, also those with wrong bytes.")),
      quarantined_(
          metrics.counter("rekindle_pull_quarantined_sources_total",
                          "Sources that a pull has quarantined because they sent wrong bytes.")) {
  auto& phases = metrics.histograms("rekindle_pull_phase_seconds",
                                    "How long the phases of pulls took that brought their copy.");
  for (const std::string_view phase : kPullPhases) {
    phases_[phase] = &metrics::add_seconds(phases, {{"phase", std::string(phase)}});
  }
  for (const char* transport : {"tcp", "tcp+tls", "shm", "verbs"}) {
    counters_of(transport, "", Landing::kHost);
  }
  counters_of("verbs", "", Landing::kGpu);
}

PullMetrics::Rail PullMetrics::counters_of(const std::string& transport, const std::string& rail,
                                           Landing landing) {
  const prometheus::Labels labels = {{"transport", transport},
                                     {"rail", rail},
                                     {"memory", landing == Landing::kGpu ? "gpu" : "host"}};
  return {moved_.Add(labels), moving_.Add(labels)};
}

void PullMetrics::succeeded(const TransferSummary& summary) {
  outcomes_.count({});
  metrics::observe(took_, summary.elapsed);
  for (const Phase& phase : summary.phases) {
    const auto found = phases_.find(phase.name);
    if (found != phases_.end()) metrics::observe(*found->second, phase.elapsed);
  }
  resumed_bytes_.Increment(static_cast<double>(summary.resumed_bytes));
  refetched_bytes_.Increment(static_cast<double>(summary.refetched_bytes));
}

void PullMetrics::lost_source(SourceState::Loss loss) {
  lost_.Increment();
  if (loss == SourceState::Loss::kWrongBytes) quarantined_.Increment();
}

void MovedBytes::look(const transport::BatchProgress& progress) {
  if (metrics_ == nullptr) return;
  for (std::size_t i = 0; i < progress.rails.size(); ++i) {
    const transport::RailStats& stats = progress.rails[i];
    if (i == rails_.size()) {
      rails_.push_back({metrics_->counters_of(stats.transport, stats.home, landing_)});
    }
    Rail& rail = rails_[i];
    rail.counters.bytes.Increment(static_cast<double>(stats.bytes - rail.bytes));
    rail.counters.seconds.Increment(seconds(stats.busy - rail.busy));
    rail.bytes = stats.bytes;
    rail.busy = stats.busy;
  }
  metrics_->retried_.Increment(static_cast<double>(progress.retried_slices - retried_));
  metrics_->stolen_.Increment(static_cast<double>(progress.stolen_slices - stolen_));
  retried_ = progress.retried_slices;
  stolen_ = progress.stolen_slices;
}

}  // namespace rekindle::pull
