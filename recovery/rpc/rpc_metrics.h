#pragma once

#include <map>

#include "recovery/metrics/metrics.h"
#include "recovery/rpc/http_server.h"
#include "recovery/rpc/rpc.h"

namespace rekindle::rpc {

// How long a server takes to answer calls, by method: at most one series for each method that it
// serves. Give `count` to RpcServer::on_call_ended(). Control thread only.
class RpcMetrics {
 public:
  explicit RpcMetrics(metrics::Metrics& metrics);
  void count(proto::Method method, bool failed, Duration took);

 private:
  struct OfMethod {
    prometheus::Histogram& took;
    prometheus::Counter& failures;
  };
  OfMethod& of(proto::Method method);

  metrics::Histograms& took_;
  metrics::Counters& failures_;
  std::map<proto::Method, OfMethod> methods_;
};

// GET /metrics at `address`, which --metrics gave. They name no model and no peer, so every reader
// with a proven name may have them. `metrics` outlives the server.
Result<std::unique_ptr<HttpServer>> serve_metrics(boost::asio::any_io_executor executor,
                                                  const std::string& address,
                                                  const HttpProtection& protection,
                                                  const metrics::Metrics& metrics);

}  // namespace rekindle::rpc
