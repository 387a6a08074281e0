#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <boost/asio/any_io_executor.hpp>

#include "recovery/agent/agent_parts.h"
#include "recovery/agent/local_agent.h"
#include "recovery/agent/partial_sources.h"
#include "recovery/agent/version_retirement.h"
#include "recovery/metrics/metrics.h"

namespace rekindle::agent {

// The metrics of publications of this host that hold a whole version. Control thread only.
class PublishMetrics {
 public:
  explicit PublishMetrics(metrics::Metrics& metrics);
  void count(const Result<TransferSummary>& published, Duration took);

 private:
  metrics::OutcomeCounters outcomes_;
  prometheus::Histogram& took_;
  prometheus::Counter& bytes_;
};

// Publishes versions from this host: stages a copy in the store, claims the version at the
// coordinator, commits the copy and serves it. Control thread only.
class Publisher {
 public:
  Publisher(boost::asio::any_io_executor executor, AgentParts parts,
            const VersionRetirement& retirement, PartialSources& sources)
      : executor_(std::move(executor)), parts_(parts), retirement_(retirement), sources_(sources) {}

  // They outlive this.
  void count_in(PublishMetrics* metrics) { metrics_ = metrics; }
  void trace_in(trace::Tracer* tracer) { tracer_ = tracer; }
  trace::Tracer* tracer() const { return tracer_; }
  async::Task<Result<TransferSummary>> publish(PublishRequest request, OnProgress progress);
  // Publishes segments that a worker has filled.
  async::Task<Result<TransferSummary>> publish_filled(ModelVersion id,
                                                      store::FilledSegments filled);
  // By this agent's key, if it has one.
  std::vector<VersionSignature> sign_for_workers(const ModelVersion& id, const Digest& root) const;
  // Claims the version of the checkpoint at the coordinator, if there is one. `parts`: the layouts
  // of the copies that together hold it; none: a copy of this host holds all of it.
  async::Task<Result<void>> claim(std::shared_ptr<const Checkpoint> checkpoint,
                                  std::optional<std::uint32_t> replicas, std::vector<Digest> parts,
                                  trace::Context parent = {});

 private:
  using Staged = std::shared_ptr<store::SegmentStore::Staged>;
  using OnBytes = std::function<void(const store::PublishProgress&)>;
  using Stage = std::function<Result<Staged>(const OnBytes&)>;
  struct Order {
    ModelVersion id;
    std::optional<std::uint32_t> replicas;
    // Of the publisher. They must be valid.
    std::vector<VersionSignature> signatures;
    // Workers have written it.
    bool of_workers = false;
    // Runs on a thread of the pool.
    Stage stage;
    OnProgress progress;
    trace::Context parent;
  };
  async::Task<Result<TransferSummary>> run(Order order);
  async::Task<Result<TransferSummary>> run_once(Order order, TimePoint started);
  async::Task<Result<std::shared_ptr<const store::StoredVersion>>> stage_and_commit(Order& order);
  Result<void> sign(const Order& order, store::SegmentStore::Staged& staged) const;
  OnBytes report_to(const Order& order) const;

  const boost::asio::any_io_executor executor_;
  const AgentParts parts_;
  const VersionRetirement& retirement_;
  PartialSources& sources_;
  PublishMetrics* metrics_ = nullptr;
  trace::Tracer* tracer_ = nullptr;
};

}  // namespace rekindle::agent
