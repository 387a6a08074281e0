#include "recovery/metrics/metrics.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <chrono>
#include <utility>

#include <prometheus/text_serializer.h>

#include "src/base/version.h"

namespace rekindle::metrics {

namespace {

constexpr std::array kCodes{ErrorCode::kInvalid,   ErrorCode::kNotFound, ErrorCode::kTimeout,
                            ErrorCode::kPeerLost,  ErrorCode::kStale,    ErrorCode::kCorrupt,
                            ErrorCode::kExhausted, ErrorCode::kDenied,   ErrorCode::kUnavailable,
                            ErrorCode::kInternal};

}  // namespace

void Readings::add(prometheus::MetricType type, const std::string& name, const std::string& help,
                   double value, const prometheus::Labels& labels) {
  auto& family = families_[name];
  family.name = name;
  family.help = help;
  family.type = type;
  prometheus::ClientMetric metric;
  for (const auto& [label, text] : labels) metric.label.push_back({label, text});
  if (type == prometheus::MetricType::Counter) {
    metric.counter.value = value;
  } else {
    metric.gauge.value = value;
  }
  family.metric.push_back(std::move(metric));
}

void Readings::gauge_by_state(const std::string& name, const std::string& help,
                              const std::vector<std::string_view>& states,
                              const std::map<std::string_view, double>& counts) {
  for (const std::string_view state : states) {
    const auto found = counts.find(state);
    gauge(name, help, found == counts.end() ? 0 : found->second, {{"state", std::string(state)}});
  }
}

std::vector<prometheus::MetricFamily> Readings::take() {
  std::vector<prometheus::MetricFamily> families;
  families.reserve(families_.size());
  for (auto& [name, family] : families_) families.push_back(std::move(family));
  families_.clear();
  return families;
}

Metrics::Metrics() {
  const double started =
      std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  prometheus::BuildGauge()
      .Name("rekindle_start_time_seconds")
      .Help("When this daemon began to run, in seconds since the epoch.")
      .Register(registry_)
      .Add({})
      .Set(started);
  prometheus::BuildGauge()
      .Name("rekindle_build_info")
      .Help("The version that runs; always 1.")
      .Register(registry_)
      .Add({{"version", std::string(version())}})
      .Set(1);
}

Counters& Metrics::counters(const std::string& name, const std::string& help) {
  return prometheus::BuildCounter().Name(name).Help(help).Register(registry_);
}

Histograms& Metrics::histograms(const std::string& name, const std::string& help) {
  return prometheus::BuildHistogram().Name(name).Help(help).Register(registry_);
}

std::shared_ptr<const Metrics::Read> Metrics::add(Read read) {
  auto added = std::make_shared<const Read>(std::move(read));
  reads_.push_back(added);
  return added;
}

std::string Metrics::text() const {
  std::erase_if(reads_, [](const auto& read) { return read.expired(); });
  Readings readings;
  for (const auto& weak : reads_) {
    if (const auto read = weak.lock()) (*read)(readings);
  }
  auto families = registry_.Collect();
  for (auto& family : readings.take()) families.push_back(std::move(family));
  return prometheus::TextSerializer().Serialize(families);
}

std::string label_of(std::string_view name) {
  std::string label(name);
  std::ranges::transform(label, label.begin(), [](unsigned char c) { return std::tolower(c); });
  return label;
}

OutcomeCounters::OutcomeCounters(Counters& family) : ok_(family.Add({{"result", "ok"}})) {
  for (const ErrorCode code : kCodes) {
    failed_[code] = &family.Add({{"result", label_of(to_string(code))}});
  }
}

void OutcomeCounters::count(const Result<void>& outcome) {
  if (outcome) return ok_.Increment();
  const auto found = failed_.find(outcome.error().code());
  if (found != failed_.end()) found->second->Increment();
}

const prometheus::Histogram::BucketBoundaries& seconds_buckets() {
  static const prometheus::Histogram::BucketBoundaries buckets = {
      0.0001, 0.0005, 0.002, 0.01, 0.05, 0.2, 1, 5, 20, 100, 500};
  return buckets;
}

prometheus::Histogram& add_seconds(Histograms& family, const prometheus::Labels& labels) {
  return family.Add(labels, seconds_buckets());
}

void observe(prometheus::Histogram& histogram, Duration took) {
  histogram.Observe(std::chrono::duration<double>(took).count());
}

}  // namespace rekindle::metrics
