#include "tools/cli/rounds_view.h"

#include <algorithm>
#include <vector>

#include "src/base/units.h"

namespace rekindle::cli {
namespace {

using Member = proto::RoundStatus::Member;

bool by_broadcast(const Member& member) {
  return member.state() == "ready" && member.bytes() > 0 && member.spread_bytes() >= member.bytes();
}

double in_seconds(std::uint64_t ms) { return static_cast<double>(ms) / 1e3; }

std::string name_of(const proto::RoundStatus& round) {
  return printable(fmt::format("{}@{}", round.id().model(), round.id().version()));
}

// A worker without an instance is named by its process, without a rank.
std::string name_of(const Member& member) {
  if (member.instance().starts_with("pid-")) {
    return printable(fmt::format("{} on {}", member.instance(), member.node_id()));
  }
  return printable(
      fmt::format("rank {} of {} on {}", member.rank(), member.instance(), member.node_id()));
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
  return text;
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
                       {"party", member.party()}});
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
          {"members", members}};
}

}  // namespace rekindle::cli
