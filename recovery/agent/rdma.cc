#include "recovery/agent/rdma.h"

#include <utility>
#include <vector>

#include "src/base/log.h"
#include "src/base/numa_nodes.h"
#include "transport/path.h"
#include "transport/registry.h"
#if REKINDLE_WITH_VERBS
#include "transport/verbs/host/gpu_direct.h"
#include "transport/verbs/memory/device_share.h"
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
  VerbsRdma(std::unique_ptr<Api> api, std::unique_ptr<Fabric> fabric, bool gpu_direct)
      : gpu_direct_(gpu_direct),
        api_(std::move(api)),
        fabric_(std::move(fabric)),
        registrar_(MemoryRegistrar::create(*fabric_, {})),
        connector_(transport::verbs::make_connector(*fabric_, *registrar_, {})) {}

  int numa_node() const override {
    std::vector<int> nodes;
    for (const auto& rail : fabric_->rails()) nodes.push_back(rail->device().numa_node());
    return common_node(nodes);
  }
  std::vector<RailView> rails() const override;
  bool maps_files_for_writing() const override { return registrar_->maps_files_for_writing(); }
  Result<std::vector<std::string>> homes_near_gpu(std::string_view uuid) const override;
  WindowFigures windows() const override;
  transport::HandshakeConnector& connector() override { return *connector_; }
  std::unique_ptr<transport::Server> serve(transport::SegmentRegistry& registry,
                                           const Incarnation& incarnation) override {
    return transport::verbs::VerbsServer::create(*fabric_, *registrar_, registry, incarnation, {});
  }

 private:
  const bool gpu_direct_;
  const std::unique_ptr<Api> api_;
  const std::unique_ptr<Fabric> fabric_;
  const std::unique_ptr<MemoryRegistrar> registrar_;
  const std::unique_ptr<transport::HandshakeConnector> connector_;
};

WindowFigures VerbsRdma::windows() const {
  WindowFigures sum;
  for (const auto& device : fabric_->devices()) {
    const auto& counts = device->windows();
    sum.in_use += counts.allocated;
    if (device->limits().memory_windows_2b) sum.limit += device->limits().max_mw;
    sum.bound += counts.bound;
    sum.invalidated += counts.invalidated;
    sum.refused += counts.refused;
  }
  return sum;
}

std::vector<Rdma::RailView> VerbsRdma::rails() const {
  std::vector<RailView> views;
  for (const auto& rail : fabric_->rails()) {
    const auto state = rail->state();
    views.push_back({rail->name(), state.up ? "" : state.why_down, state.bytes_per_second});
  }
  return views;
}

Result<std::vector<std::string>> VerbsRdma::homes_near_gpu(std::string_view uuid) const {
  if (!gpu_direct_) return fail(ErrorCode::kNotFound, "--gpu-direct is off");
  const auto* const gpu = transport::verbs::gpu_by_uuid(fabric_->topology(), "/proc", uuid);
  if (gpu == nullptr) {
    return fail(ErrorCode::kUnavailable, "the PCIe place of {} is not known", uuid);
  }
  std::vector<transport::verbs::GpuRail> rails;
  for (const auto& rail : fabric_->rails()) {
    const auto& device = rail->device();
    rails.push_back({{device.name(), rail->port(), rail->state().bytes_per_second},
                     transport::verbs::takes_dmabuf(device)});
  }
  TRY(const auto near, choose_gpu_rails(fabric_->topology(), rails, *gpu));
  std::vector<std::string> homes;
  for (const std::size_t rail : near) homes.push_back(fabric_->rails()[rail]->name());
  return homes;
}

}  // namespace

Result<std::unique_ptr<Rdma>> Rdma::open(const RdmaOptions& options) {
  if (!options.enabled) return std::unique_ptr<Rdma>();
  auto fabric_options = options.fabric;
  if (!options.trusted_only) fabric_options.trusted.clear();
  if (options.trusted_only && fabric_options.trusted.empty()) {
    log::info("rdma.none", "why", "encryption is demanded, and --rail-trusted names no rail");
    return std::unique_ptr<Rdma>();
  }
  auto api = transport::verbs::make_system_api();
  TRY(auto fabric, Fabric::open(*api, fabric_options));
  if (fabric->rails().empty()) {
    log::info("rdma.none", "why", fabric->why_empty());
    return std::unique_ptr<Rdma>();
  }
  return std::unique_ptr<Rdma>(
      std::make_unique<VerbsRdma>(std::move(api), std::move(fabric), options.gpu_direct));
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
