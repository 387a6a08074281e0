#include "recovery/agent/rdma.h"
#include "src/base/log.h"

namespace rekindle::agent {

Result<std::unique_ptr<Rdma>> Rdma::open(const RdmaOptions& options) {
  if (options.enabled && !options.fabric.hca.empty()) {
    log::info("rdma.none", "why", "this build has no RDMA: --hca has no effect");
  }
  return std::unique_ptr<Rdma>();
}

}  // namespace rekindle::agent
