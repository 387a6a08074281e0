#include "recovery/agent/rdma.h"

#include <utility>
#include <vector>

#include "src/base/log.h"
#include "src/base/numa_nodes.h"
#include "transport/path.h"
#include "transport/registry.h"
#if REKINDLE_WITH_VERBS
#include "transport/verbs/verbs_transport.h"
#endif

namespace rekindle::agent {

#if REKINDLE_WITH_VERBS

namespace {

using transport::verbs::Api;
using transport::verbs::Fabric;
using transport::verbs::MemoryRegistrar;

class VerbsRdma final : public Rdma {
 public:
  VerbsRdma(std::unique_ptr<Api> api, std::unique_ptr<Fabric> fabric)
      : api_(std::move(api)),
        fabric_(std::move(fabric)),
        registrar_(MemoryRegistrar::create(*fabric_, {})),
        connector_(transport::verbs::make_connector(*fabric_, *registrar_, {})) {}

  int numa_node() const override {
    std::vector<int> nodes;
    for (const auto& rail : fabric_->rails()) nodes.push_back(rail->device().numa_node());
    return common_node(nodes);
  }
  bool maps_files_for_writing() const override { return registrar_->maps_files_for_writing(); }
  transport::HandshakeConnector& connector() override { return *connector_; }
  std::unique_ptr<transport::Server> serve(transport::SegmentRegistry& registry,
                                           const Incarnation& incarnation) override {
    return transport::verbs::VerbsServer::create(*fabric_, *registrar_, registry, incarnation, {});
  }

 private:
  const std::unique_ptr<Api> api_;
  const std::unique_ptr<Fabric> fabric_;
  const std::unique_ptr<MemoryRegistrar> registrar_;
  const std::unique_ptr<transport::HandshakeConnector> connector_;
};

}  // namespace

Result<std::unique_ptr<Rdma>> Rdma::open(const RdmaOptions& options) {
  if (!options.enabled) return std::unique_ptr<Rdma>();
  auto api = transport::verbs::make_system_api();
  TRY(auto fabric, Fabric::open(*api, options.fabric));
  if (fabric->rails().empty()) {
    log::info("rdma.none", "why", fabric->why_empty());
    return std::unique_ptr<Rdma>();
  }
  return std::unique_ptr<Rdma>(std::make_unique<VerbsRdma>(std::move(api), std::move(fabric)));
}

#else

Result<std::unique_ptr<Rdma>> Rdma::open(const RdmaOptions& options) {
  if (options.enabled && !options.fabric.hca.empty()) {
    log::info("rdma.none", "why", "this build has no RDMA: --hca has no effect");
  }
  return std::unique_ptr<Rdma>();
}

#endif

}  // namespace rekindle::agent
