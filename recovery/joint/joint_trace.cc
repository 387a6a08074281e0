#include "recovery/joint/joint_trace.h"

#include <utility>

#include "recovery/trace/trace_wire.h"

namespace rekindle::joint {

namespace {

// Of one rank that leaves and comes back again and again.
constexpr std::size_t kMostPhases = 16;

}  // namespace

void JointTrace::close(Phases& phases) {
  if (!phases.empty() && phases.back().ended == TimePoint()) phases.back().ended = steady_now();
}

void JointTrace::enter(Phases& phases, std::string name) {
  close(phases);
  if (phases.size() < kMostPhases) phases.push_back({std::move(name), steady_now(), {}});
}

std::map<std::string, Duration> JointTrace::took() const {
  std::map<std::string, Duration> took;
  for (const Phase& phase : phases_) took[phase.name] += phase.ended - phase.began;
  return took;
}

void JointTrace::end_phase(std::uint32_t rank) {
  const auto found = ranks_.find(rank);
  if (found != ranks_.end()) close(found->second);
}

void JointTrace::record(const trace::Context& parent, const std::string& name, Phases& phases,
                        std::vector<trace::Attribute> attributes, const std::string& error) {
  if (phases.empty()) return;
  close(phases);
  const auto context = tracer_->record(name, parent, phases.front().began, phases.back().ended,
                                       std::move(attributes), error);
  for (const Phase& phase : phases) {
    tracer_->record(phase.name, context, phase.began, phase.ended);
  }
}

void JointTrace::end(const Roster& roster, const Result<void>& outcome) {
  close(phases_);
  if (tracer_ == nullptr || roster.number == 0 || phases_.empty()) return;
  const auto lead = Incarnation::from_bytes(roster.hosts.front().node.incarnation());
  if (!lead) return;
  const std::string error = outcome ? "" : outcome.error().message();
  trace::Span span;
  span.context = trace::publication_context(roster.id, roster.number, *lead);
  span.name = "publication";
  span.error = error;
  span.attributes = {{std::string(trace::kOperation), std::string("publish")},
                     {std::string(trace::kSubject), roster.id.to_string()},
                     {"rekindle.hosts", static_cast<std::int64_t>(roster.hosts.size())}};
  const trace::Context publication = span.context;
  if (roster.leads()) tracer_->record(std::move(span), phases_.front().began, phases_.back().ended);
  record(publication, "share", phases_, {}, error);
  for (auto& [rank, phases] : ranks_) {
    record(publication, "rank", phases,
           {{std::string(trace::kRank),
             fmt::format("rank {} on {}", rank, roster.hosts[roster.self].node.node_id())}},
           "");
  }
}

}  // namespace rekindle::joint
