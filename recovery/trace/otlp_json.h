#pragma once

#include <span>
#include <string>

#include "recovery/trace/span.h"

namespace rekindle::trace {

// The body of an OTLP/HTTP request in JSON (https://opentelemetry.io/docs/specs/otlp/): the spans
// of one process. Bytes outside UTF-8 are replaced.
std::string to_otlp_json(std::span<const Span> spans);

}  // namespace rekindle::trace
