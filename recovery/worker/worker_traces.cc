#include "recovery/worker/worker_traces.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include <fmt/format.h>

namespace rekindle::worker {

namespace {

// Twice the default of --max-backoff.
constexpr std::chrono::seconds kLongestPause{60};

trace::Span recovery_span(const Event& event) {
  trace::Span span;
  span.context = event.trace.span;
  span.parent = event.trace.parent;
  span.name = "recovery";
  span.attributes = {
      {std::string(trace::kOperation), std::string("recovery")},
      {std::string(trace::kSubject), event.instance},
      {"rekindle.rung", event.rung},
      {"rekindle.pid", static_cast<std::int64_t>(event.pid)},
  };
  auto& attributes = span.attributes;
  if (event.rank) attributes.push_back({std::string(trace::kRank), std::to_string(*event.rank)});
  if (event.version) {
    attributes.push_back({std::string(trace::kVersion), event.version->to_string()});
  }
  // Ranks may share a trace.
  const trace::Context& puller = event.trace.puller;
  const bool pulled = event.rung == to_string(Rung::kPeers);
  if (pulled && puller.valid() && puller != span.context) {
    attributes.push_back({std::string(trace::kPullTrace), puller.trace.hex()});
  }
  if (event.kind != "committed") span.error = event.why;
  return span;
}

}  // namespace

void record_recovery(trace::Tracer& tracer, const Event& event, TimePoint now) {
  const bool over = event.kind == "committed" || event.kind == "failed" || event.kind == "died";
  if (!over || !event.trace.span.valid() || !event.phases) return;
  Duration elapsed = event.trace.restart;
  for (const Duration took : *event.phases) elapsed += took;
  TimePoint at = now - elapsed;
  tracer.record(recovery_span(event), at, now);
  const auto record = [&](std::string name, Duration took) {
    // A phase that did not take place, such as the detection of a death before the first attach.
    if (took <= Duration::zero()) return;
    tracer.record(std::move(name), event.trace.span, at, at + took);
    at += took;
  };
  for (std::size_t i = 0; i < kPhaseCount; ++i) {
    const auto phase = static_cast<Phase>(i);
    record(std::string(to_string(phase)), (*event.phases)[i]);
    if (phase == Phase::kDetect) record("restart", event.trace.restart);
  }
}

bool was_wanted(Duration gone, std::optional<Duration> age) {
  return !age || gone <= *age + kLongestPause;
}

}  // namespace rekindle::worker
