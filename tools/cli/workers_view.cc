#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "recovery/rpc/update_phases.h"
#include "src/base/units.h"
#include "tools/cli/status_view.h"

namespace rekindle::cli {
namespace {

template <typename Message>
Json phases_json(const Message& message) {
  Json phases = Json::object();
  for (const auto& phase : message.phases()) phases[phase.name()] = phase.elapsed_us();
  return phases;
}

Json session_json(const proto::WorkerSession& session) {
  return {{"session", session.session()},
          {"rank", session.rank()},
          {"pid", session.pid()},
          {"state", session.state()},
          {"rung", session.rung()},
          {"bytes_done", session.bytes_done()},
          {"bytes_total", session.bytes_total()},
          {"phases_us", phases_json(session)}};
}

Json instance_json(const proto::WorkerInstance& instance) {
  Json sessions = Json::array();
  for (const auto& session : instance.sessions()) sessions.push_back(session_json(session));
  return {{"instance", instance.name()},
          {"named", instance.named()},
          {"state", instance.state()},
          {"model", instance.has_id() ? Json(instance.id().model()) : Json()},
          {"version", instance.has_id() ? Json(instance.id().version()) : Json()},
          {"generation", instance.generation()},
          {"world", instance.world()},
          {"why", instance.why()},
          {"sessions", std::move(sessions)}};
}

std::string version_of(const proto::WorkerInstance& instance) {
  if (!instance.has_id()) return "-";
  return printable(fmt::format("{}@{}", instance.id().model(), instance.id().version()));
}

// "plan 3 ms, wire 1200 ms": the phases that took time.
template <typename Message>
std::string phases_of(const Message& message) {
  std::string text;
  for (const auto& phase : message.phases()) {
    if (phase.elapsed_us() == 0) continue;
    text += fmt::format("{}{} {:.1f} ms", text.empty() ? "" : ", ", printable(phase.name()),
                        static_cast<double>(phase.elapsed_us()) / 1e3);
  }
  return text.empty() ? "-" : text;
}

std::string arrived(const proto::WorkerSession& session) {
  if (session.bytes_total() == 0) return "-";
  const double part = 100.0 * static_cast<double>(session.bytes_done()) /
                      static_cast<double>(session.bytes_total());
  return fmt::format("{:.0f} % of {}", std::floor(part), format_bytes(session.bytes_total()));
}

}  // namespace

Json instances_json(const proto::AgentStatusResponse& status) {
  Json result = Json::array();
  for (const auto& instance : status.instances()) result.push_back(instance_json(instance));
  return result;
}

std::string instances_text(const proto::AgentStatusResponse& status) {
  if (status.instances_size() == 0) return {};
  std::vector<std::vector<std::string>> instances, sessions;
  for (const auto& instance : status.instances()) {
    const std::string name = printable(instance.name());
    instances.push_back({name, printable(instance.state()), version_of(instance),
                         fmt::format("{}", instance.generation()),
                         fmt::format("{}", instance.world()),
                         instance.why().empty() ? "-" : printable(instance.why())});
    for (const auto& session : instance.sessions()) {
      sessions.push_back({name, fmt::format("{}", session.rank()), fmt::format("{}", session.pid()),
                          printable(session.state()),
                          session.rung().empty() ? "-" : printable(session.rung()),
                          arrived(session), phases_of(session)});
    }
  }
  std::string text = "\n" + table({{"INSTANCE"},
                                   {"STATE"},
                                   {"VERSION"},
                                   {"GENERATION", true},
                                   {"RANKS", true},
                                   {"WHY NOT READY"}},
                                  instances);
  if (!sessions.empty()) {
    text += "\n" + table({{"INSTANCE"},
                          {"RANK", true},
                          {"PID", true},
                          {"WORKER"},
                          {"RUNG"},
                          {"HERE", true},
                          {"TIMES"}},
                         sessions);
  }
  return text;
}

Json to_json(const proto::AgentEvent& event) {
  Json json{{"number", event.number()},
            {"time", utc_time(event.unix_us())},
            {"unix_us", event.unix_us()},
            {"event", event.kind()},
            {"instance", event.instance()}};
  if (event.has_id()) {
    json["model"] = event.id().model();
    json["version"] = event.id().version();
  }
  if (event.has_rank()) {
    json["rank"] = event.rank();
    json["session"] = event.session();
    json["pid"] = event.pid();
    if (!event.rung().empty()) json["rung"] = event.rung();
    json["phases_us"] = phases_json(event);
  }
  if (!event.why().empty()) json["why"] = event.why();
  return json;
}

std::string to_line(const proto::AgentEvent& event) {
  std::string line = utc_time(event.unix_us());
  if (!event.instance().empty()) line += " " + event.instance();
  if (event.has_rank()) line += fmt::format("/{} pid {}", event.rank(), event.pid());
  if (event.has_id()) line += fmt::format(" {}@{}", event.id().model(), event.id().version());
  if (!event.rung().empty()) line += " " + event.rung();
  line += " " + event.kind();
  if (!event.why().empty()) line += ": " + event.why();
  if (const auto phases = phases_of(event); event.has_rank() && phases != "-") {
    line += (event.why().empty() ? ": " : "; ") + phases;
  }
  return printable(line);
}

Json to_json(const proto::FleetEvent& event) {
  Json json{{"number", event.number()},
            {"time", utc_time(event.unix_us())},
            {"unix_us", event.unix_us()},
            {"kind", event.kind()}};
  const auto put = [&json](const char* name, const std::string& value) {
    if (!value.empty()) json[name] = value;
  };
  put("node", event.node_id());
  put("instance", event.instance());
  if (event.has_rank()) json["rank"] = event.rank();
  if (event.has_id()) {
    json["version"] = fmt::format("{}@{}", event.id().model(), event.id().version());
  }
  if (const auto pull = PullId::from_bytes(event.pull_id())) json["pull"] = pull->hex();
  if (event.round() != 0) json["round"] = event.round();
  put("rung", event.rung());
  put("why", event.why());
  if (event.bytes() > 0) json["bytes"] = event.bytes();
  if (event.elapsed_us() > 0) json["elapsed_us"] = event.elapsed_us();
  for (const auto& phase : event.phases()) {
    json["phases"].push_back({phase.name(), phase.elapsed_us()});
  }
  return json;
}

std::string to_line(const proto::FleetEvent& event) {
  std::string line = utc_time(event.unix_us());
  if (!event.node_id().empty()) line += " " + event.node_id();
  if (!event.instance().empty()) line += " " + event.instance();
  if (event.has_rank()) line += fmt::format("/{}", event.rank());
  if (event.has_id()) line += fmt::format(" {}@{}", event.id().model(), event.id().version());
  if (!event.rung().empty()) line += " " + event.rung();
  line += " " + event.kind();
  if (event.bytes() > 0) line += " " + format_bytes(event.bytes());
  if (event.elapsed_us() > 0) {
    line += fmt::format(" in {:.3f} s", static_cast<double>(event.elapsed_us()) / 1e6);
  }
  if (!event.why().empty()) line += ": " + event.why();
  return printable(line);
}

namespace {

using Member = proto::RoundStatus::Member;

bool by_broadcast(const Member& member) {
  return member.state() == "ready" && member.bytes() > 0 && member.spread_bytes() >= member.bytes();
}

double in_seconds(std::uint64_t ms) { return static_cast<double>(ms) / 1e3; }

std::string name_of(const proto::RoundStatus& round) {
  return printable(fmt::format("{}@{}", round.id().model(), round.id().version()));
}

std::string name_of(const Member& member) { return printable(rpc::name_of(member)); }

std::string seconds(std::uint64_t us) {
  return fmt::format("{:.3f}", static_cast<double>(us) / 1e6);
}

// Seconds of each phase over the ranks that have reported it.
std::string phases_table(const proto::RoundStatus& round) {
  std::vector<std::vector<std::string>> rows;
  for (const auto& phase : rpc::summarize_phases(round)) {
    rows.push_back({printable(phase.name()), seconds(phase.median_us()), seconds(phase.p95_us()),
                    seconds(phase.slowest_us()), printable(phase.slowest())});
  }
  if (rows.empty()) return {};
  return table({{"PHASE"}, {"MEDIAN s", true}, {"P95 s", true}, {"SLOWEST s", true}, {"RANK"}},
               rows);
}

Json phases_json(const proto::RoundStatus& round) {
  Json phases = Json::array();
  for (const auto& phase : rpc::summarize_phases(round)) {
    phases.push_back({{"phase", phase.name()},
                      {"median_us", phase.median_us()},
                      {"p95_us", phase.p95_us()},
                      {"slowest_us", phase.slowest_us()},
                      {"slowest", phase.slowest()}});
  }
  return phases;
}

Json phases_json(const Member& member) {
  Json phases = Json::object();
  for (const auto& phase : member.phases()) phases[phase.name()] = phase.elapsed_us();
  return phases;
}

std::string line_of(const Member& member) {
  std::string text = fmt::format("  {}: {}", name_of(member), printable(member.state()));
  if (member.bytes() > 0 && member.spread_bytes() < member.bytes()) {
    text += fmt::format(", {} of {} by broadcast", format_bytes(member.spread_bytes()),
                        format_bytes(member.bytes()));
  }
  if (!member.why().empty()) text += ": " + printable(member.why());
  return text + "\n";
}

}  // namespace

RoundCounts count(const proto::RoundStatus& round) {
  RoundCounts counts;
  for (const auto& member : round.members()) {
    ++counts.members;
    if (member.state() != "expected") ++counts.arrived;
    if (by_broadcast(member)) ++counts.by_broadcast;
    counts.bytes += member.bytes();
    counts.spread_bytes += std::min(member.spread_bytes(), member.bytes());
    if (member.state() != "ready") continue;
    ++counts.ready;
    counts.ready_bytes += member.bytes();
  }
  return counts;
}

std::string update_text(const proto::RoundStatus& round) {
  const RoundCounts counts = count(round);
  std::string text = fmt::format(
      "update {}: {} of {} workers ready, {} by broadcast, {} in {:.2f} s (gather {:.2f}, meet "
      "{:.2f}, spread {:.2f}, load {:.2f})\n",
      name_of(round), counts.ready, counts.members, counts.by_broadcast,
      format_bytes(counts.ready_bytes), in_seconds(round.elapsed_ms()),
      in_seconds(round.gather_ms()), in_seconds(round.meet_ms()), in_seconds(round.spread_ms()),
      in_seconds(round.load_ms()));
  for (const auto& member : round.members()) {
    if (!by_broadcast(member)) text += line_of(member);
  }
  return text + phases_table(round);
}

std::string rounds_table(const proto::ClusterStatusResponse& status) {
  std::vector<std::vector<std::string>> rows;
  for (const auto& round : status.rounds()) {
    const RoundCounts counts = count(round);
    std::string why;
    for (const auto& member : round.members()) {
      if (member.state() == "ready" || member.why().empty()) continue;
      why = fmt::format("{}: {}", name_of(member), printable(member.why()));
      break;
    }
    rows.push_back({fmt::format("{}", round.round()), name_of(round),
                    round.group().empty() ? "*" : printable(round.group()),
                    printable(round.phase()), fmt::format("{} of {}", counts.ready, counts.members),
                    fmt::format("{}", counts.by_broadcast),
                    fmt::format("{:.2f} s", in_seconds(round.elapsed_ms())), why});
  }
  return table({{"ROUND", true},
                {"VERSION"},
                {"GROUP"},
                {"PHASE"},
                {"READY", true},
                {"BROADCAST", true},
                {"TIME", true},
                {"WHY"}},
               rows);
}

Json to_json(const proto::RoundStatus& round) {
  Json members = Json::array();
  for (const auto& member : round.members()) {
    members.push_back({{"node", member.node_id()},
                       {"instance", member.instance()},
                       {"rank", member.rank()},
                       {"device", member.device()},
                       {"state", member.state()},
                       {"why", member.why()},
                       {"bytes", member.bytes()},
                       {"spread_bytes", member.spread_bytes()},
                       {"kept_bytes", member.kept_bytes()},
                       {"party", member.party()},
                       {"phases_us", phases_json(member)}});
  }
  const RoundCounts counts = count(round);
  return {{"round", round.round()},
          {"model", round.id().model()},
          {"version", round.id().version()},
          {"group", round.group()},
          {"phase", round.phase()},
          {"ready", counts.ready},
          {"by_broadcast", counts.by_broadcast},
          {"elapsed_ms", round.elapsed_ms()},
          {"gather_ms", round.gather_ms()},
          {"meet_ms", round.meet_ms()},
          {"spread_ms", round.spread_ms()},
          {"load_ms", round.load_ms()},
          {"phases", phases_json(round)},
          {"members", members}};
}

}  // namespace rekindle::cli
