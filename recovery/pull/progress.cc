// PullJob: what is told while it runs.
#include <utility>

#include "recovery/pull/pull.h"

namespace rekindle::pull {

void PullJob::enter_phase(std::string name) {
  const auto now = std::chrono::steady_clock::now();
  const auto elapsed = std::chrono::duration_cast<std::chrono::microseconds>(now - phase_started_);
  phase_started_ = now;
  // The phase that ends here; a phase that comes again is added to.
  auto& phases = summary_.phases;
  const auto close = [&](const std::string& ended) {
    for (auto& phase : phases) {
      if (phase.name == ended) {
        phase.elapsed += elapsed;
        return;
      }
    }
    phases.push_back({ended, elapsed});
  };
  close(std::exchange(phase_, std::move(name)));
}

void PullJob::show(const transport::BatchProgress& batch, std::string note) {
  if (!on_progress_ || (resolved_.id.model.empty() && note.empty())) return;
  Progress progress;
  progress.phase = phase_;
  progress.id = resolved_.id.model.empty() ? ModelVersion{request_.ref.model, 0} : resolved_.id;
  progress.bytes_total = bytes_total_;
  progress.bytes_done = std::min(bytes_total_, bytes_done_ + batch.bytes_done);
  if (phase_ == "commit" || phase_ == "ready") progress.bytes_done = bytes_total_;
  for (const auto& source : batch.sources)
    progress.bytes_per_second += source.goodput_bytes_per_second;
  for (const auto& [key, line] : lines_) progress.sources.push_back(line);
  progress.note = std::move(note);
  on_progress_(progress);
}

void PullJob::add_stats(const transport::BatchProgress& batch) {
  for (std::size_t i = 0; i < batch.sources.size() && i < sources_->size(); ++i) {
    ActiveSource& source = (*sources_)[i];
    source.bytes = batch.sources[i].bytes;
    if (source.transport.empty() && !source.lost) continue;  // still connecting
    const std::string key = source.name + " " + source.transport;
    SourceLine line;
    const auto before = lines_before_.find(key);
    if (before != lines_before_.end()) line = before->second;
    line.name = source.name;
    line.transport = source.transport;
    line.bytes += batch.sources[i].bytes;
    line.bytes_per_second = batch.sources[i].goodput_bytes_per_second;
    line.lost = source.lost;
    line.cause = source.cause;
    lines_[key] = std::move(line);
  }
}

std::vector<proto::SourceReport> PullJob::source_reports() const {
  std::vector<proto::SourceReport> reports;
  for (const auto& source : *sources_) {
    if (source.peer == nullptr) continue;
    const auto line = lines_.find(source.name + " " + source.transport);
    proto::SourceReport report;
    report.set_node_id(source.name);
    report.set_incarnation(source.record.node().incarnation());
    if (line != lines_.end()) {
      report.set_bytes(line->second.bytes);
      report.set_goodput_bytes_per_second(line->second.bytes_per_second);
    }
    report.set_failures(static_cast<std::uint32_t>(source.reconnects + (source.lost ? 1 : 0)));
    report.set_lost(source.lost);
    report.set_quarantine(source.quarantined);
    report.set_cause(source.cause);
    reports.push_back(std::move(report));
  }
  return reports;
}

}  // namespace rekindle::pull
