#pragma once

#include <string>

#include "tools/cli/output.h"
#include "tools/cli/rdma_view.h"

namespace rekindle::cli {

Json topo_json(const RdmaView& view);
std::string topo_text(const RdmaView& view);

}  // namespace rekindle::cli
