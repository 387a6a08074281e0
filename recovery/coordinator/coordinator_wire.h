#pragma once

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "proto/coordinator.pb.h"
#include "recovery/coordinator/core/core.h"
#include "recovery/coordinator/core/fleet_watch.h"
#include "recovery/coordinator/grant_signer.h"
#include "recovery/rpc/rpc.h"

// Converts between coordinator.proto and the core's own types. Every incoming value is checked
// here.
namespace rekindle::coordinator {

Result<NodeInfo> from_proto(const proto::NodeAddress& node);
proto::NodeAddress to_proto(const NodeInfo& node);
Result<Holding> from_proto(const proto::Holding& holding);
proto::Holding to_proto(const Holding& holding);
Result<OpenPullRequest> from_proto(const proto::OpenPullRequest& request);
Result<PullProgress> from_proto(const proto::PullProgressRequest& request);
Result<Heartbeat> from_proto(const proto::HeartbeatRequest& request);
proto::HeartbeatResponse to_proto(const HeartbeatAnswer& answer);
Result<Publication> from_proto(const proto::PublishRequest& request);
Result<RankReport> from_proto(const proto::RankReport& report);
proto::RankResponse to_proto(const InstanceAnswer& answer);
Result<JointReport> from_proto(const proto::JointReport& report);
proto::JointRoster to_proto(const JointRoster& roster);
proto::DrainResponse to_proto(const Draining& draining);

proto::SourceReport to_proto(const SourceReport& report);
proto::Source to_proto(const SourceOffer& offer, GrantSigner& signer);
proto::OpenPullResponse to_proto(const OpenedPull& opened, GrantSigner& signer);

// An enum of the core beside the one on the wire: one row per value.
template <typename Core, typename Wire, std::size_t N>
struct WireEnum {
  std::pair<Core, Wire> rows[N];

  Wire to_wire(Core value) const {
    return std::ranges::find(rows, value, &std::pair<Core, Wire>::first)->second;
  }
  // Nothing: a value that this version does not know.
  std::optional<Core> from_wire(Wire value) const {
    const auto row = std::ranges::find(rows, value, &std::pair<Core, Wire>::second);
    return row == std::end(rows) ? std::nullopt : std::optional(row->first);
  }
};
template <typename Core, typename Wire, std::size_t N>
WireEnum(const std::pair<Core, Wire> (&)[N]) -> WireEnum<Core, Wire, N>;

// Node ids and the like: at most 512 bytes.
Result<void> check_text(std::string_view what, std::string_view text);
// Only a process itself may speak for its incarnation.
Result<void> check_speaker(const rpc::Peer& peer, const std::string& incarnation);
Result<void> check_speaker(const rpc::Peer& peer, const std::string& node_id,
                           const std::string& incarnation);
// From what the connection has proven.
void set_party(NodeInfo& info, const rpc::Peer& peer);
// The host part of "10.0.0.3:51234"; "" when it is malformed.
std::string host_of(const std::string& address);

// The events that an agent tells with its heartbeat, at most 64. Long texts are cut; an event with
// a malformed version is left out.
Result<std::vector<FleetEvent>> events_from(const proto::HeartbeatRequest& request);
// At most 512.
proto::FleetEventsResponse events_after(const Core& core, const FleetWatch& watch,
                                        std::uint64_t after);
// To at most 512 bytes, between characters.
std::string cut(const std::string& text);

// The answer for `rekindle status`.
proto::ClusterStatusResponse make_status(const Core& core, TimePoint now);

}  // namespace rekindle::coordinator
