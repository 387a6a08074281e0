#pragma once

#include <vector>

#include "proto/coordinator.pb.h"
#include "recovery/coordinator/core/rounds.h"

// Converts broadcast rounds between coordinator.proto and the core's own types.
namespace rekindle::coordinator {

// At most 4096 members with 64 communicators each; long reasons are cut. The report came at `now`,
// and the phases of its members began so long before.
Result<RoundReport> from_proto(const proto::RoundReport& report, TimePoint now);
proto::RoundOrders to_proto(const std::vector<RoundOrder>& orders);
proto::RoundStatus to_proto(const Round& round, TimePoint now);
proto::UpdatePlan to_proto(const UpdatePlan& plan);
// The rounds that run, and the last one of each model and group.
std::vector<const Round*> rounds_to_show(const Rounds& rounds);

}  // namespace rekindle::coordinator
