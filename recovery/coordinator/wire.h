#pragma once

#include <string>
#include <string_view>

#include "proto/coordinator.pb.h"
#include "recovery/coordinator/core/core.h"
#include "recovery/rpc/rpc.h"

// Between coordinator.proto and the core's own types; what comes in is checked here.
namespace rekindle::coordinator {

Result<NodeInfo> from_proto(const proto::NodeAddress& node);
proto::NodeAddress to_proto(const NodeInfo& node);
Result<Holding> from_proto(const proto::Holding& holding);
proto::Holding to_proto(const Holding& holding);
Result<OpenPullRequest> from_proto(const proto::OpenPullRequest& request);
Result<PullProgress> from_proto(const proto::PullProgressRequest& request);
Result<Heartbeat> from_proto(const proto::HeartbeatRequest& request);
proto::HeartbeatResponse to_proto(const HeartbeatAnswer& answer);
Result<RankReport> from_proto(const proto::RankReport& report);
proto::RankResponse to_proto(const InstanceAnswer& answer);
proto::DrainResponse to_proto(const Draining& draining);

// Grants are signed here.
struct Issuer {
  Incarnation incarnation;
  std::string secret;
};
proto::SourceReport to_proto(const SourceReport& report);
proto::Source to_proto(const SourceOffer& offer, const Issuer& issuer);
proto::OpenPullResponse to_proto(const OpenedPull& opened, const Issuer& issuer);
proto::ClusterStatusResponse make_status(const Core& core, TimePoint now);

// Node ids and the like: at most 512 bytes.
Result<void> check_text(std::string_view what, std::string_view text);
// Only a process itself may speak for its incarnation.
Result<void> check_speaker(const rpc::Peer& peer, const std::string& incarnation);
// "10.0.0.3" of "10.0.0.3:51234".
std::string host_of(const std::string& address);

}  // namespace rekindle::coordinator
