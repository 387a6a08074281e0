#include "recovery/coordinator/fleet_json.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <string_view>
#include <utility>

#include <nlohmann/json.hpp>

#include "recovery/coordinator/round_wire.h"

namespace rekindle::coordinator {

using nlohmann::json;

namespace {

// The page shows no more, and the answer about a fleet that joins at once stays small.
constexpr std::size_t kMostPulls = 100;
constexpr std::size_t kMostInstances = 500;
constexpr int kMostRoundMembers = 256;
constexpr std::size_t kMostEvents = 512;
constexpr std::size_t kHaveCells = 512;
constexpr std::size_t kFewHaveCells = 64;

// Names come from the network: what is not UTF-8 in them becomes U+FFFD.
std::string text_of(const json& value) {
  return value.dump(-1, ' ', false, json::error_handler_t::replace);
}

std::int64_t unix_ms(WallTime at) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(at.time_since_epoch()).count();
}

std::int64_t unix_ms(TimePoint at, const Moment& moment) {
  // Rounded once: the answer of a fleet at rest stays the same.
  return unix_ms(moment.at - (moment.now - at));
}

double rounded(double value) { return std::round(value * 1000) / 1000; }

std::uint64_t tiles_in(const TileRuns& runs) {
  std::uint64_t count = 0;
  for (const auto& [begin, end] : runs) count += end - begin;
  return count;
}

// The share of the checkpoint that the node has, by bytes or tiles.
double share_of(const Holding& holding) {
  if (holding.complete && holding.whole) return 1;
  if (holding.complete) {
    return holding.checkpoint_bytes == 0 ? 0
                                         : static_cast<double>(holding.payload_bytes) /
                                               static_cast<double>(holding.checkpoint_bytes);
  }
  return holding.checkpoint_tiles == 0 ? 0
                                       : static_cast<double>(tiles_in(holding.held)) /
                                             static_cast<double>(holding.checkpoint_tiles);
}

// The versions of an answer, and the place of each in its list.
using Places = std::map<ModelVersion, std::size_t>;

json copies_of(const Member& member, const Places& places) {
  json copies = json::array();
  for (const auto& [key, holding] : member.holdings.all()) {
    const auto place = places.find(key.id);
    if (place == places.end()) continue;
    copies.push_back({place->second, rounded(share_of(holding)), holding.counts() ? 1 : 0});
  }
  return copies;
}

// How many pulls run on each node, by its id.
std::map<std::string_view, std::size_t> pulls_of_nodes(const Core& core) {
  std::map<std::string_view, std::size_t> counts;
  for (const auto& [id, pull] : core.pulls().table().all()) ++counts[pull.puller.node_id];
  return counts;
}

json node_json(const Core& core, const Member& member, const Places& places, const Moment& moment) {
  json node = {{"id", member.info.node_id}, {"address", member.info.control_endpoint}};
  const std::string_view state = state_name(member, moment.now);
  if (state != "alive") {
    node["state"] = state;
    node["heard_ms"] = unix_ms(member.last_heard, moment);
  }
  if (!member.failure_domain.empty()) node["domain"] = member.failure_domain;
  if (core.fleet().drained(member.info.node_id)) node["drained"] = true;
  if (member.store_free_bytes > 0) node["free"] = member.store_free_bytes;
  if (const json copies = copies_of(member, places); !copies.empty()) node["copies"] = copies;
  const std::size_t pullers = core.pulls().table().pullers_of(member.info.incarnation);
  if (pullers > 0) node["pullers"] = pullers;
  const double health = std::round(member.standing.health.at(moment.now) * 100) / 100;
  if (health < 1) node["health"] = health;
  return node;
}

json version_json(const Core& core, const ModelVersion& id, const DurableVersion& version) {
  json entry = {{"id", id.to_string()},
                {"bytes", version.checkpoint_bytes},
                {"state", state_name(core.readiness().state_of(id))},
                {"whole_copies", core.readiness().whole_copies(id)},
                {"replicas", core.replicas().wanted(version)}};
  const auto& tasks = core.replicas().tasks();
  const auto& shortages = core.replicas().shortages();
  if (const auto task = tasks.find(id); task != tasks.end()) {
    entry["copying_to"] = task->second.node_id;
  } else if (const auto found = shortages.find(id); found != shortages.end()) {
    entry["short"] = found->second.why.empty() ? "about to be copied" : found->second.why;
  }
  return entry;
}

// The versions that are not retired, and those that a node still holds.
Places versions_of(const Core& core) {
  Places places;
  for (const ModelVersion& id : core.fleet().catalog.live()) places[id] = 0;
  for (const auto& [node_id, member] : core.fleet().members.all()) {
    for (const auto& [key, holding] : member.holdings.all()) {
      if (core.fleet().catalog.find(key.id) != nullptr) places[key.id] = 0;
    }
  }
  std::size_t place = 0;
  for (auto& [id, index] : places) index = place++;
  return places;
}

// The tiles that a puller has, in at most `cells` parts; "" when nobody knows.
std::string have_of(const Core& core, const Pull& pull, std::size_t cells) {
  const Member* puller = core.fleet().members.find(pull.puller.node_id, pull.puller.incarnation);
  if (puller == nullptr) return "";
  for (const auto& [key, holding] : puller->holdings.of(pull.id)) {
    if (!holding.complete) return have_map(holding.held, holding.checkpoint_tiles, cells);
  }
  return "";
}

json pull_json(const Core& core, const PullId& id, const Pull& pull, const Moment& moment,
               std::size_t cells) {
  json entry = {{"id", id.hex()},
                {"node", pull.puller.node_id},
                {"version", pull.id.to_string()},
                {"done", pull.bytes_done},
                {"total", pull.bytes_total},
                {"rate", std::round(pull.bytes_per_second)},
                {"opened_ms", unix_ms(pull.opened, moment)}};
  if (!pull.shard.empty()) entry["shard"] = pull.shard;
  json sources = json::array();
  for (const SourceReport& report : pull.reports.all()) {
    json source = {{"node", report.node_id},
                   {"bytes", report.bytes},
                   {"rate", std::round(report.goodput_bytes_per_second)}};
    if (report.lost) source["lost"] = true;
    if (report.quarantine) source["wrong_bytes"] = true;
    if (report.failures > 0) source["failures"] = report.failures;
    if (!report.cause.empty()) source["cause"] = report.cause;
    sources.push_back(std::move(source));
  }
  entry["sources"] = std::move(sources);
  if (std::string have = have_of(core, pull, cells); !have.empty()) entry["have"] = std::move(have);
  return entry;
}

json instance_json(const std::string& name, const Instance& instance) {
  const InstanceAnswer answer = Instances::answer(instance);
  json entry = {{"name", name},
                {"version", answer.id.to_string()},
                {"state", state_name(answer.state)},
                {"loaded", answer.loaded},
                {"world", answer.world}};
  if (!answer.why.empty()) entry["why"] = answer.why;
  json nodes = json::array();
  for (const auto& [rank, at] : instance.ranks) {
    if (nodes.empty() || nodes.back() != at.node_id) nodes.push_back(at.node_id);
  }
  entry["nodes"] = std::move(nodes);
  return entry;
}

// At most so many, those that are not committed first; and how many there are in each state.
void put_instances(const Core& core, json& answer) {
  std::map<InstanceState, std::size_t> counts;
  json entries = json::array();
  for (const bool committed : {false, true}) {
    for (const auto& [name, instance] : core.instances().all()) {
      const InstanceState state = Instances::answer(instance).state;
      if ((state == InstanceState::kCommitted) != committed) continue;
      ++counts[state];
      if (entries.size() < kMostInstances) entries.push_back(instance_json(name, instance));
    }
  }
  answer["instances"] = std::move(entries);
  answer["instances_total"] = core.instances().all().size();
  answer["instances_committed"] = counts[InstanceState::kCommitted];
  answer["instances_unfit"] = counts[InstanceState::kUnfit];
}

// At most so many, and figures of all of them.
void put_pulls(const Core& core, const Moment& moment, json& answer) {
  json entries = json::array();
  double rate = 0;
  for (const auto& [id, pull] : core.pulls().table().all()) {
    rate += pull.bytes_per_second;
    if (entries.size() >= kMostPulls) continue;
    entries.push_back(pull_json(core, id, pull, moment, kFewHaveCells));
  }
  answer["pulls"] = std::move(entries);
  answer["pulls_total"] = core.pulls().table().all().size();
  answer["pulls_rate"] = std::round(rate);
}

json phases_json(const proto::RoundStatus::Member& member) {
  json phases = json::array();
  for (const auto& phase : member.phases()) phases.push_back({phase.name(), phase.elapsed_us()});
  return phases;
}

json round_json(const proto::RoundStatus& round) {
  json entry = {{"round", round.round()},
                {"version", round.id().model() + "@" + std::to_string(round.id().version())},
                {"group", round.group()},
                {"phase", round.phase()},
                {"elapsed_ms", round.elapsed_ms()},
                {"phases",
                 {{"gathering", round.gather_ms() * 1000},
                  {"meeting", round.meet_ms() * 1000},
                  {"spreading", round.spread_ms() * 1000},
                  {"loading", round.load_ms() * 1000}}},
                {"members_total", round.members_size()}};
  json members = json::array();
  for (int i = 0; i < std::min(round.members_size(), kMostRoundMembers); ++i) {
    const auto& member = round.members(i);
    json each = {{"node", member.node_id()}, {"instance", member.instance()},
                 {"rank", member.rank()},    {"state", member.state()},
                 {"bytes", member.bytes()},  {"spread", member.spread_bytes()}};
    if (!member.why().empty()) each["why"] = member.why();
    if (member.phases_size() > 0) each["phases"] = phases_json(member);
    members.push_back(std::move(each));
  }
  entry["members"] = std::move(members);
  return entry;
}

json event_json(const FleetEvent& event) {
  json entry = {{"number", event.number}, {"ms", unix_ms(event.at)}, {"kind", event.kind}};
  const auto put = [&entry](const char* name, const std::string& value) {
    if (!value.empty()) entry[name] = value;
  };
  put("node", event.node_id);
  put("instance", event.instance);
  put("rung", event.rung);
  put("why", event.why);
  if (event.id) entry["version"] = event.id->to_string();
  if (!event.pull_id.is_nil()) entry["pull"] = event.pull_id.hex();
  if (event.round != 0) entry["round"] = event.round;
  if (event.rank) entry["rank"] = *event.rank;
  if (event.bytes > 0) entry["bytes"] = event.bytes;
  if (event.elapsed_us > 0) entry["elapsed_us"] = event.elapsed_us;
  for (const PhaseTime& phase : event.phases) {
    entry["phases"].push_back({phase.name, phase.elapsed_us});
  }
  return entry;
}

}  // namespace

