#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "recovery/trace/span.h"
#include "src/base/result.h"
#include "tools/cli/cli_session.h"

namespace rekindle::cli {

// An operation that left spans.
struct TraceWanted {
  // pull, update, recovery; "": any, by the id of its trace.
  std::string operation;
  // The id of a pull or of a trace, MODEL[@VERSION] of a pull or an update, or an instance.
  std::string subject;
  // "HOST:PORT" of the agent of a recovery. "": this host's.
  std::string agent;
};

// The span is an operation of this kind on this subject, or in the trace of this id.
bool is_wanted(const trace::Span& span, const std::string& operation, const std::string& subject);

// The operation that a word means: 32 hexadecimal digits, MODEL@VERSION, or else an instance.
TraceWanted trace_wanted(const std::string& word);

struct CollectedTrace {
  std::vector<trace::Span> spans;  // by their start
  // Processes that did not answer, and why.
  std::vector<std::string> silent;
};
// Asks the coordinator and the agent of this host, or the agent of a recovery, and then the agents
// that the spans name. Once `patience` is over, no further process is asked, and those that are
// left are named as silent.
Result<CollectedTrace> collect_trace(const Settings& settings, TraceWanted wanted,
                                     std::chrono::milliseconds patience = std::chrono::seconds(15));

// For Perfetto and chrome://tracing: a process for each process, and a track for each source and
// rank. Spans that overlap lie on tracks of their own.
std::string to_chrome_trace(const std::vector<trace::Span>& spans);

}  // namespace rekindle::cli
