#pragma once

#include "proto/local.pb.h"
#include "recovery/agent/local_agent.h"
#include "src/base/result.h"

// The commands that a process of this host gives its agent: the messages of proto/local.proto, and
// the agent's answers.
namespace rekindle::rpc {
class RpcServer;
}

namespace rekindle::agent {

class AgentCore;

// Answers publish, pull, plan, retire and verify. Transfers stream their progress. Only processes
// of our own user on the unix socket may call.
void serve_local_commands(rpc::RpcServer& server, AgentCore& core);

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
