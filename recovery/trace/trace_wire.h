#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "proto/trace.pb.h"
#include "recovery/trace/tracer.h"
#include "src/base/ids.h"
#include "src/base/result.h"

// Spans in messages. Long text is cut; ids of a wrong length are an error.
namespace rekindle::trace {

// What a puller may send when it closes its pull.
inline constexpr std::size_t kMostPullSpans = 64;
// Of an attribute or an error. Longer text is cut.
inline constexpr std::size_t kMostTextBytes = 512;
// The attribute that names agents which may have spans of their own, with a space between them.
inline constexpr std::string_view kSources = "rekindle.sources";

// The span of a joint publication. Whoever knows the roster knows it: no message carries it.
Context publication_context(const ModelVersion& id, std::uint64_t roster, const Incarnation& lead);

// The spans of `all` at and below `top`, at most `most`, each with its parent. If there are more,
// the phases come first, and then the longest spans of each source and rail.
std::vector<Span> most_telling(const std::vector<Span>& all, const Context& top, std::size_t most);

proto::Span to_proto(const Span& span);
Result<Span> from_proto(const proto::Span& message);

// The answer of a process that keeps spans. kNotFound: none of them belong to the operation.
Result<proto::TraceResponse> find_trace(const Tracer& tracer, const proto::TraceRequest& request);

}  // namespace rekindle::trace
