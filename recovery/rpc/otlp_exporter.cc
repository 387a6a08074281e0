#include "recovery/rpc/otlp_exporter.h"

#include <algorithm>
#include <utility>

#include "recovery/trace/otlp_json.h"
#include "src/base/log.h"

namespace rekindle::rpc {

namespace {

constexpr std::string_view kScheme = "http://";
constexpr std::string_view kPath = "/v1/traces";
constexpr int kTooManyRequests = 429;

}  // namespace

Result<OtlpTarget> OtlpTarget::parse(std::string_view url) {
  if (url.starts_with("https://")) {
    return fail(ErrorCode::kInvalid,
                "--otlp {}: TLS is not supported yet; use http:// and a collector on this host",
                url);
  }
  if (!url.starts_with(kScheme)) {
    return fail(ErrorCode::kInvalid, "--otlp {}: not a URL such as http://localhost:4318", url);
  }
  const std::string_view rest = url.substr(kScheme.size());
  const std::size_t slash = std::min(rest.find('/'), rest.size());
  OtlpTarget target;
  auto server = HostPort::parse(rest.substr(0, slash));
  if (!server) return fail(std::move(server).error().with_context("--otlp " + std::string(url)));
  target.server = std::move(*server);
  target.path = rest.substr(slash);
  const auto unusual = [](char c) { return c <= ' ' || c >= 0x7f; };
  if (std::ranges::any_of(target.path, unusual)) {
    return fail(ErrorCode::kInvalid, "--otlp {}: the path has a space or a special character", url);
  }
  if (target.path.empty() || target.path == "/") target.path = kPath;
  return target;
}

OtlpExporter::OtlpExporter(OtlpTarget target) : OtlpExporter(std::move(target), Options()) {}

OtlpExporter::OtlpExporter(OtlpTarget target, Options options)
    : target_(std::move(target)), options_(options), client_(target_.server) {
  thread_ = std::thread([this] { run(); });
}

OtlpExporter::~OtlpExporter() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void OtlpExporter::add(const trace::Span& span) {
  const std::lock_guard lock(mutex_);
  if (queue_.size() >= options_.queue) {
    ++dropped_;
    return;
  }
  queue_.push_back(span);
  if (queue_.size() == 1 || queue_.size() == options_.batch) changed_.notify_all();
}

std::uint64_t OtlpExporter::sent() const {
  const std::lock_guard lock(mutex_);
  return sent_;
}

std::uint64_t OtlpExporter::dropped() const {
  const std::lock_guard lock(mutex_);
  return dropped_;
}

// A batch stays in the queue until the collector has taken or refused it.
void OtlpExporter::run() {
  std::unique_lock lock(mutex_);
  bool told = false;
  for (bool last = false; !last;) {
    changed_.wait(lock, [this] { return ending_ || !queue_.empty(); });
    changed_.wait_for(lock, options_.gather,
                      [this] { return ending_ || queue_.size() >= options_.batch; });
    last = ending_;
    if (queue_.empty()) continue;
    const std::size_t size = last ? queue_.size() : std::min(options_.batch, queue_.size());
    const auto end = queue_.begin() + static_cast<std::ptrdiff_t>(size);
    const std::vector<trace::Span> batch(queue_.begin(), end);
    lock.unlock();
    auto answer =
        client_.post(target_.path, trace::to_otlp_json(batch), steady_now() + options_.deadline);
    lock.lock();
    const bool later = !answer || answer->status >= 500 || answer->status == kTooManyRequests;
    const bool taken = answer && answer->status < 300;
    if (!taken && !std::exchange(told, true)) {
      log::warn("trace.not_sent", "collector", target_.server.to_string(), "why",
                answer ? fmt::format("HTTP {}", answer->status) : answer.error().message());
    }
    if (taken) told = false;
    if (later && !last) {
      changed_.wait_for(lock, options_.pause, [this] { return ending_; });
      continue;
    }
    queue_.erase(queue_.begin(), queue_.begin() + static_cast<std::ptrdiff_t>(size));
    (taken ? sent_ : dropped_) += size;
  }
}

Result<std::unique_ptr<Tracing>> Tracing::create(std::string service, std::string node,
                                                 const std::string& url) {
  std::unique_ptr<Tracing> tracing(new Tracing(std::move(service), std::move(node)));
  if (url.empty()) return tracing;
  TRY(auto target, OtlpTarget::parse(url));
  tracing->exporter_ = std::make_unique<OtlpExporter>(std::move(target));
  tracing->tracer.tell(
      [exporter = tracing->exporter_.get()](const trace::Span& span) { exporter->add(span); });
  return tracing;
}

void Tracing::read(metrics::Readings& readings) const {
  const char* const name = "rekindle_trace_spans_total";
  const char* const help = "Spans for the collector of --otlp, by what became of them.";
  const auto count = [&](const char* result, std::uint64_t spans) {
    readings.counter(name, help, static_cast<double>(spans), {{"result", result}});
  };
  count("sent", exporter_ == nullptr ? 0 : exporter_->sent());
  count("dropped", exporter_ == nullptr ? 0 : exporter_->dropped());
}

}  // namespace rekindle::rpc
