#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/histogram.h>
#include <prometheus/labels.h>
#include <prometheus/metric_family.h>
#include <prometheus/registry.h>

#include "src/base/clock.h"
#include "src/base/result.h"

// The metrics of a daemon, as Prometheus scrapes them (docs/internals/metrics.md).
namespace rekindle::metrics {

using Counters = prometheus::Family<prometheus::Counter>;
using Histograms = prometheus::Family<prometheus::Histogram>;

// Values that are read when somebody scrapes.
class Readings {
 public:
  void gauge(const std::string& name, const std::string& help, double value,
             const prometheus::Labels& labels = {}) {
    add(prometheus::MetricType::Gauge, name, help, value, labels);
  }
  void counter(const std::string& name, const std::string& help, double value,
               const prometheus::Labels& labels = {}) {
    add(prometheus::MetricType::Counter, name, help, value, labels);
  }
  // A gauge for each of `states`, also for those that nothing is in. Other keys of `counts` are
  // left out.
  void gauge_by_state(const std::string& name, const std::string& help,
                      const std::vector<std::string_view>& states,
                      const std::map<std::string_view, double>& counts);
  std::vector<prometheus::MetricFamily> take();

 private:
  void add(prometheus::MetricType type, const std::string& name, const std::string& help,
           double value, const prometheus::Labels& labels);

  std::map<std::string, prometheus::MetricFamily> families_;
};

// Counters and histograms are counted as things happen. Everything else is read at each scrape, by
// the functions that were added. Control thread only, but counters and histograms may be used on
// any thread.
class Metrics {
 public:
  using Read = std::function<void(Readings&)>;

  Metrics();

  Counters& counters(const std::string& name, const std::string& help);
  // Without labels.
  prometheus::Counter& counter(const std::string& name, const std::string& help) {
    return counters(name, help).Add({});
  }
  Histograms& histograms(const std::string& name, const std::string& help);
  // `read` is called at each scrape as long as the result lives.
  [[nodiscard]] std::shared_ptr<const Read> add(Read read);
  // In the text format of Prometheus, version 0.0.4.
  std::string text() const;

 private:
  prometheus::Registry registry_;
  mutable std::vector<std::weak_ptr<const Read>> reads_;
};

inline constexpr std::string_view kContentType = "text/plain; version=0.0.4; charset=utf-8";

// "not_found" for "NOT_FOUND".
std::string label_of(std::string_view name);

// A counter for "ok" and for each code of an error, as the label `result`.
class OutcomeCounters {
 public:
  explicit OutcomeCounters(Counters& family);
  void count(const Result<void>& outcome);

 private:
  prometheus::Counter& ok_;
  std::map<ErrorCode, prometheus::Counter*> failed_;
};

// Histograms of durations share these buckets, from 100 µs to 500 s.
const prometheus::Histogram::BucketBoundaries& seconds_buckets();
prometheus::Histogram& add_seconds(Histograms& family, const prometheus::Labels& labels = {});
void observe(prometheus::Histogram& histogram, Duration took);

}  // namespace rekindle::metrics
