#include "recovery/coordinator/coordinator_wire.h"

#include <algorithm>
#include <utility>

#include "recovery/coordinator/round_wire.h"
#include "recovery/rpc/address.h"
#include "recovery/rpc/convert.h"
#include "recovery/rpc/message_fields.h"
#include "recovery/rpc/peer_budgets.h"
#include "recovery/rpc/rights.h"
#include "src/base/text.h"
#include "src/tensor/checkpoint.h"
#include "src/tensor/signature_wire.h"

namespace rekindle::coordinator {

namespace {

constexpr std::size_t kMaxTextBytes = 512;
constexpr int kMaxCoverRuns = 16'384;
constexpr std::uint64_t kMaxTiles = std::uint64_t{1} << 32;
constexpr int kMaxVersionsPerHeartbeat = 4096;
constexpr int kMaxJointRanks = 65'536;
constexpr std::size_t kMaxParts = 4096;
constexpr std::uint32_t kMostReplicas = 1024;
constexpr int kMaxEventsPerHeartbeat = 64;
constexpr std::size_t kMaxEventsPerAnswer = 512;
constexpr int kMaxPhases = 16;
// The year 2262, in which a 64-bit count of nanoseconds ends.
constexpr std::uint64_t kLastMicrosecond = std::uint64_t{9'000'000'000'000'000};

constexpr WireEnum<RankState, proto::RankState, 4> kRankStates{{
    {RankState::kAttached, proto::RANK_ATTACHED},
    {RankState::kLoaded, proto::RANK_LOADED},
    {RankState::kFailed, proto::RANK_FAILED},
    {RankState::kGone, proto::RANK_GONE},
}};
constexpr WireEnum<InstanceState, proto::InstanceState, 3> kInstanceStates{{
    {InstanceState::kLoading, proto::INSTANCE_LOADING},
    {InstanceState::kCommitted, proto::INSTANCE_COMMITTED},
    {InstanceState::kUnfit, proto::INSTANCE_UNFIT},
}};

constexpr rpc::Fields kNodeInfo{WIRE_FIELD(node_id), WIRE_FIELD(incarnation),
                                WIRE_FIELD(control_endpoint), WIRE_FIELD(host_id)};
constexpr rpc::Fields kSourceReport{WIRE_FIELD(node_id),   WIRE_FIELD(incarnation),
                                    WIRE_FIELD(bytes),     WIRE_FIELD(goodput_bytes_per_second),
                                    WIRE_FIELD(failures),  WIRE_FIELD(lost),
                                    WIRE_FIELD(quarantine)};
constexpr rpc::Fields kHolding{
    WIRE_FIELD(id),          WIRE_FIELD(root),          WIRE_FIELD(tensor_set),
    WIRE_FIELD(layout),      WIRE_FIELD(payload_bytes), WIRE_FIELD(checkpoint_bytes),
    WIRE_FIELD(complete),    WIRE_FIELD(whole),         WIRE_FIELD(verified),
    WIRE_FIELD(proves_parts)};
constexpr rpc::Fields kPullProgress{WIRE_FIELD(pull_id), WIRE_FIELD(id), WIRE_FIELD(bytes_done),
                                    WIRE_FIELD(bytes_total)};
constexpr rpc::Fields kHeartbeat{WIRE_FIELD(epoch), WIRE_FIELD(progress),
                                 WIRE_FIELD(store_free_bytes), WIRE_FIELD(failed_fetches),
                                 WIRE_FIELD(fetching)};
constexpr rpc::Fields kFetch{WIRE_FIELD(id), WIRE_FIELD(root), WIRE_FIELD(max_bytes_per_second)};
constexpr rpc::Fields kHeartbeatAnswer{WIRE_FIELD(epoch), WIRE_FIELD(coordinator_time_ms),
                                       WIRE_FIELD(retire), WIRE_FIELD(retiring),
                                       WIRE_FIELD(drained)};
constexpr rpc::Fields kRankReport{
    WIRE_FIELD(node_id), WIRE_FIELD(incarnation), WIRE_FIELD(instance), WIRE_FIELD(generation),
    WIRE_FIELD(rank),    WIRE_FIELD(world),       WIRE_FIELD(model),    WIRE_FIELD(sequence)};
constexpr rpc::Fields kInstanceAnswer{WIRE_FIELD(id), WIRE_FIELD(loaded), WIRE_FIELD(world),
                                      WIRE_FIELD(why)};
constexpr rpc::Fields kPublication{WIRE_FIELD(id), WIRE_FIELD(root), WIRE_FIELD(tensor_set),
                                   WIRE_FIELD(checkpoint_bytes)};
constexpr rpc::Fields kJointReport{WIRE_FIELD(node_id), WIRE_FIELD(incarnation),
                                   WIRE_FIELD(id),      WIRE_FIELD(world),
                                   WIRE_FIELD(leave),   WIRE_FIELD(attempt)};
constexpr rpc::Fields kJointRoster{WIRE_FIELD(number), WIRE_FIELD(missing),
                                   WIRE_FIELD(missing_total)};
constexpr rpc::Fields kPullStatus{WIRE_FIELD(id), WIRE_FIELD(shard), WIRE_FIELD(bytes_done),
                                  WIRE_FIELD(bytes_total), WIRE_FIELD(bytes_per_second)};

Result<SourceReport> from_proto(const proto::SourceReport& message) {
  TRY_VOID(check_text("a source's name", message.node_id()));
  SourceReport report;
  TRY_VOID(kSourceReport.read(message, report));
  report.cause = cut(message.cause());
  return report;
}

void fill_node(proto::NodeStatus& node, const Core& core, const Member& member, TimePoint now) {
  *node.mutable_node() = to_proto(member.info);
  node.set_state(std::string(state_name(member, now)));
  node.set_last_heartbeat_ms_ago(
      static_cast<std::uint64_t>(std::max<std::int64_t>(milliseconds(now - member.last_heard), 0)));
  for (const auto& [key, holding] : member.holdings.all()) *node.add_holdings() = to_proto(holding);
  node.set_failure_domain(member.failure_domain);
  node.set_drained(core.fleet().drained(member.info.node_id));
  node.set_pullers(
      static_cast<std::uint32_t>(core.pulls().table().pullers_of(member.info.incarnation)));
  if (node.drained()) {
    for (const auto& id : core.replicas().sole_copies(member)) {
      *node.add_sole_copies() = rpc::to_proto(id);
    }
  }
  node.set_health(member.standing.health.at(now));
  const TimePoint until =
      std::max(member.standing.quarantined_until(), member.flapping.left_out_until());
  if (until > now) node.set_left_out_ms(static_cast<std::uint64_t>(milliseconds(until - now)));
  node.set_store_free_bytes(member.store_free_bytes);
}

void fill_version(proto::VersionStatus& entry, const Core& core, const ModelVersion& id,
                  const DurableVersion& version) {
  *entry.mutable_id() = rpc::to_proto(id);
  *entry.mutable_root() = rpc::to_proto(version.root);
  entry.set_checkpoint_bytes(version.checkpoint_bytes);
  entry.set_whole_copies(core.readiness().whole_copies(id));
  entry.set_replicas(core.replicas().wanted(version));
  for (const auto& one : core.fleet().signers.of(id, version.root)) {
    entry.add_signers(one.public_key);
  }
  const VersionState state = core.readiness().state_of(id);
  entry.set_state(std::string(state_name(state)));
  if (state == VersionState::kRetiring) {
    std::uint32_t holders = 0;
    std::size_t readers = 0;
    for (const auto& [node_id, member] : core.fleet().members.all()) {
      if (!member.holdings.holds(id)) continue;
      ++holders;
      readers += core.retirement().readers_at(member, id);
    }
    entry.set_readers(static_cast<std::uint32_t>(readers));
    if (holders == 0) entry.set_state("retired");
  }
  const auto& tasks = core.replicas().tasks();
  const auto& shortages = core.replicas().shortages();
  if (const auto task = tasks.find(id); task != tasks.end()) {
    entry.set_copying_to(task->second.node_id);
    entry.set_copying_bytes_done(task->second.bytes_done);
  } else if (const auto found = shortages.find(id); found != shortages.end()) {
    entry.set_short_of_copies(found->second.why.empty() ? "about to be copied" : found->second.why);
  }
}

void fill_pull(proto::PullStatus& entry, const PullId& pull_id, const Pull& pull) {
  entry.set_pull_id(pull_id.to_bytes());
  entry.set_puller(pull.puller.node_id);
  kPullStatus.write(pull, entry);
  for (const auto& report : pull.reports.all()) *entry.add_sources() = to_proto(report);
}

void fill_instance(proto::InstanceStatus& entry, const std::string& name,
                   const Instance& instance) {
  const InstanceAnswer answer = Instances::answer(instance);
  entry.set_instance(name);
  entry.set_generation(instance.generation);
  kInstanceAnswer.write(answer, entry);
  entry.set_state(std::string(state_name(answer.state)));
}

}  // namespace

Result<void> check_text(std::string_view what, std::string_view text) {
  if (text.size() <= kMaxTextBytes) return {};
  return fail(ErrorCode::kInvalid, "{} of {} bytes; {} are allowed", what, text.size(),
              kMaxTextBytes);
}

proto::SourceReport to_proto(const SourceReport& report) {
  proto::SourceReport message;
  kSourceReport.write(report, message);
  message.set_cause(report.cause);
  return message;
}

Result<NodeInfo> from_proto(const proto::NodeAddress& node) {
  TRY_VOID(check_text("a node id", node.node_id()));
  TRY_VOID(check_text("an address", node.control_endpoint()));
  TRY_VOID(check_text("a host id", node.host_id()));
  NodeInfo info;
  TRY_VOID(kNodeInfo.read(node, info));
  return info;
}

proto::NodeAddress to_proto(const NodeInfo& node) {
  proto::NodeAddress message;
  kNodeInfo.write(node, message);
  return message;
}

Result<Holding> from_proto(const proto::Holding& message) {
  Holding holding;
  TRY_VOID(kHolding.read(message, holding));
  if (holding.root.is_nil() || holding.layout.is_nil()) {
    return fail(ErrorCode::kInvalid, "a holding of {} without root or layout",
                holding.id.to_string());
  }
  if (!holding.complete) {
    TRY(holding.held, rpc::from_proto(message.held(), kMaxTiles));
  }
  if (!holding.whole) {
    if (message.covers().begin_size() > kMaxCoverRuns) {
      return fail(ErrorCode::kInvalid, "a holding of {} with more than {} runs of tiles",
                  holding.id.to_string(), kMaxCoverRuns);
    }
    TRY(holding.covers, rpc::from_proto(message.covers(), kMaxTiles));
  }
  holding.checkpoint_tiles = message.checkpoint_tiles();
  holding.signatures = rekindle::from_proto(message.signatures());
  TRY(holding.part_layouts, parse_digests(message.part_layouts()));
  const auto& parts = holding.part_layouts;
  if (parts.size() > kMaxParts || (!parts.empty() && !lists_layout(parts, holding.layout))) {
    return fail(ErrorCode::kInvalid, "a holding of {} whose layout is not among its {} parts",
                holding.id.to_string(), parts.size());
  }
  return holding;
}

// Leaves `held` and `covers` out, so that a status stays small.
proto::Holding to_proto(const Holding& holding) {
  proto::Holding message;
  kHolding.write(holding, message);
  return message;
}

Result<OpenPullRequest> from_proto(const proto::OpenPullRequest& message) {
  OpenPullRequest request;
  TRY(request.puller, from_proto(message.puller()));
  TRY_VOID(check_model_name(message.model()));
  request.model = message.model();
  if (!message.latest()) request.version = message.version();
  request.shard = cut(message.shard());
  return request;
}

Result<PullProgress> from_proto(const proto::PullProgressRequest& message) {
  PullProgress progress;
  TRY_VOID(kPullProgress.read(message, progress));
  TRY(progress.puller, from_proto(message.puller()));
  for (const auto& source : message.sources()) {
    TRY(SourceReport report, from_proto(source));
    progress.sources.push_back(std::move(report));
  }
  return progress;
}

proto::Source to_proto(const SourceOffer& offer, GrantSigner& signer) {
  proto::Source source;
  *source.mutable_node() = to_proto(offer.node);
  *source.mutable_layout() = rpc::to_proto(offer.layout);
  source.set_complete(offer.complete);
  if (!offer.complete) *source.mutable_held() = rpc::to_proto(offer.held);
  source.set_payload_bytes(offer.payload_bytes);
  source.set_proves_parts(offer.proves_parts);
  *source.mutable_grant() = signer.sign(offer.grant);
  return source;
}

proto::OpenPullResponse to_proto(const OpenedPull& opened, GrantSigner& signer) {
  proto::OpenPullResponse response;
  if (!opened.pull_id.is_nil()) response.set_pull_id(opened.pull_id.to_bytes());
  *response.mutable_id() = rpc::to_proto(opened.id);
  *response.mutable_root() = rpc::to_proto(opened.version.root);
  *response.mutable_tensor_set() = rpc::to_proto(opened.version.tensor_set);
  response.set_checkpoint_bytes(opened.version.checkpoint_bytes);
  response.set_epoch(opened.epoch);
  response.set_lease_ms(static_cast<std::uint32_t>(milliseconds(opened.lease)));
  for (const auto& offer : opened.sources) *response.add_sources() = to_proto(offer, signer);
  response.set_retry_after_ms(static_cast<std::uint32_t>(milliseconds(opened.retry_after)));
  *response.mutable_signatures() = rekindle::to_proto(opened.signatures);
  return response;
}

Result<void> check_speaker(const rpc::Peer& peer, const std::string& incarnation) {
  if (peer.incarnation.to_bytes() == incarnation) return {};
  return fail(ErrorCode::kDenied, "the call speaks for another process than the connection's");
}

Result<void> check_speaker(const rpc::Peer& peer, const std::string& node_id,
                           const std::string& incarnation) {
  TRY_VOID(check_speaker(peer, incarnation));
  if (peer.node_id == node_id) return {};
  return fail(ErrorCode::kDenied, "the call speaks for node '{}', its connection for '{}'",
              cut(node_id), peer.node_id);
}

void set_party(NodeInfo& info, const rpc::Peer& peer) {
  info.principals = rpc::principals_of(peer);
  if (peer.proof == rpc::Proof::kCertificate) {
    const auto certified = rpc::certified_role(peer.principals);
    info.owns_node_id = certified && !certified->name.empty() && certified->is_of(info.node_id);
  }
  if (rpc::has_own_name(peer)) {
    info.party = peer.principals.front();
  } else if (peer.proof == rpc::Proof::kSecret || peer.proof == rpc::Proof::kCertificate) {
    info.party = fmt::format("{}{}", NodeInfo::kHostParty, rpc::budget_key(peer));
  }
}

std::string host_of(const std::string& address) {
  const auto parsed = rpc::HostPort::parse(address);
  return parsed ? parsed->host : std::string();
}

Result<Heartbeat> from_proto(const proto::HeartbeatRequest& message) {
  if (message.readers_size() > kMaxVersionsPerHeartbeat ||
      message.failed_fetches_size() > kMaxVersionsPerHeartbeat ||
      message.fetching_size() > kMaxVersionsPerHeartbeat) {
    return fail(ErrorCode::kInvalid, "a heartbeat with more than {} versions",
                kMaxVersionsPerHeartbeat);
  }
  Heartbeat heartbeat;
  TRY_VOID(kHeartbeat.read(message, heartbeat));
  for (const auto& entry : message.readers()) {
    TRY(ModelVersion id, rpc::from_proto(entry.id()));
    heartbeat.readers[std::move(id)] = entry.readers();
  }
  return heartbeat;
}

proto::HeartbeatResponse to_proto(const HeartbeatAnswer& answer) {
  proto::HeartbeatResponse response;
  kHeartbeatAnswer.write(answer, response);
  for (const auto& fetch : answer.fetch) kFetch.write(fetch, *response.add_fetch());
  return response;
}

Result<Publication> from_proto(const proto::PublishRequest& message) {
  Publication publication;
  TRY_VOID(kPublication.read(message, publication));
  if (message.has_replicas()) {
    if (message.replicas() > kMostReplicas) {
      return fail(ErrorCode::kInvalid, "publish {}: {} replicas; at most {} are possible",
                  publication.id.to_string(), message.replicas(), kMostReplicas);
    }
    publication.replicas = message.replicas();
  }
  publication.signatures = rekindle::from_proto(message.signatures());
  if (static_cast<std::size_t>(message.parts_size()) > kMaxParts) {
    return fail(ErrorCode::kInvalid, "publish {}: {} parts; at most {} are allowed",
                publication.id.to_string(), message.parts_size(), kMaxParts);
  }
  for (const auto& part : message.parts()) {
    publication.parts.push_back(rpc::from_proto(part));
    if (publication.parts.back().is_nil()) {
      return fail(ErrorCode::kInvalid, "publish {}: a part without a layout",
                  publication.id.to_string());
    }
  }
  return publication;
}

Result<RankReport> from_proto(const proto::RankReport& message) {
  TRY_VOID(check_text("a node id", message.node_id()));
  TRY_VOID(check_text("an instance's name", message.instance()));
  TRY_VOID(check_model_name(message.model()));
  RankReport report;
  TRY_VOID(kRankReport.read(message, report));
  if (!message.latest()) report.version = message.version();
  if (message.has_has()) {
    TRY(report.has, rpc::from_proto(message.has()));
  }
  const auto state = kRankStates.from_wire(message.state());
  if (!state) {
    return fail(ErrorCode::kInvalid, "rank state {} is not known",
                static_cast<int>(message.state()));
  }
  report.state = *state;
  report.why = cut(message.why());
  return report;
}

proto::RankResponse to_proto(const InstanceAnswer& answer) {
  proto::RankResponse response;
  kInstanceAnswer.write(answer, response);
  response.set_state(kInstanceStates.to_wire(answer.state));
  return response;
}

Result<JointReport> from_proto(const proto::JointReport& message) {
  TRY_VOID(check_text("a node id", message.node_id()));
  JointReport report;
  TRY_VOID(kJointReport.read(message, report));
  if (message.ranks_size() > kMaxJointRanks) {
    return fail(ErrorCode::kInvalid,
                "joint publication of {}: node '{}' reports {} ranks; at most {} are allowed",
                report.id.to_string(), report.node_id, message.ranks_size(), kMaxJointRanks);
  }
  report.ranks.assign(message.ranks().begin(), message.ranks().end());
  return report;
}

proto::JointRoster to_proto(const JointRoster& roster) {
  proto::JointRoster message;
  kJointRoster.write(roster, message);
  for (const JointRoster::Host& host : roster.hosts) {
    auto& entry = *message.add_hosts();
    *entry.mutable_node() = to_proto(host.node);
    entry.mutable_ranks()->Add(host.ranks.begin(), host.ranks.end());
  }
  return message;
}

proto::DrainResponse to_proto(const Draining& draining) {
  proto::DrainResponse response;
  response.set_pullers(static_cast<std::uint32_t>(draining.readers));
  for (const auto& id : draining.sole_copies) *response.add_sole_copies() = rpc::to_proto(id);
  return response;
}

std::string cut(const std::string& text) { return std::string(cut_text(text, kMaxTextBytes)); }

Result<std::vector<FleetEvent>> events_from(const proto::HeartbeatRequest& request) {
  if (request.events_size() > kMaxEventsPerHeartbeat) {
    return fail(ErrorCode::kInvalid, "a heartbeat with {} events; {} are allowed",
                request.events_size(), kMaxEventsPerHeartbeat);
  }
  std::vector<FleetEvent> events;
  for (const auto& message : request.events()) {
    FleetEvent event;
    event.number = message.number();
    event.at = WallTime(
        std::chrono::microseconds(std::min<std::uint64_t>(message.unix_us(), kLastMicrosecond)));
    event.kind = cut(message.kind());
    if (message.has_id()) {
      const auto id = rpc::from_proto(message.id());
      if (!id) continue;
      event.id = *id;
    }
    event.instance = cut(message.instance());
    if (message.has_rank()) event.rank = message.rank();
    event.rung = cut(message.rung());
    event.why = cut(message.why());
    for (int i = 0; i < std::min(message.phases_size(), kMaxPhases); ++i) {
      event.phases.push_back({cut(message.phases(i).name()), message.phases(i).elapsed_us()});
    }
    events.push_back(std::move(event));
  }
  return events;
}

namespace {

proto::FleetEvent to_proto(const FleetEvent& event) {
  proto::FleetEvent message;
  message.set_number(event.number);
  message.set_unix_us(static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::microseconds>(event.at.time_since_epoch()).count()));
  message.set_kind(event.kind);
  message.set_node_id(event.node_id);
  if (event.id) *message.mutable_id() = rpc::to_proto(*event.id);
  if (!event.pull_id.is_nil()) message.set_pull_id(event.pull_id.to_bytes());
  message.set_round(event.round);
  message.set_instance(event.instance);
  if (event.rank) message.set_rank(*event.rank);
  message.set_rung(event.rung);
  message.set_why(event.why);
  message.set_bytes(event.bytes);
  message.set_elapsed_us(event.elapsed_us);
  for (const PhaseTime& phase : event.phases) {
    auto& time = *message.add_phases();
    time.set_name(phase.name);
    time.set_elapsed_us(phase.elapsed_us);
  }
  return message;
}

}  // namespace

proto::FleetEventsResponse events_after(const Core& core, const FleetWatch& watch,
                                        std::uint64_t after) {
  proto::FleetEventsResponse response;
  response.set_epoch(core.fleet().epoch());
  response.set_last(watch.log().last());
  for (const FleetEvent& event : watch.log().after(after, kMaxEventsPerAnswer)) {
    *response.add_events() = to_proto(event);
  }
  return response;
}

proto::ClusterStatusResponse make_status(const Core& core, TimePoint now) {
  proto::ClusterStatusResponse status;
  status.set_epoch(core.fleet().epoch());
  status.set_uptime_ms(
      static_cast<std::uint64_t>(milliseconds(now - core.fleet().grace.started())));
  status.set_grace(core.fleet().grace.active(now));
  for (const auto& [node_id, member] : core.fleet().members.all()) {
    fill_node(*status.add_nodes(), core, member, now);
  }
  for (const auto& [id, version] : core.fleet().catalog.all()) {
    fill_version(*status.add_versions(), core, id, version);
  }
  for (const auto& [pull_id, pull] : core.pulls().table().all())
    fill_pull(*status.add_pulls(), pull_id, pull);
  for (const auto& [name, instance] : core.instances().all()) {
    fill_instance(*status.add_instances(), name, instance);
  }
  for (const Round* round : rounds_to_show(core.rounds())) {
    *status.add_rounds() = to_proto(*round, now);
  }
  status.set_waiting(static_cast<std::uint32_t>(core.pulls().waiting()));
  return status;
}

}  // namespace rekindle::coordinator
