#pragma once

#include <string>
#include <vector>

#include "recovery/trace/span.h"

namespace rekindle::cli {

// One thing that an operation's spans show, as a sentence.
struct Finding {
  // which, outcome, pull, phases, sources, slow_source, slow_rail, capped, wait, failure, repeated,
  // bound, slow_rank, waited_for, late_rank, slow_host.
  std::string kind;
  std::string text;
  // What to do about it. "": nothing.
  std::string advice;
};

// Where the time of an operation (of TraceWanted) went, from its spans. `subject` is that of
// `rekindle explain`. If several operations fit, it is the newest of them, and the first finding
// names the others. Empty: the spans have none.
std::vector<Finding> explain(const std::string& operation, const std::string& subject,
                             const std::vector<trace::Span>& spans);

}  // namespace rekindle::cli
