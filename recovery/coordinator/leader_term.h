#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include <boost/asio/any_io_executor.hpp>

#include "recovery/coordinator/access_control.h"
#include "recovery/coordinator/coordinator.h"
#include "recovery/coordinator/core/types.h"
#include "recovery/coordinator/state_records.h"
#include "recovery/coordinator/status_page.h"
#include "recovery/rpc/rpc.h"
#include "recovery/rpc/rpc_metrics.h"
#include "src/async/task.h"

namespace rekindle::coordinator {

// A request to stop. It is set once; coroutines of one executor wait for it.
class Stop {
 public:
  explicit Stop(boost::asio::any_io_executor executor) : changed_(std::move(executor)) {}
  void set(std::string why);
  bool is_set() const { return why_.has_value(); }
  // Of one that is set.
  const std::string& why() const { return *why_; }
  async::Task<void> wait();
  // Returns at the deadline, too.
  async::Task<void> wait_until(TimePoint deadline);

 private:
  async::Notifier changed_;
  std::optional<std::string> why_;
};

// What the terms of one process count.
struct TermMetrics {
  explicit TermMetrics(metrics::Metrics& its_metrics)
      : metrics(its_metrics),
        calls(metrics),
        terms(metrics.counter("rekindle_coordinator_terms_total",
                              "Terms that this coordinator has begun.")) {}

  metrics::Metrics& metrics;
  rpc::RpcMetrics calls;
  prometheus::Counter& terms;
  // Where Prometheus scrapes.
  std::string address;
  bool leading = false;
};

struct TermOptions {
  const CoordinatorOptions& options;
  Timing timing;
  // nullptr: it proves nothing, and demands nothing.
  std::shared_ptr<rpc::Credentials> credentials;
  // Called before each answer; an error is the answer instead. Empty: nobody else can lead.
  std::function<Result<void>()> may_answer = {};
  // nullptr: nobody asks for metrics.
  TermMetrics* metrics = nullptr;
  StatusPage& page;
  // nullptr: operations leave no spans.
  trace::Tracer* tracer = nullptr;
  AccessControl& access;
};

// Leads one term: from the state in `store`, in its epoch + 1, until `stop` is set. Sets `stop`
// when a write shows that another coordinator leads.
async::Task<Result<void>> lead_term(const TermOptions& options, DurableStore& store, Stop& stop);

}  // namespace rekindle::coordinator
