#include "recovery/trace/span.h"

#include <algorithm>
#include <cstring>

namespace rekindle::trace {

namespace {

const Attribute* find(const Span& span, std::string_view key) {
  const auto found = std::ranges::find(span.attributes, key, &Attribute::key);
  return found == span.attributes.end() ? nullptr : &*found;
}

}  // namespace

SpanId SpanId::random() {
  SpanId id;
  fill_random(id.bytes.data(), id.bytes.size());
  return id;
}

// "00-", 32 digits, "-", 16 digits, "-", 2 digits. Later versions may have more behind that.
std::optional<Context> Context::parse(std::string_view traceparent) {
  constexpr std::size_t kLength = 55;
  const auto is_digit = [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); };
  if (traceparent.size() < kLength) return std::nullopt;
  for (std::size_t i = 0; i < kLength; ++i) {
    const bool dash = i == 2 || i == 35 || i == 52;
    if (dash ? traceparent[i] != '-' : !is_digit(traceparent[i])) return std::nullopt;
  }
  const std::string_view version = traceparent.substr(0, 2);
  if (version == "ff") return std::nullopt;
  const bool longer = traceparent.size() > kLength;
  if (longer && (version == "00" || traceparent[kLength] != '-')) return std::nullopt;
  Context context;
  if (!from_hex(traceparent.substr(3, 32), context.trace.bytes.data(), 16)) return std::nullopt;
  if (!from_hex(traceparent.substr(36, 16), context.span.bytes.data(), 8)) return std::nullopt;
  if (!context.valid()) return std::nullopt;
  return context;
}

std::optional<Context> Context::from_bytes(std::string_view bytes) {
  Context context;
  if (bytes.size() != context.trace.bytes.size() + context.span.bytes.size()) return std::nullopt;
  std::memcpy(context.trace.bytes.data(), bytes.data(), context.trace.bytes.size());
  std::memcpy(context.span.bytes.data(), bytes.data() + context.trace.bytes.size(),
              context.span.bytes.size());
  if (!context.valid()) return std::nullopt;
  return context;
}

const std::string* Span::text(std::string_view key) const {
  const Attribute* found = find(*this, key);
  return found == nullptr ? nullptr : std::get_if<std::string>(&found->value);
}

std::int64_t Span::number(std::string_view key) const {
  const Attribute* found = find(*this, key);
  const auto* value = found == nullptr ? nullptr : std::get_if<std::int64_t>(&found->value);
  return value == nullptr ? 0 : *value;
}

}  // namespace rekindle::trace
