#include "recovery/worker/worker_traces.h"

#include <string>
#include <vector>

namespace rekindle::worker {

void record_recovery(trace::Tracer& tracer, const Event& event, TimePoint now) {
  if (event.kind != "committed" || !event.phases) return;
  Duration elapsed{};
  for (const Duration took : *event.phases) elapsed += took;
  std::vector<trace::Attribute> attributes{
      {std::string(trace::kOperation), std::string("recovery")},
      {std::string(trace::kSubject), event.instance},
      {"rekindle.rung", event.rung},
      {"rekindle.pid", static_cast<std::int64_t>(event.pid)},
  };
  if (event.rank) attributes.push_back({std::string(trace::kRank), std::to_string(*event.rank)});
  if (event.version) attributes.push_back({"rekindle.version", event.version->to_string()});
  TimePoint at = now - elapsed;
  const auto recovery = tracer.record("recovery", {}, at, now, std::move(attributes));
  for (std::size_t i = 0; i < kPhaseCount; ++i) {
    const Duration took = (*event.phases)[i];
    // A phase that did not take place, such as the detection of a death before the first attach.
    if (took <= Duration::zero()) continue;
    tracer.record(std::string(to_string(static_cast<Phase>(i))), recovery, at, at + took);
    at += took;
  }
}

}  // namespace rekindle::worker
