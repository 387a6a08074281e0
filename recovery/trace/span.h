#pragma once

#include <array>
#include <chrono>
#include <compare>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "src/base/ids.h"

// Spans of operations, as in OpenTelemetry: docs/internals/tracing.md.
namespace rekindle::trace {

using TraceId = Id128<struct TraceIdTag>;

struct SpanId {
  std::array<std::uint8_t, 8> bytes{};

  static SpanId random();
  std::string to_bytes() const { return {bytes.begin(), bytes.end()}; }
  std::string hex() const { return to_hex(bytes.data(), bytes.size()); }
  bool is_nil() const { return *this == SpanId{}; }
  auto operator<=>(const SpanId&) const = default;
};

// Names a span everywhere. An operation gives it to the operations that it causes.
struct Context {
  TraceId trace;
  SpanId span;

  // Of a traceparent header (https://www.w3.org/TR/trace-context/), or of 24 bytes. nullopt: it is
  // none, or an id is zero.
  static std::optional<Context> parse(std::string_view traceparent);
  static std::optional<Context> from_bytes(std::string_view bytes);
  std::string to_bytes() const { return trace.to_bytes() + span.to_bytes(); }
  // Without one there is no parent.
  bool valid() const { return !trace.is_nil() && !span.is_nil(); }
  auto operator<=>(const Context&) const = default;
};

struct Attribute {
  std::string key;
  std::variant<std::string, std::int64_t> value;
  bool operator==(const Attribute&) const = default;
};

// A span that has ended.
struct Span {
  Context context;
  SpanId parent;  // nil: none
  std::string name;
  // The process that the span is of: "agent", and its node id.
  std::string service;
  std::string node;
  std::chrono::nanoseconds start{};  // since the Unix epoch
  std::chrono::nanoseconds duration{};
  std::vector<Attribute> attributes;
  std::string error;  // "": it succeeded

  std::chrono::nanoseconds end() const { return start + duration; }
  // nullptr, 0: it has no such attribute of this type.
  const std::string* text(std::string_view key) const;
  std::int64_t number(std::string_view key) const;
};

}  // namespace rekindle::trace
