#include "recovery/trace/trace_wire.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "src/base/blake3.h"
#include "src/base/text.h"

namespace rekindle::trace {

namespace {

constexpr std::size_t kMostAnswered = 4096;
constexpr int kMostAttributes = 32;
constexpr std::size_t kMostAnsweredBytes = std::size_t{8} << 20;
// What is more than this was not measured. Sums of many still fit 63 bits.
constexpr std::uint64_t kLatestStart = std::uint64_t{1} << 62;
constexpr std::uint64_t kLongestSpan = std::uint64_t{30} * 86400 * 1'000'000'000;
constexpr std::int64_t kLargestNumber = std::int64_t{1} << 50;

std::string shortened(std::string_view text) { return std::string(cut_text(text, kMostTextBytes)); }

// A span below the chosen one, with the order in which it is worth its place.
struct Ranked {
  const Span* span = nullptr;
  std::size_t depth = 0;
  // Its phase, source and rail.
  std::string kind = {};
  // The number of longer spans of this kind.
  std::size_t longer = 0;
};

std::string kind_of(const Span& span, const std::string& parent) {
  std::string kind = parent + "\n" + span.name;
  for (const std::string_view key : {kSource, kRail, kWait}) {
    const std::string* const text = span.text(key);
    if (text != nullptr) kind.append("\n").append(*text);
  }
  return kind;
}

// The phases of an operation do not take more than this part of the places.
constexpr std::size_t kPhasesPart = 2;

std::vector<Ranked> ranked_below(const std::vector<Span>& all, const Context& top) {
  std::multimap<SpanId, const Span*> children;
  std::vector<Ranked> ranked;
  for (const Span& span : all) {
    if (span.context == top) ranked.push_back({&span});
    if (span.context.trace == top.trace) children.emplace(span.parent, &span);
  }
  std::set<SpanId> seen{top.span};
  for (std::size_t i = 0; i < ranked.size(); ++i) {
    const auto [first, last] = children.equal_range(ranked[i].span->context.span);
    for (auto child = first; child != last; ++child) {
      if (!seen.insert(child->second->context.span).second) continue;
      std::string kind = kind_of(*child->second, ranked[i].kind);
      ranked.push_back({child->second, ranked[i].depth + 1, std::move(kind)});
    }
  }
  std::ranges::stable_sort(ranked, [](const Ranked& a, const Ranked& b) {
    return std::pair(a.depth, b.span->duration) < std::pair(b.depth, a.span->duration);
  });
  std::map<std::string_view, std::size_t> known;
  for (Ranked& one : ranked) one.longer = known[one.kind]++;
  return ranked;
}

}  // namespace

Context publication_context(const ModelVersion& id, std::uint64_t roster, const Incarnation& lead) {
  const std::string what = fmt::format("{} {} {}", id.to_string(), roster, lead.hex());
  const std::string bytes = blake3(as_bytes(what)).to_bytes();
  return Context::from_bytes(std::string_view(bytes).substr(0, 24)).value_or(Context());
}

std::vector<Span> most_telling(const std::vector<Span>& all, const Context& top, std::size_t most) {
  auto ranked = ranked_below(all, top);
  std::ranges::stable_sort(ranked, [](const Ranked& a, const Ranked& b) {
    return std::pair(a.depth > 1, a.longer) < std::pair(b.depth > 1, b.longer);
  });
  const auto deep = std::ranges::find_if(ranked, [](const Ranked& one) { return one.depth > 1; });
  const auto phases = static_cast<std::size_t>(deep - ranked.begin());
  const std::size_t rest = ranked.size() - phases;
  const std::size_t most_phases = std::max(most / kPhasesPart, most - std::min(most, rest));
  std::vector<const Span*> chosen;
  std::set<SpanId> known;
  // A span may come before its parent, so there is another turn for those that had none yet.
  for (bool added = true; added;) {
    added = false;
    for (std::size_t i = 0; i < ranked.size() && chosen.size() < most; ++i) {
      if (i < phases && chosen.size() >= most_phases) continue;
      const Span& span = *ranked[i].span;
      if (known.contains(span.context.span)) continue;
      if (ranked[i].depth > 0 && !known.contains(span.parent)) continue;
      known.insert(span.context.span);
      chosen.push_back(&span);
      added = true;
    }
  }
  std::ranges::stable_sort(chosen, {}, &Span::start);
  std::vector<Span> spans;
  for (const Span* span : chosen) spans.push_back(*span);
  return spans;
}

proto::Span to_proto(const Span& span) {
  proto::Span out;
  out.set_trace_id(span.context.trace.to_bytes());
  out.set_span_id(span.context.span.to_bytes());
  if (!span.parent.is_nil()) out.set_parent_id(span.parent.to_bytes());
  out.set_name(span.name);
  out.set_service(span.service);
  out.set_node(span.node);
  out.set_start_unix_ns(static_cast<std::uint64_t>(span.start.count()));
  out.set_duration_ns(static_cast<std::uint64_t>(span.duration.count()));
  for (const Attribute& attribute : span.attributes) {
    auto& added = *out.add_attributes();
    added.set_key(attribute.key);
    if (const auto* text = std::get_if<std::string>(&attribute.value)) {
      added.set_text(shortened(*text));
    } else {
      added.set_number(std::get<std::int64_t>(attribute.value));
    }
  }
  out.set_error(shortened(span.error));
  return out;
}

Result<Span> from_proto(const proto::Span& message) {
  Span span;
  const auto context = Context::from_bytes(message.trace_id() + message.span_id());
  const bool has_parent = !message.parent_id().empty();
  if (!context || message.trace_id().size() != span.context.trace.bytes.size() ||
      (has_parent && message.parent_id().size() != span.parent.bytes.size())) {
    return fail(ErrorCode::kInvalid, "a span's ids have a wrong length");
  }
  span.context = *context;
  if (has_parent) {
    std::memcpy(span.parent.bytes.data(), message.parent_id().data(), span.parent.bytes.size());
  }
  span.name = shortened(message.name());
  span.service = shortened(message.service());
  span.node = shortened(message.node());
  span.start = std::chrono::nanoseconds(std::min(message.start_unix_ns(), kLatestStart));
  span.duration = std::chrono::nanoseconds(std::min(message.duration_ns(), kLongestSpan));
  for (int i = 0; i < std::min(message.attributes_size(), kMostAttributes); ++i) {
    const auto& attribute = message.attributes(i);
    Attribute& added = span.attributes.emplace_back();
    added.key = shortened(attribute.key());
    if (attribute.has_text()) {
      added.value = shortened(attribute.text());
    } else {
      added.value = std::clamp<std::int64_t>(attribute.number(), 0, kLargestNumber);
    }
  }
  span.error = shortened(message.error());
  return span;
}

Result<proto::TraceResponse> find_trace(const Tracer& tracer, const proto::TraceRequest& request) {
  TraceId trace;
  if (!request.trace_id().empty()) {
    TRY(trace, TraceId::from_bytes(request.trace_id()));
  } else {
    trace = tracer.find(request.operation(), request.subject());
  }
  const auto spans = trace.is_nil() ? std::vector<Span>() : tracer.of_trace(trace, kMostAnswered);
  if (spans.empty()) {
    return fail(ErrorCode::kNotFound,
                "no span of {} is kept here: it has not ended yet, was long ago, or this process "
                "has started since",
                request.trace_id().empty() ? request.operation() + " " + request.subject()
                                           : "trace " + trace.hex());
  }
  proto::TraceResponse response;
  // The newest ones, if there are more than an answer can have.
  std::size_t bytes = 0;
  auto first = spans.end();
  while (first != spans.begin() && bytes <= kMostAnsweredBytes) {
    bytes += to_proto(*--first).ByteSizeLong();
  }
  for (; first != spans.end(); ++first) *response.add_spans() = to_proto(*first);
  return response;
}

}  // namespace rekindle::trace
