#include <memory>

#include "tools/cli/command_line.h"
#include "tools/cli/exit_code.h"
#include "tools/cli/output.h"
#include "tools/cli/topo_view.h"

namespace rekindle::cli {

void add_topo(Command& app, Session& session) {
  Command sub = app.command(
      "topo",
      "Show RDMA ports, GPUs and NUMA nodes and which are near each other. Says for each port "
      "which\n"
      "address is used and why, and for each GPU and node which ports are used first.");
  auto options = std::make_shared<transport::verbs::FabricOptions>();
  add_fabric_options(sub, *options);
  sub.runs(session, "topo", [&session, options]() -> Result<int> {
    TRY(const RdmaView view, look_at_rdma(*options));
    if (session.settings.json) {
      print_json(topo_json(view));
    } else {
      print(topo_text(view));
    }
    return kExitOk;
  });
}

}  // namespace rekindle::cli
