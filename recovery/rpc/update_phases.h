#pragma once

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include <google/protobuf/repeated_ptr_field.h>

#include "proto/common.pb.h"
#include "proto/coordinator.pb.h"
#include "proto/worker.pb.h"
#include "src/base/result.h"

namespace rekindle::rpc {

// The phases of an update of one rank, in this order (docs/internals/staging.md).
inline constexpr std::array<std::string_view, 6> kUpdatePhases{"declare", "copy",  "spread",
                                                               "verify",  "apply", "resume"};

using PhaseTimes = google::protobuf::RepeatedPtrField<proto::PhaseTime>;

// kInvalid: a name that is not a phase, or one twice, or a time of more than 30 days.
Result<void> check_phases(const PhaseTimes& phases);
// The phases of a worker's report, with their beginnings if it has them. kInvalid as above, or it
// does not have them of each phase.
Result<PhaseTimes> phases_of(const proto::PhasesReport& report);

// "rank 1 of i on b"; a worker without an instance is named by its process.
std::string name_of(const proto::RoundStatus::Member& member);

// Each phase that any member has reported, in the order above. The 95th percentile is that of the
// nearest rank: the smallest time that at least 95 % of the members did not exceed.
std::vector<proto::PhaseSummary> summarize_phases(const proto::RoundStatus& round);

}  // namespace rekindle::rpc
