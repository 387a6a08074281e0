#pragma once

#include <cstdint>
#include <string>

#include "proto/coordinator.pb.h"
#include "src/base/ids.h"
#include "tools/cli/output.h"

namespace rekindle::cli {

// Bytes a second.
struct LinkRates {
  // Of the network of a host, each way.
  std::uint64_t host = 0;
  // Of the PCIe link of a GPU.
  std::uint64_t gpu = 0;
};

// The link that takes longest if all links work at the same time, at these rates.
struct SlowestLink {
  double seconds = 0;
  std::string name;  // "network into a"
};
SlowestLink slowest_link(const proto::UpdatePlan& plan, const LinkRates& rates);

Json to_json(const proto::UpdatePlan& plan, const LinkRates& rates);
std::string plan_text(const ModelVersion& id, const proto::UpdatePlan& plan,
                      const LinkRates& rates);

}  // namespace rekindle::cli
