#include "recovery/pull/pull_context.h"

#include <algorithm>
#include <utility>

namespace rekindle::pull {

namespace {

std::string line_key(const ActiveSource& source) { return source.name + " " + source.transport; }

}  // namespace

PullProgress::PullProgress(std::string model, OnProgress on_progress, trace::Tracer* tracer)
    : model_(std::move(model)), on_progress_(std::move(on_progress)), trace_(tracer) {}

void PullProgress::start(const PullRequest& request, TimePoint now) {
  started_ = phase_started_ = now;
  trace_.begin(request, phase_);
}

void PullProgress::enter_phase(const std::string& name, TimePoint now) {
  const auto elapsed = std::chrono::duration_cast<std::chrono::microseconds>(now - phase_started_);
  phase_started_ = now;
  trace_.enter_phase(name);
  const std::string ended = std::exchange(phase_, name);
  const auto known = std::ranges::find(phases_, ended, &Phase::name);
  if (known != phases_.end()) {
    known->elapsed += elapsed;
  } else {
    phases_.push_back({ended, elapsed});
  }
}

void PullProgress::show(std::string note) { send({}, std::move(note)); }

void PullProgress::begin_transfer(SourceTable& sources) {
  lines_before_ = lines_;
  trace_.begin_transfer(steady_now());
  batch_bytes_ = 0;
  for (auto& source : sources) source.bytes = 0;
}

void PullProgress::tick(const transport::BatchProgress& batch, SourceTable& sources) {
  for (std::size_t i = 0; i < batch.sources.size() && i < sources.size(); ++i) {
    sources[i].bytes = batch.sources[i].bytes;
    add(sources[i], batch.sources[i]);
  }
  trace_.look(batch, sources, steady_now());
  send(batch, "");
  batch_bytes_ = batch.bytes_done;
}

void PullProgress::add(const ActiveSource& source, const transport::SourceStats& stats) {
  const bool connecting = source.transport.empty() && !source.state.lost();
  if (connecting) return;
  SourceLine line;
  const auto before = lines_before_.find(line_key(source));
  if (before != lines_before_.end()) line = before->second;
  line.name = source.name;
  line.transport = source.transport;
  line.bytes += stats.bytes;
  line.bytes_per_second = stats.goodput_bytes_per_second;
  line.lost = source.state.lost();
  line.cause = source.state.cause();
  lines_[line_key(source)] = std::move(line);
}

void PullProgress::send(const transport::BatchProgress& batch, std::string note) {
  const bool resolved = !id_.model.empty();
  if (!on_progress_ || (!resolved && note.empty())) return;
  Progress progress;
  progress.phase = phase_;
  progress.id = resolved ? id_ : ModelVersion{model_, 0};
  progress.bytes_total = bytes_total_;
  progress.bytes_done = std::min(bytes_total_, bytes_done_ + batch.bytes_done);
  if (phase_ == "commit" || phase_ == "ready") progress.bytes_done = bytes_total_;
  for (const auto& source : batch.sources) {
    progress.bytes_per_second += source.goodput_bytes_per_second;
  }
  for (const auto& [key, line] : lines_) progress.sources.push_back(line);
  progress.note = std::move(note);
  on_progress_(progress);
}

PullReport PullProgress::report(const SourceTable& sources) const {
  PullReport whole{bytes_done_ + batch_bytes_, bytes_total_, {}};
  for (const auto& source : sources) {
    if (source.peer == nullptr) continue;
    proto::SourceReport report;
    report.set_node_id(source.name);
    report.set_incarnation(source.record.node().incarnation());
    if (const auto line = lines_.find(line_key(source)); line != lines_.end()) {
      report.set_bytes(line->second.bytes);
      report.set_goodput_bytes_per_second(line->second.bytes_per_second);
    }
    const int failures = source.state.reconnects() + (source.state.lost() ? 1 : 0);
    report.set_failures(static_cast<std::uint32_t>(failures));
    report.set_lost(source.state.lost());
    report.set_quarantine(source.state.quarantined());
    report.set_cause(source.state.cause());
    whole.sources.push_back(std::move(report));
  }
  for (const auto& [name, report] : unanswered_) {
    const bool answered = std::ranges::any_of(
        sources, [&](const ActiveSource& source) { return source.name == report.node_id(); });
    if (!answered) whole.sources.push_back(report);
  }
  return whole;
}

void PullProgress::no_answer_of(const proto::Source& source, const Error& why) {
  proto::SourceReport report;
  report.set_node_id(source.node().node_id());
  report.set_incarnation(source.node().incarnation());
  report.set_failures(1);
  report.set_lost(true);
  report.set_cause(why.message());
  unanswered_[report.node_id()] = std::move(report);
}

void PullProgress::summarize(TransferSummary& summary, TimePoint now) const {
  summary.phases = phases_;
  summary.elapsed = std::chrono::duration_cast<std::chrono::milliseconds>(now - started_);
  for (const auto& [key, line] : lines_) summary.sources.push_back(line);
}

}  // namespace rekindle::pull
