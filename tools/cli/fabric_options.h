#pragma once

#include "transport/verbs/host/hca_filter.h"

namespace CLI {
class App;
}

namespace rekindle::cli {

// --hca, --gid-index, --topology, …: for every command that opens RDMA devices. Wrong text ends the
// parse with the line that says why; also in builds without libibverbs, so that one configuration
// file fits all.
void add_fabric_options(CLI::App& sub, transport::verbs::FabricOptions& options);

}  // namespace rekindle::cli
