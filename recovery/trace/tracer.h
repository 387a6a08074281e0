#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "recovery/trace/span.h"
#include "src/base/clock.h"
#include "src/base/result.h"

namespace rekindle::trace {

class Tracer;

// A span that runs. It ends when end() is called or the object goes. It must not outlive its
// tracer. Without a tracer it does nothing, and its context is that of its parent. One thread.
class RunningSpan {
 public:
  RunningSpan() = default;
  RunningSpan(Tracer* tracer, std::string name, const Context& parent);
  RunningSpan(RunningSpan&& other) noexcept;
  RunningSpan& operator=(RunningSpan&& other) noexcept;
  ~RunningSpan() { end(); }

  // The parent of spans that belong to this one; also after the end.
  const Context& context() const { return span_.context; }
  void set(std::string key, std::string value);
  void set(std::string key, std::uint64_t value);
  // The span failed if `outcome` is an error.
  template <typename T>
  void end(const Result<T>& outcome) {
    if (!outcome) span_.error = outcome.error().message();
    end();
  }
  void end();

 private:
  Tracer* tracer_ = nullptr;  // until it has ended
  Span span_;
  TimePoint began_{};
};

// The newest spans of one process, bounded in number. Any thread.
class Tracer {
 public:
  static constexpr std::size_t kMostSpans = 8192;

  // `service`: "agent"; `node`: its id.
  Tracer(std::string service, std::string node, std::size_t most_spans = kMostSpans);

  // Sees each span of this process when it has ended, in the thread that ended it.
  void tell(std::function<void(const Span&)> watcher);
  // A span of this process that ran from `began` to `ended`. Returns its context.
  Context record(std::string name, const Context& parent, TimePoint began, TimePoint ended,
                 std::vector<Attribute> attributes = {}, std::string error = "");
  // As above, with the context and the parent of `span` (nil: none). For a span that others have
  // named as their parent already.
  void record(Span span, TimePoint began, TimePoint ended) {
    finish(std::move(span), began, ended);
  }
  // Keeps a span of another process, once.
  void adopt(Span span);

  // The newest spans of the trace, at most `most`, oldest first.
  std::vector<Span> of_trace(const TraceId& trace, std::size_t most = kMostSpans) const;
  // The trace of the newest one (is_operation_on). nil: none.
  TraceId find(std::string_view operation, std::string_view subject) const;

 private:
  friend class RunningSpan;
  void finish(Span span, TimePoint began, TimePoint ended);
  void keep(Span span);

  const std::string service_;
  const std::string node_;
  const std::size_t most_spans_;
  mutable std::mutex mutex_;
  std::function<void(const Span&)> watcher_;  // guarded by mutex_
  std::deque<Span> spans_;                    // guarded by mutex_; oldest first
  std::set<Context> kept_;                    // guarded by mutex_; of spans_
  // From the steady clock to the Unix epoch. Guarded by mutex_.
  std::chrono::nanoseconds wall_offset_{};
};

// The span is an operation of this kind ("pull") on this subject: an id, an instance, a version or
// a model.
bool is_operation_on(const Span& span, std::string_view operation, std::string_view subject);

// The attributes of an operation.
inline constexpr std::string_view kOperation = "rekindle.operation";
inline constexpr std::string_view kSubject = "rekindle.subject";
inline constexpr std::string_view kVersion = "rekindle.version";
// Names the agent that a pull reads from.
inline constexpr std::string_view kSource = "rekindle.source";
// Names the NIC of a part of a source's bytes.
inline constexpr std::string_view kRail = "rekindle.rail";
// Says for what a pull waited: see pull::PullTrace.
inline constexpr std::string_view kWait = "rekindle.wait";
// Of a recovery whose bytes came with the pull of another one: the trace of that, in hex digits.
inline constexpr std::string_view kPullTrace = "rekindle.pull_trace";
// Names a rank of an update: "rank 1 of i on b".
inline constexpr std::string_view kRank = "rekindle.rank";
// "unknown": the phases of the rank stand one after the other, because it has not said when they
// began.
inline constexpr std::string_view kPhaseStarts = "rekindle.phase_starts";

}  // namespace rekindle::trace
