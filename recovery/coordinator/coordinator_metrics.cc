#include "recovery/coordinator/coordinator_metrics.h"

#include <map>
#include <string_view>

#include "recovery/coordinator/coordinator_wire.h"

namespace rekindle::coordinator {

namespace {

using Counts = std::map<std::string_view, double>;

void read_members(const Core& core, TimePoint now, metrics::Readings& readings) {
  Counts members;
  double drained = 0;
  double free_bytes = 0;
  double held_bytes = 0;
  for (const auto& [node_id, member] : core.fleet().members.all()) {
    ++members[state_name(member, now)];
    if (core.fleet().drained(node_id)) ++drained;
    if (member.is_dead()) continue;
    free_bytes += static_cast<double>(member.store_free_bytes);
    for (const auto& [key, holding] : member.holdings.all()) {
      if (holding.complete) held_bytes += static_cast<double>(holding.payload_bytes);
    }
  }
  readings.gauge_by_state("rekindle_members", "Agents that the coordinator knows, by state.",
                          {"alive", "suspect", "flapping", "quarantined", "dead"}, members);
  readings.gauge("rekindle_drained_members", "Agents that get no new pulls.", drained);
  readings.gauge("rekindle_fleet_held_bytes",
                 "Bytes of complete copies and parts on agents that are not dead.", held_bytes);
  readings.gauge("rekindle_fleet_free_bytes",
                 "Bytes that the stores of agents that are not dead have left in their budgets.",
                 free_bytes);
}

void read_versions(const Core& core, metrics::Readings& readings) {
  Counts versions;
  for (const auto& [id, version] : core.fleet().catalog.all()) {
    ++versions[state_name(core.readiness().state_of(id))];
  }
  readings.gauge_by_state("rekindle_versions", "Versions that the coordinator knows, by state.",
                          {"staging", "ready", "retiring"}, versions);
  readings.gauge("rekindle_versions_short_of_copies",
                 "Versions with fewer whole copies than --replicas asks for.",
                 static_cast<double>(core.replicas().shortages().size()));
  readings.gauge("rekindle_replica_copies_running", "Copies that the coordinator has ordered.",
                 static_cast<double>(core.replicas().tasks().size()));
}

void read_work(const Core& core, metrics::Readings& readings) {
  readings.gauge("rekindle_pulls_running", "Pulls that the coordinator knows.",
                 static_cast<double>(core.pulls().table().all().size()));
  readings.gauge("rekindle_pulls_waiting", "Pulls that wait because every source is busy.",
                 static_cast<double>(core.pulls().waiting()));
  Counts instances;
  for (const auto& [name, instance] : core.instances().all()) {
    ++instances[state_name(Instances::answer(instance).state)];
  }
  readings.gauge_by_state("rekindle_fleet_instances",
                          "Instances with ranks on several hosts, by state.",
                          {"loading", "committed", "unfit"}, instances);
  Counts rounds;
  for (const auto& [id, round] : core.rounds().all()) ++rounds[to_string(round.phase())];
  readings.gauge_by_state("rekindle_rounds",
                          "Rounds that the coordinator knows, by phase; those that are over for "
                          "ten minutes.",
                          {"gathering", "meeting", "spreading", "loading", "over"}, rounds);
}

}  // namespace

void read_fleet(const Core& core, TimePoint now, metrics::Readings& readings) {
  readings.gauge("rekindle_coordinator_epoch", "The epoch of the coordinator that leads.",
                 static_cast<double>(core.fleet().epoch()));
  readings.gauge("rekindle_coordinator_grace",
                 "1 while the coordinator waits for agents to report after its start.",
                 core.fleet().grace.active(now) ? 1 : 0);
  read_members(core, now, readings);
  read_versions(core, readings);
  read_work(core, readings);
}

}  // namespace rekindle::coordinator
