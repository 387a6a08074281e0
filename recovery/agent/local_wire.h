#pragma once

#include "proto/local.pb.h"
#include "recovery/agent/host.h"
#include "src/base/result.h"

// Conversions between the host interface and proto/local.proto.
namespace rekindle::agent {

proto::LocalPublishRequest to_proto(const PublishRequest& request);
Result<PublishRequest> from_proto(const proto::LocalPublishRequest& request);
proto::LocalPullRequest to_proto(const PullRequest& request);
Result<PullRequest> from_proto(const proto::LocalPullRequest& request);
proto::TransferProgress to_proto(const Progress& progress);
Progress from_proto(const proto::TransferProgress& progress);
proto::TransferResult to_proto(const TransferSummary& summary);
TransferSummary from_proto(const proto::TransferResult& result);
proto::LocalPlanResponse to_proto(const PlanSummary& plan);
PlanSummary from_proto(const proto::LocalPlanResponse& response);

}  // namespace rekindle::agent
