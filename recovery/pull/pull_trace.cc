#include "recovery/pull/pull_trace.h"

#include <algorithm>
#include <map>
#include <utility>

#include "recovery/trace/trace_wire.h"

namespace rekindle::pull {

namespace {

trace::Attribute number(std::string key, std::uint64_t value) {
  return {std::move(key), static_cast<std::int64_t>(value)};
}

std::vector<trace::Attribute> describe(const ActiveSource& source,
                                       const transport::SourceStats& stats) {
  std::vector<trace::Attribute> attributes{
      {std::string(trace::kSource), source.name},
      {"rekindle.transport", source.transport},
      number("rekindle.bytes", stats.bytes),
      number("rekindle.slices", stats.slices),
      number("rekindle.failed_slices", stats.failures),
      number("rekindle.bytes_per_second",
             static_cast<std::uint64_t>(stats.goodput_bytes_per_second)),
      number("rekindle.reconnects", static_cast<std::uint64_t>(source.state.reconnects())),
  };
  if (source.cap_bytes_per_second > 0) {
    attributes.push_back(number("rekindle.cap_bytes_per_second", source.cap_bytes_per_second));
  }
  return attributes;
}

}  // namespace

void PullTrace::begin(const PullRequest& request, const std::string& phase) {
  pull_ = trace::RunningSpan(tracer_, "pull", request.trace);
  pull_.set(std::string(trace::kOperation), "pull");
  if (!request.shard.empty()) pull_.set("rekindle.shard", request.shard);
  enter_phase(phase);
}

// The last phase, "ready", takes no time.
void PullTrace::enter_phase(const std::string& phase) {
  go_on();
  phase_.end();
  if (phase != "ready") phase_ = trace::RunningSpan(tracer_, phase, pull_.context());
}

void PullTrace::wait_for(const std::string& what) {
  if (std::exchange(waits_for_, what) == what) return;
  wait_ = trace::RunningSpan(tracer_, "wait", phase_.context());
  wait_.set(std::string(trace::kWait), what);
}

void PullTrace::go_on() {
  waits_for_.clear();
  wait_.end();
}

void PullTrace::begin_transfer(TimePoint now) {
  work_.clear();
  batch_ = {};
  transfer_began_ = now;
}

void PullTrace::look(const transport::BatchProgress& batch, const SourceTable& sources,
                     TimePoint now) {
  if (tracer_ == nullptr) return;
  for (std::size_t i = 0; i < batch.sources.size() && i < sources.size(); ++i) {
    if (i == work_.size()) work_.emplace_back();
    Work& work = work_[i];
    if (work.bytes == 0) work.began = std::max(transfer_began_, sources[i].connected_at);
    if (batch.sources[i].bytes > work.bytes) {
      work.last_byte = std::max(work.began, std::min(now, batch.last_byte));
    }
    work.bytes = batch.sources[i].bytes;
  }
  batch_ = batch;
}

void PullTrace::end_transfer(const SourceTable& sources) {
  if (tracer_ == nullptr) return;
  phase_.set("rekindle.retried_slices", batch_.retried_slices);
  phase_.set("rekindle.stolen_slices", batch_.stolen_slices);
  for (std::size_t i = 0; i < work_.size() && i < sources.size(); ++i) {
    const ActiveSource& source = sources[i];
    const transport::SourceStats& stats = batch_.sources[i];
    // One that did not connect has a span for its handshake only.
    const bool connected = source.connected_at >= transfer_began_ || source.peer == nullptr;
    if (!connected && stats.bytes == 0 && stats.failures == 0) continue;
    if (stats.bytes == 0) work_[i].last_byte = std::max(work_[i].began, steady_now());
    const auto context =
        tracer_->record("source", phase_.context(), work_[i].began, work_[i].last_byte,
                        describe(source, stats), source.state.lost() ? source.state.cause() : "");
    record_rails(static_cast<transport::SourceIndex>(i), context, work_[i]);
  }
}

void PullTrace::record_rails(transport::SourceIndex source, const trace::Context& parent,
                             const Work& work) {
  std::map<std::string, transport::PathStats> rails;
  for (const transport::PathStats& path : batch_.paths) {
    if (path.source != source || path.home.empty()) continue;
    transport::PathStats& rail = rails[path.home];
    rail.bytes += path.bytes;
    rail.slices += path.slices;
    rail.failures += path.failures;
  }
  for (const auto& [name, rail] : rails) {
    tracer_->record("rail", parent, work.began, work.last_byte,
                    {{std::string(trace::kRail), name},
                     number("rekindle.bytes", rail.bytes),
                     number("rekindle.slices", rail.slices),
                     number("rekindle.failed_slices", rail.failures)});
  }
}

void PullTrace::end(const Result<TransferSummary>& outcome, const std::string& version,
                    const std::string& pull_id) {
  pull_.set(std::string(trace::kVersion), version);
  if (!pull_id.empty()) pull_.set(std::string(trace::kSubject), pull_id);
  if (outcome) {
    pull_.set("rekindle.bytes", outcome->bytes);
    pull_.set("rekindle.fetched_bytes", outcome->fetched_bytes);
    pull_.set("rekindle.resumed_bytes", outcome->resumed_bytes);
    pull_.set("rekindle.refetched_bytes", outcome->refetched_bytes);
  }
  go_on();
  phase_.end(outcome);
  pull_.end(outcome);
}

std::vector<proto::Span> PullTrace::spans() const {
  std::vector<proto::Span> spans;
  if (tracer_ == nullptr) return spans;
  const trace::Context& pull = pull_.context();
  for (const auto& span :
       trace::most_telling(tracer_->of_trace(pull.trace), pull, trace::kMostPullSpans)) {
    spans.push_back(trace::to_proto(span));
  }
  return spans;
}

}  // namespace rekindle::pull
