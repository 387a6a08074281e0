#include "recovery/coordinator/status_wire.h"

#include <algorithm>
#include <utility>

#include "recovery/coordinator/coordinator_wire.h"
#include "recovery/coordinator/round_wire.h"
#include "recovery/rpc/convert.h"

namespace rekindle::coordinator {

namespace {

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
