#include "tools/cli/fabric_options.h"

#include <CLI/CLI.hpp>

#include "transport/verbs/host/hca_filter.h"

namespace rekindle::cli {

void add_fabric_options(CLI::App& sub, transport::verbs::FabricOptions& options) {
  constexpr const char* kGroup = "RDMA";
  constexpr int kMaxGidIndex = 255;
  sub.add_option("--hca", options.hca,
                 "RDMA ports to use, in the syntax of NCCL_IB_HCA: [^][=]NAME[:PORT],… [all]")
      ->type_name("LIST")
      ->group(kGroup)
      ->check([](const std::string& text) {
        const auto filter = transport::verbs::HcaFilter::parse(text);
        if (filter) return std::string();
        const std::string& message = filter.error().message();  // CLI11 says the option's name, too
        return message.starts_with("--hca ") ? message.substr(6) : message;
      });
  sub.add_option("--gid-index", options.gid_index,
                 "GID of RoCE ports [RoCE v2, IPv4 before IPv6 before link-local]")
      ->type_name("N")
      ->group(kGroup)
      ->check(CLI::Range(0, kMaxGidIndex));
  constexpr int kMaxTrafficClass = 255;
  constexpr int kMaxServiceLevel = 15;
  sub.add_option("--traffic-class", options.traffic_class,
                 "Traffic class of RDMA packets; on RoCE the DSCP times 4 [0]")
      ->type_name("N")
      ->group(kGroup)
      ->check(CLI::Range(0, kMaxTrafficClass));
  sub.add_option("--service-level", options.service_level,
                 "Service level of RDMA packets; on RoCE the priority [0]")
      ->type_name("N")
      ->group(kGroup)
      ->check(CLI::Range(0, kMaxServiceLevel));
  sub.add_option("--topology", options.topology_file,
                 "JSON file that overrides NUMA nodes and preferred ports (docs/verbs.md)")
      ->type_name("FILE")
      ->group(kGroup);
}

}  // namespace rekindle::cli
