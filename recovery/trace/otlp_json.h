#pragma once

#include <span>
#include <string>

#include "recovery/trace/span.h"

namespace rekindle::trace {

// The body of an OTLP/HTTP request in JSON (https://opentelemetry.io/docs/specs/otlp/): the spans
// of one process. Text that is not UTF-8 is mended.
std::string to_otlp_json(std::span<const Span> spans);

}  // namespace rekindle::trace
