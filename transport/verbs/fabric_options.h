#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

namespace rekindle::transport::verbs {

struct FabricOptions {
  std::string hca;                      // NCCL_IB_HCA's syntax; "" = all
  int gid_index = -1;                   // of RoCE ports; -1 = chosen
  std::filesystem::path topology_file;  // overrides what sysfs says (docs/verbs.md); "" = none
  std::filesystem::path sysfs = "/sys";
  int traffic_class = 0;  // of every packet (RoCE: DSCP << 2)
  int service_level = 0;
};

}  // namespace rekindle::transport::verbs
