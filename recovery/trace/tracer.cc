#include "recovery/trace/tracer.h"

#include <algorithm>
#include <array>
#include <utility>

namespace rekindle::trace {

namespace {

// The wall clock was set, and not only looked at a little later.
constexpr std::chrono::milliseconds kWallMoved{1};

Context child_of(const Context& parent) {
  return {parent.valid() ? parent.trace : TraceId::random(), SpanId::random()};
}

// "qwen3" names "qwen3@41", too.
bool names(std::string_view text, std::string_view wanted) {
  return text.starts_with(wanted) && (text.size() == wanted.size() || text[wanted.size()] == '@');
}

}  // namespace

RunningSpan::RunningSpan(Tracer* tracer, std::string name, const Context& parent)
    : tracer_(tracer), began_(steady_now()) {
  span_.name = std::move(name);
  span_.context = tracer == nullptr ? parent : child_of(parent);
  if (parent.valid()) span_.parent = parent.span;
}

RunningSpan::RunningSpan(RunningSpan&& other) noexcept
    : tracer_(std::exchange(other.tracer_, nullptr)),
      span_(std::move(other.span_)),
      began_(other.began_) {}

RunningSpan& RunningSpan::operator=(RunningSpan&& other) noexcept {
  if (this == &other) return *this;
  end();
  tracer_ = std::exchange(other.tracer_, nullptr);
  span_ = std::move(other.span_);
  began_ = other.began_;
  return *this;
}

void RunningSpan::set(std::string key, std::string value) {
  if (tracer_ != nullptr) span_.attributes.push_back({std::move(key), std::move(value)});
}

void RunningSpan::set(std::string key, std::uint64_t value) {
  if (tracer_ == nullptr) return;
  span_.attributes.push_back({std::move(key), static_cast<std::int64_t>(value)});
}

void RunningSpan::end() {
  Tracer* const tracer = std::exchange(tracer_, nullptr);
  if (tracer != nullptr) tracer->finish(span_, began_, steady_now());
}

Tracer::Tracer(std::string service, std::string node, std::size_t most_spans)
    : service_(std::move(service)), node_(std::move(node)), most_spans_(most_spans) {}

void Tracer::tell(std::function<void(const Span&)> watcher) {
  const std::lock_guard lock(mutex_);
  watcher_ = std::move(watcher);
}

Context Tracer::record(std::string name, const Context& parent, TimePoint began, TimePoint ended,
                       std::vector<Attribute> attributes, std::string error) {
  Span span;
  span.context = child_of(parent);
  if (parent.valid()) span.parent = parent.span;
  span.name = std::move(name);
  span.attributes = std::move(attributes);
  span.error = std::move(error);
  const Context context = span.context;
  finish(std::move(span), began, ended);
  return context;
}

void Tracer::adopt(Span span) {
  const std::lock_guard lock(mutex_);
  keep(std::move(span));
}

// Spans have times of one clock. A clock each would have them overlap by the time between two
// looks.
void Tracer::finish(Span span, TimePoint began, TimePoint ended) {
  const std::chrono::nanoseconds offset =
      std::chrono::system_clock::now().time_since_epoch() - steady_now().time_since_epoch();
  span.duration = std::max<Duration>(ended - began, Duration::zero());
  span.service = service_;
  span.node = node_;
  const std::lock_guard lock(mutex_);
  if (std::chrono::abs(offset - wall_offset_) > kWallMoved) wall_offset_ = offset;
  span.start = began.time_since_epoch() + wall_offset_;
  if (watcher_) watcher_(span);
  keep(std::move(span));
}

void Tracer::keep(Span span) {
  if (!kept_.insert(span.context).second) return;
  if (spans_.size() >= most_spans_) {
    kept_.erase(spans_.front().context);
    spans_.pop_front();
  }
  spans_.push_back(std::move(span));
}

std::vector<Span> Tracer::of_trace(const TraceId& trace, std::size_t most) const {
  const std::lock_guard lock(mutex_);
  std::vector<Span> found;
  for (auto span = spans_.rbegin(); span != spans_.rend() && found.size() < most; ++span) {
    if (span->context.trace == trace) found.push_back(*span);
  }
  std::ranges::reverse(found);
  return found;
}

TraceId Tracer::find(std::string_view operation, std::string_view subject) const {
  const std::lock_guard lock(mutex_);
  for (auto span = spans_.rbegin(); span != spans_.rend(); ++span) {
    if (is_operation_on(*span, operation, subject)) return span->context.trace;
  }
  return {};
}

bool is_operation_on(const Span& span, std::string_view operation, std::string_view subject) {
  const std::string* const kind = span.text(kOperation);
  if (kind == nullptr || *kind != operation) return false;
  return std::ranges::any_of(std::array{kSubject, kVersion}, [&](std::string_view key) {
    const std::string* const text = span.text(key);
    return text != nullptr && names(*text, subject);
  });
}

}  // namespace rekindle::trace
