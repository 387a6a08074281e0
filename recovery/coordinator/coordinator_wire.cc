#include "recovery/coordinator/coordinator_wire.h"

#include <algorithm>
#include <utility>

#include "recovery/coordinator/round_wire.h"
#include "recovery/rpc/address.h"
#include "recovery/rpc/convert.h"
#include "recovery/rpc/grants.h"

namespace rekindle::coordinator {

namespace {

constexpr std::size_t kMaxTextBytes = 512;
constexpr int kMaxCoverRuns = 16'384;
constexpr std::uint64_t kMaxTiles = std::uint64_t{1} << 32;
constexpr int kMaxVersionsPerHeartbeat = 4096;

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

Result<SourceReport> from_proto(const proto::SourceReport& message) {
  TRY_VOID(check_text("a source's name", message.node_id()));
  SourceReport report;
  report.node_id = message.node_id();
  TRY(report.incarnation, Incarnation::from_bytes(message.incarnation()));
  report.bytes = message.bytes();
  report.goodput_bytes_per_second = message.goodput_bytes_per_second();
  report.failures = message.failures();
  report.lost = message.lost();
  report.quarantine = message.quarantine();
  report.cause = message.cause().substr(0, kMaxTextBytes);
  return report;
}

std::string_view state_name(const Member& member, TimePoint now) {
  if (member.is_dead()) return "dead";
  if (member.standing.quarantined(now)) return "quarantined";
  if (member.flapping.left_out(now)) return "flapping";
  if (member.state == NodeState::kSuspect || member.connection.empty()) return "suspect";
  return "alive";
}

std::string_view state_name(VersionState state) {
  switch (state) {
    case VersionState::kStaging:
      return "staging";
    case VersionState::kReady:
      return "ready";
    case VersionState::kRetiring:
      return "retiring";
  }
  return "unknown";
}

std::string_view state_name(InstanceState state) {
  switch (state) {
    case InstanceState::kLoading:
      return "loading";
    case InstanceState::kCommitted:
      return "committed";
    case InstanceState::kUnfit:
      return "unfit";
  }
  return "unknown";
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
  *entry.mutable_id() = rpc::to_proto(pull.id);
  entry.set_shard(pull.shard);
  entry.set_bytes_done(pull.bytes_done);
  entry.set_bytes_total(pull.bytes_total);
  entry.set_bytes_per_second(pull.bytes_per_second);
  for (const auto& report : pull.reports.all()) *entry.add_sources() = to_proto(report);
}

void fill_instance(proto::InstanceStatus& entry, const std::string& name,
                   const Instance& instance) {
  const InstanceAnswer answer = Instances::answer(instance);
  entry.set_instance(name);
  entry.set_generation(instance.generation);
  *entry.mutable_id() = rpc::to_proto(answer.id);
  entry.set_state(std::string(state_name(answer.state)));
  entry.set_loaded(answer.loaded);
  entry.set_world(answer.world);
  entry.set_why(answer.why);
}

}  // namespace

Result<void> check_text(std::string_view what, std::string_view text) {
  if (text.size() <= kMaxTextBytes) return {};
  return fail(ErrorCode::kInvalid, "{} of {} bytes; {} are allowed", what, text.size(),
              kMaxTextBytes);
}

proto::SourceReport to_proto(const SourceReport& report) {
  proto::SourceReport message;
  message.set_node_id(report.node_id);
  message.set_incarnation(report.incarnation.to_bytes());
  message.set_bytes(report.bytes);
  message.set_goodput_bytes_per_second(report.goodput_bytes_per_second);
  message.set_failures(report.failures);
  message.set_lost(report.lost);
  message.set_quarantine(report.quarantine);
  message.set_cause(report.cause);
  return message;
}

Result<NodeInfo> from_proto(const proto::NodeAddress& node) {
  TRY_VOID(check_text("a node id", node.node_id()));
  TRY_VOID(check_text("an address", node.control_endpoint()));
  TRY_VOID(check_text("a host id", node.host_id()));
  NodeInfo info;
  info.node_id = node.node_id();
  TRY(info.incarnation, Incarnation::from_bytes(node.incarnation()));
  info.control_endpoint = node.control_endpoint();
  info.host_id = node.host_id();
  return info;
}

proto::NodeAddress to_proto(const NodeInfo& node) {
  proto::NodeAddress message;
  message.set_node_id(node.node_id);
  message.set_incarnation(node.incarnation.to_bytes());
  message.set_control_endpoint(node.control_endpoint);
  message.set_host_id(node.host_id);
  return message;
}

Result<Holding> from_proto(const proto::Holding& message) {
  Holding holding;
  TRY(holding.id, rpc::from_proto(message.id()));
  holding.root = rpc::from_proto(message.root());
  holding.tensor_set = rpc::from_proto(message.tensor_set());
  holding.layout = rpc::from_proto(message.layout());
  if (holding.root.is_nil() || holding.layout.is_nil()) {
    return fail(ErrorCode::kInvalid, "a holding of {} without root or layout",
                holding.id.to_string());
  }
  holding.payload_bytes = message.payload_bytes();
  holding.checkpoint_bytes = message.checkpoint_bytes();
  holding.complete = message.complete();
  holding.whole = message.whole();
  holding.verified = message.verified();
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
  return holding;
}

proto::Holding to_proto(const Holding& holding) {
  proto::Holding message;
  *message.mutable_id() = rpc::to_proto(holding.id);
  *message.mutable_root() = rpc::to_proto(holding.root);
  *message.mutable_tensor_set() = rpc::to_proto(holding.tensor_set);
  *message.mutable_layout() = rpc::to_proto(holding.layout);
  message.set_payload_bytes(holding.payload_bytes);
  message.set_checkpoint_bytes(holding.checkpoint_bytes);
  message.set_complete(holding.complete);
  message.set_whole(holding.whole);
  message.set_verified(holding.verified);
  // Without `held`, so that a status stays small.
  return message;
}

Result<OpenPullRequest> from_proto(const proto::OpenPullRequest& message) {
  OpenPullRequest request;
  TRY(request.puller, from_proto(message.puller()));
  TRY_VOID(check_model_name(message.model()));
  request.model = message.model();
  if (!message.latest()) request.version = message.version();
  request.shard = message.shard().substr(0, kMaxTextBytes);
  return request;
}

Result<PullProgress> from_proto(const proto::PullProgressRequest& message) {
  PullProgress progress;
  TRY(progress.pull_id, PullId::from_bytes(message.pull_id()));
  TRY(progress.puller, from_proto(message.puller()));
  TRY(progress.id, rpc::from_proto(message.id()));
  progress.bytes_done = message.bytes_done();
  progress.bytes_total = message.bytes_total();
  for (const auto& source : message.sources()) {
    TRY(SourceReport report, from_proto(source));
    progress.sources.push_back(std::move(report));
  }
  return progress;
}

proto::Source to_proto(const SourceOffer& offer, const Issuer& issuer) {
  proto::Source source;
  *source.mutable_node() = to_proto(offer.node);
  *source.mutable_layout() = rpc::to_proto(offer.layout);
  source.set_complete(offer.complete);
  if (!offer.complete) *source.mutable_held() = rpc::to_proto(offer.held);
  source.set_payload_bytes(offer.payload_bytes);
  proto::Grant& grant = *source.mutable_grant();
  grant.set_puller_incarnation(offer.grant.puller.to_bytes());
  grant.set_source_incarnation(offer.grant.source.to_bytes());
  *grant.mutable_root() = rpc::to_proto(offer.grant.root);
  grant.set_issuer(issuer.incarnation.to_bytes());
  grant.set_expiry_ms(offer.grant.expiry_ms);
  grant.set_max_bytes_per_second(offer.grant.max_bytes_per_second);
  grant.set_serial(offer.grant.serial);
  grant.set_epoch(offer.grant.epoch);
  rpc::sign_grant(grant, issuer.secret);
  return source;
}

proto::OpenPullResponse to_proto(const OpenedPull& opened, const Issuer& issuer) {
  proto::OpenPullResponse response;
  if (!opened.pull_id.is_nil()) response.set_pull_id(opened.pull_id.to_bytes());
  *response.mutable_id() = rpc::to_proto(opened.id);
  *response.mutable_root() = rpc::to_proto(opened.version.root);
  *response.mutable_tensor_set() = rpc::to_proto(opened.version.tensor_set);
  response.set_checkpoint_bytes(opened.version.checkpoint_bytes);
  response.set_epoch(opened.epoch);
  response.set_lease_ms(static_cast<std::uint32_t>(milliseconds(opened.lease)));
  for (const auto& offer : opened.sources) *response.add_sources() = to_proto(offer, issuer);
  response.set_retry_after_ms(static_cast<std::uint32_t>(milliseconds(opened.retry_after)));
  return response;
}

Result<void> check_speaker(const rpc::Peer& peer, const std::string& incarnation) {
  if (peer.incarnation.to_bytes() == incarnation) return {};
  return fail(ErrorCode::kDenied, "the call speaks for another process than the connection's");
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
  heartbeat.epoch = message.epoch();
  heartbeat.progress = message.progress();
  heartbeat.store_free_bytes = message.store_free_bytes();
  for (const auto& entry : message.readers()) {
    TRY(ModelVersion id, rpc::from_proto(entry.id()));
    heartbeat.readers[std::move(id)] = entry.readers();
  }
  for (const auto& failed : message.failed_fetches()) {
    TRY(ModelVersion id, rpc::from_proto(failed));
    heartbeat.failed_fetches.push_back(std::move(id));
  }
  for (const auto& running : message.fetching()) {
    TRY(ModelVersion id, rpc::from_proto(running));
    heartbeat.fetching.push_back(std::move(id));
  }
  return heartbeat;
}

proto::HeartbeatResponse to_proto(const HeartbeatAnswer& answer) {
  proto::HeartbeatResponse response;
  response.set_epoch(answer.epoch);
  response.set_coordinator_time_ms(answer.coordinator_time_ms);
  for (const auto& id : answer.retire) *response.add_retire() = rpc::to_proto(id);
  for (const auto& id : answer.retiring) *response.add_retiring() = rpc::to_proto(id);
  for (const auto& fetch : answer.fetch) {
    auto& message = *response.add_fetch();
    *message.mutable_id() = rpc::to_proto(fetch.id);
    *message.mutable_root() = rpc::to_proto(fetch.root);
    message.set_max_bytes_per_second(fetch.max_bytes_per_second);
  }
  response.set_drained(answer.drained);
  return response;
}

Result<RankReport> from_proto(const proto::RankReport& message) {
  TRY_VOID(check_text("a node id", message.node_id()));
  TRY_VOID(check_text("an instance's name", message.instance()));
  TRY_VOID(check_model_name(message.model()));
  RankReport report;
  report.node_id = message.node_id();
  TRY(report.incarnation, Incarnation::from_bytes(message.incarnation()));
  report.instance = message.instance();
  report.generation = message.generation();
  report.rank = message.rank();
  report.world = message.world();
  report.model = message.model();
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
  report.sequence = message.sequence();
  report.why = message.why().substr(0, kMaxTextBytes);
  return report;
}

proto::RankResponse to_proto(const InstanceAnswer& answer) {
  proto::RankResponse response;
  *response.mutable_id() = rpc::to_proto(answer.id);
  response.set_state(kInstanceStates.to_wire(answer.state));
  response.set_loaded(answer.loaded);
  response.set_world(answer.world);
  response.set_why(answer.why);
  return response;
}

proto::DrainResponse to_proto(const Draining& draining) {
  proto::DrainResponse response;
  response.set_pullers(static_cast<std::uint32_t>(draining.readers));
  for (const auto& id : draining.sole_copies) *response.add_sole_copies() = rpc::to_proto(id);
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
