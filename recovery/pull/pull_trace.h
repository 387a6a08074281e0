#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "proto/trace.pb.h"
#include "recovery/pull/pull_types.h"
#include "recovery/pull/source_table.h"
#include "recovery/trace/tracer.h"
#include "src/base/clock.h"
#include "transport/engine.h"

namespace rekindle::pull {

// The spans of one pull (docs/internals/tracing.md): the pull, its phases, and what each source and
// rail did in each transfer. Without a tracer there are none. Control thread only.
class PullTrace {
 public:
  explicit PullTrace(trace::Tracer* tracer) : tracer_(tracer) {}

  // The first phase begins.
  void begin(const PullRequest& request, const std::string& phase);
  void enter_phase(const std::string& phase);
  // The parent of what sources and the coordinator do for the pull.
  const trace::Context& context() const { return pull_.context(); }
  const trace::Context& phase() const { return phase_.context(); }
  // The pull waits for this, until it waits for something else, goes on, or its phase ends:
  // "queue", a place at a source; "source", one that has the bytes; "holders", which verify their
  // copies; "hold", its workers, which hold the rest back; "host", another pull of this host that
  // fetches the same tables.
  void wait_for(const std::string& what);
  void go_on();

  void begin_transfer(TimePoint now);
  void look(const transport::BatchProgress& batch, const SourceTable& sources, TimePoint now);
  void end_transfer(const SourceTable& sources);

  // `version`: as far as it is known. `pull_id`: "" if no coordinator gave one.
  void end(const Result<TransferSummary>& outcome, const std::string& version,
           const std::string& pull_id);
  // After the end: the spans of this pull, as many as a message may have.
  std::vector<proto::Span> spans() const;

 private:
  struct Work {
    TimePoint began{};
    TimePoint last_byte{};
    std::uint64_t bytes = 0;
  };
  void record_rails(transport::SourceIndex source, const trace::Context& parent, const Work& work);

  trace::Tracer* const tracer_;
  trace::RunningSpan pull_;
  trace::RunningSpan phase_;
  trace::RunningSpan wait_;
  std::string waits_for_;  // while wait_ runs
  // Of the transfer that runs, by the index of the source.
  std::vector<Work> work_;
  transport::BatchProgress batch_;
  TimePoint transfer_began_{};
};

}  // namespace rekindle::pull
