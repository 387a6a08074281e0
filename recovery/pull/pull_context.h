#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "recovery/pull/pull_environment.h"
#include "recovery/pull/pull_policy.h"
#include "recovery/pull/pull_trace.h"
#include "recovery/pull/pull_types.h"
#include "recovery/pull/source_finder.h"
#include "recovery/pull/source_table.h"
#include "src/async/task.h"
#include "src/base/clock.h"
#include "src/tensor/checkpoint.h"
#include "src/tensor/layout.h"
#include "transport/engine.h"

namespace rekindle::pull {

// Collects the progress of a pull for its user and for the coordinator: phases, bytes, and a line
// for each source and transport over all transfers. Control thread only.
class PullProgress {
 public:
  PullProgress(std::string model, OnProgress on_progress, trace::Tracer* tracer);

  // The clock of the first phase starts.
  void start(const PullRequest& request, TimePoint now);
  void set_version(const ModelVersion& id) { id_ = id; }
  void set_total(std::uint64_t bytes) { bytes_total_ = bytes; }
  void enter_phase(const std::string& name, TimePoint now);
  // Sends the progress now. `note`: one line for the user, or "".
  void show(std::string note = "");

  // Before each transfer: bytes that have verified already.
  void set_verified(std::uint64_t bytes) { bytes_done_ = bytes; }
  void begin_transfer(SourceTable& sources);
  void end_transfer(const SourceTable& sources) { trace_.end_transfer(sources); }
  void tick(const transport::BatchProgress& batch, SourceTable& sources);
  // A source that no transfer has seen, because it does not answer.
  void no_answer_of(const proto::Source& source, const Error& why);

  std::uint64_t bytes_total() const { return bytes_total_; }
  // For the coordinator.
  PullReport report(const SourceTable& sources) const;
  // Fills in the phases, the time and the sources of a summary.
  void summarize(TransferSummary& summary, TimePoint now) const;
  PullTrace& trace() { return trace_; }

 private:
  void send(const transport::BatchProgress& batch, std::string note);
  void add(const ActiveSource& source, const transport::SourceStats& stats);

  const std::string model_;
  const OnProgress on_progress_;
  PullTrace trace_;
  ModelVersion id_;
  std::string phase_ = "resolve";
  // Phases that have ended. A phase that comes again adds to its time.
  std::vector<Phase> phases_;
  TimePoint started_{};
  TimePoint phase_started_{};
  std::uint64_t bytes_total_ = 0;
  // Bytes that had verified before the current transfer, and in it.
  std::uint64_t bytes_done_ = 0;
  std::uint64_t batch_bytes_ = 0;
  // By node id.
  std::map<std::string, proto::SourceReport> unanswered_;
  // By source and transport: now, and when the current transfer began.
  std::map<std::string, SourceLine> lines_;
  std::map<std::string, SourceLine> lines_before_;
};

// The target of a pull. TargetResolver fills it in from top to bottom.
struct PullTarget {
  Resolved resolved;
  std::shared_ptr<const Checkpoint> checkpoint;
  // The wanted boxes, and their place in the copy.
  std::shared_ptr<const PackedLayout> wanted;

  const Layout& layout() const { return wanted->layout; }
  std::shared_ptr<const Layout> shared_layout() const { return {wanted, &wanted->layout}; }
};

// The state that the parts of one pull share. The job owns it.
struct PullContext {
  const PullEnvironment& environment;
  const PullRequest request;
  const PullTimes times;
  SourceFinder finder;
  Silence silence;
  PullProgress progress;
  PullTarget target = {};

  // Waits for the threads of the plans. That time is no silence of the sources.
  template <typename T>
  async::Task<Result<T>> wait_for(async::Task<Result<T>> table) {
    const TimePoint began = steady_now();
    auto outcome = co_await std::move(table);
    silence.forgive(steady_now() - began);
    co_return outcome;
  }
};

}  // namespace rekindle::pull