std::string have_map(const TileRuns& runs, std::uint32_t tiles, std::size_t cells) {
  const std::size_t count = std::min<std::size_t>(cells, tiles);
  std::string map(count, '0');
  std::size_t run = 0;
  for (std::size_t cell = 0; cell < count; ++cell) {
    const std::uint64_t begin = std::uint64_t{tiles} * cell / count;
    const std::uint64_t end = std::uint64_t{tiles} * (cell + 1) / count;
    while (run < runs.size() && runs[run].second <= begin) ++run;
    std::uint64_t covered = 0;
    for (std::size_t i = run; i < runs.size() && runs[i].first < end; ++i) {
      const auto from = std::max<std::uint64_t>(runs[i].first, begin);
      covered += std::min<std::uint64_t>(runs[i].second, end) - from;
    }
    const std::uint64_t tenth = covered * 9 / (end - begin);
    // A part with anything in it is not shown as empty.
    map[cell] = static_cast<char>('0' + (covered > 0 ? std::max<std::uint64_t>(tenth, 1) : 0));
  }
  return map;
}

std::string fleet_json(const Core& core, const FleetWatch& watch, const Moment& moment) {
  const Places places = versions_of(core);
  json versions = json::array();
  for (const auto& [id, place] : places) {
    versions.push_back(version_json(core, id, *core.fleet().catalog.find(id)));
  }
  const auto pulls = pulls_of_nodes(core);
  json nodes = json::array();
  for (const auto& [node_id, member] : core.fleet().members.all()) {
    nodes.push_back(node_json(core, member, places, moment));
    if (const auto own = pulls.find(node_id); own != pulls.end()) {
      nodes.back()["pulls"] = own->second;
    }
  }
  json rounds = json::array();
  for (const Round* round : rounds_to_show(core.rounds())) {
    rounds.push_back(round_json(to_proto(*round, moment.now)));
  }
  json answer = {{"leading", true},
                 {"epoch", core.fleet().epoch()},
                 {"term", watch.term().hex()},
                 {"grace", core.fleet().grace.active(moment.now)},
                 {"last_event", watch.log().last()},
                 {"waiting", core.pulls().waiting()},
                 {"versions", std::move(versions)},
                 {"nodes", std::move(nodes)},
                 {"rounds", std::move(rounds)}};
  put_pulls(core, moment, answer);
  put_instances(core, answer);
  return text_of(answer);
}

std::string pull_json(const Core& core, const PullId& id, const Moment& moment) {
  const auto& pulls = core.pulls().table().all();
  const auto pull = pulls.find(id);
  if (pull == pulls.end()) return "null";
  return text_of(pull_json(core, id, pull->second, moment, kHaveCells));
}

std::string events_json(const FleetWatch& watch, std::uint64_t after) {
  json events = json::array();
  for (const FleetEvent& event : watch.log().after(after, kMostEvents)) {
    events.push_back(event_json(event));
  }
  return text_of({{"term", watch.term().hex()},
                  {"last_event", watch.log().last()},
                  {"events", std::move(events)}});
}

std::string standby_json(const std::string& why) {
  return text_of({{"leading", false}, {"why", why}});
}

std::string error_json(const std::string& error) { return text_of({{"error", error}}) + "\n"; }

}  // namespace rekindle::coordinator
