#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "recovery/metrics/metrics.h"
#include "recovery/rpc/http_client.h"
#include "recovery/trace/tracer.h"

namespace rekindle::rpc {

// Where OTLP/HTTP takes spans.
struct OtlpTarget {
  HostPort server;
  std::string path;

  // "http://host:4318"; the path is /v1/traces where the URL has none. kInvalid: it is no such URL,
  // or https, which is not supported.
  static Result<OtlpTarget> parse(std::string_view url);
};

// Posts the spans of a process to a collector, in batches, from an extra thread: a slow or
// absent collector holds nothing up. Spans that find the queue full are dropped and counted, and
// so are those that the collector refuses.
class OtlpExporter {
 public:
  struct Options {
    std::size_t queue = 4096;
    std::size_t batch = 512;
    // How long a span waits for others to travel with.
    std::chrono::milliseconds gather{500};
    std::chrono::milliseconds deadline{1000};  // of one post
    // Between a failed post and the next one.
    std::chrono::milliseconds pause{1000};
  };

  explicit OtlpExporter(OtlpTarget target);
  OtlpExporter(OtlpTarget target, Options options);
  // Sends the rest, with one post that may fail, and ends. Takes two deadlines of a post at most.
  ~OtlpExporter();

  // Any thread.
  void add(const trace::Span& span);
  std::uint64_t sent() const;
  std::uint64_t dropped() const;

 private:
  void run();

  const OtlpTarget target_;
  const Options options_;
  HttpClient client_;  // of the thread
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // The mutex guards all members that follow.
  std::deque<trace::Span> queue_;
  bool ending_ = false;
  std::uint64_t sent_ = 0;
  std::uint64_t dropped_ = 0;
  std::thread thread_;
};

// What a daemon and a command have of traces: the spans of the process and, with a URL, the way to
// a collector.
class Tracing {
 public:
  // `url`: of --otlp; "": none.
  static Result<std::unique_ptr<Tracing>> create(std::string service, std::string node,
                                                 const std::string& url);
  ~Tracing() { tracer.tell({}); }

  void read(metrics::Readings& readings) const;

  trace::Tracer tracer;

 private:
  Tracing(std::string service, std::string node) : tracer(std::move(service), std::move(node)) {}

  std::unique_ptr<OtlpExporter> exporter_;
};

}  // namespace rekindle::rpc
