#include "recovery/rpc/rpc_metrics.h"

namespace rekindle::rpc {

RpcMetrics::RpcMetrics(metrics::Metrics& metrics)
    : took_(metrics.histograms("rekindle_rpc_seconds",
                               "How long calls to this daemon took to be answered.")),
      failures_(metrics.counters("rekindle_rpc_failures_total",
                                 "Calls to this daemon that were answered with an error.")) {}

RpcMetrics::OfMethod& RpcMetrics::of(proto::Method method) {
  const auto found = methods_.find(method);
  if (found != methods_.end()) return found->second;
  const prometheus::Labels labels{{"method", metrics::label_of(proto::Method_Name(method))}};
  return methods_
      .emplace(method, OfMethod{metrics::add_seconds(took_, labels), failures_.Add(labels)})
      .first->second;
}

void RpcMetrics::count(proto::Method method, bool failed, Duration took) {
  OfMethod& counted = of(method);
  metrics::observe(counted.took, took);
  if (failed) counted.failures.Increment();
}

Result<std::unique_ptr<HttpServer>> serve_metrics(boost::asio::any_io_executor executor,
                                                  const std::string& address,
                                                  const HttpProtection& protection,
                                                  const metrics::Metrics& metrics) {
  HttpOptions options;
  TRY(options.access, http_access("--metrics", address, protection));
  return HttpServer::listen(
      std::move(executor), "--metrics", address,
      [&metrics](const HttpRequest& request) {
        if (request.target.substr(0, request.target.find('?')) != "/metrics") {
          return HttpAnswer{404, "GET /metrics\n", "text/plain"};
        }
        return HttpAnswer{200, metrics.text(), std::string(metrics::kContentType)};
      },
      std::move(options));
}

}  // namespace rekindle::rpc
