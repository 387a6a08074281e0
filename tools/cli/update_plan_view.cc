#include "tools/cli/update_plan_view.h"

#include <algorithm>
#include <vector>

#include <fmt/format.h>

#include "src/base/units.h"

namespace rekindle::cli {

namespace {

constexpr std::size_t kOwnersShown = 4;

std::string name_of(const proto::UpdatePlan::Rank& rank) {
  return fmt::format("rank {} of {} on {}", rank.rank(), printable(rank.instance()),
                     printable(rank.node_id()));
}

std::string line_of(std::size_t number, const proto::UpdatePlan::Party& party) {
  std::vector<const proto::UpdatePlan::Rank*> owners;
  for (const auto& rank : party.ranks()) {
    if (rank.owner()) owners.push_back(&rank);
  }
  std::uint64_t rest = 0;
  for (const auto& rank : party.ranks()) rest += rank.rest();
  std::string line = fmt::format("  party {}: {} rank(s) of {}", number, party.ranks_size(),
                                 format_bytes(party.bytes()));
  if (rest > 0)
    line += fmt::format(" in common, and {} that not all of them want", format_bytes(rest));
  line += "; ";
  line += party.owners_fetch() ? "uploaded, once fetched, by " : "uploaded by ";
  for (std::size_t i = 0; i < std::min(owners.size(), kOwnersShown); ++i) {
    line += fmt::format("{}{} ({})", i == 0 ? "" : ", ", name_of(*owners[i]),
                        format_bytes(owners[i]->uploads()));
  }
  if (owners.size() > kOwnersShown) {
    line += fmt::format(" and {} more", owners.size() - kOwnersShown);
  }
  return line + "\n";
}

}  // namespace

SlowestLink slowest_link(const proto::UpdatePlan& plan, const LinkRates& rates) {
  SlowestLink slowest;
  const auto consider = [&](std::uint64_t bytes, std::uint64_t rate, const char* what,
                            const std::string& node) {
    const double seconds = static_cast<double>(bytes) / static_cast<double>(rate);
    if (seconds > slowest.seconds) slowest = {seconds, fmt::format("{} {}", what, printable(node))};
  };
  for (const auto& host : plan.hosts()) {
    consider(host.fetches() + host.receives(), rates.host, "the network into", host.node_id());
    consider(host.gives() + host.sends(), rates.host, "the network out of", host.node_id());
    consider(host.busiest_upload(), rates.gpu, "the PCIe link of a GPU of", host.node_id());
  }
  return slowest;
}

Json to_json(const proto::UpdatePlan& plan, const LinkRates& rates) {
  Json parties = Json::array();
  for (const auto& party : plan.parties()) {
    Json ranks = Json::array();
    for (const auto& rank : party.ranks()) {
      ranks.push_back({{"node", rank.node_id()},
                       {"instance", rank.instance()},
                       {"rank", rank.rank()},
                       {"device", rank.device()},
                       {"owner", rank.owner()},
                       {"uploads", rank.uploads()},
                       {"rest", rank.rest()}});
    }
    parties.push_back(
        {{"bytes", party.bytes()}, {"owners_fetch", party.owners_fetch()}, {"ranks", ranks}});
  }
  Json hosts = Json::array();
  for (const auto& host : plan.hosts()) {
    hosts.push_back({{"node", host.node_id()},
                     {"fetches", host.fetches()},
                     {"receives", host.receives()},
                     {"sends", host.sends()},
                     {"gives", host.gives()},
                     {"busiest_upload", host.busiest_upload()}});
  }
  const SlowestLink slowest = slowest_link(plan, rates);
  return {{"parties", parties},
          {"hosts", hosts},
          {"ready", plan.ready()},
          {"unknown", plan.unknown()},
          {"expected_seconds", slowest.seconds},
          {"slowest_link", slowest.name}};
}

std::string plan_text(const ModelVersion& id, const proto::UpdatePlan& plan,
                      const LinkRates& rates) {
  std::size_t ranks = 0;
  for (const auto& party : plan.parties()) ranks += static_cast<std::size_t>(party.ranks_size());
  std::string text = fmt::format("update {} would bring it to {} worker(s); {} have it\n",
                                 id.to_string(), ranks, plan.ready());
  if (plan.unknown() > 0) {
    text +=
        fmt::format("  {} worker(s) have agents that do not say what they want\n", plan.unknown());
  }
  std::size_t number = 0;
  for (const auto& party : plan.parties()) text += line_of(++number, party);
  std::vector<std::vector<std::string>> rows;
  for (const auto& host : plan.hosts()) {
    rows.push_back({printable(host.node_id()), format_bytes(host.fetches()),
                    format_bytes(host.receives()), format_bytes(host.sends()),
                    format_bytes(host.gives()), format_bytes(host.busiest_upload())});
  }
  text += table({{"HOST"},
                 {"FETCHES", true},
                 {"RECEIVES", true},
                 {"SENDS", true},
                 {"GIVES", true},
                 {"A GPU UPLOADS", true}},
                rows);
  const SlowestLink slowest = slowest_link(plan, rates);
  if (slowest.seconds > 0) {
    text += fmt::format(
        "expected: {:.2f} s, by {} (at {}/s of a host's network each way, {}/s of a "
        "GPU)\n",
        slowest.seconds, slowest.name, format_bytes(rates.host), format_bytes(rates.gpu));
  }
  return text;
}

}  // namespace rekindle::cli
