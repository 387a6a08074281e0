#include "tools/cli/top_view.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "src/base/units.h"
#include "tools/cli/output.h"
#include "tools/cli/status_view.h"

namespace rekindle::cli {
namespace {

constexpr std::size_t kBarCells = 16;
// An empty line, the names of the columns, a row, and one that says how many were left out.
constexpr std::size_t kSmallestPart = 4;

struct Rates {
  double in = 0;
  double out = 0;
};

// By node, from the reports of the pulls that run.
std::map<std::string, Rates> rates_of(const proto::ClusterStatusResponse& status) {
  std::map<std::string, Rates> rates;
  for (const auto& pull : status.pulls()) {
    rates[pull.puller()].in += pull.bytes_per_second();
    for (const auto& source : pull.sources()) {
      if (!source.lost()) rates[source.node_id()].out += source.goodput_bytes_per_second();
    }
  }
  return rates;
}

bool is_well(const proto::NodeStatus& node) {
  return node.state() == "alive" && node.left_out_ms() == 0;
}

std::string rate_or_nothing(double rate) { return rate > 0 ? format_rate(rate) : "-"; }

// A table of the frame, which may show fewer rows than there are.
struct Part {
  std::vector<Column> columns;
  std::vector<std::vector<std::string>> rows;
  std::string what;  // "hosts"

  // "" if it needs more than `most` lines. Lowers `left` by what it takes.
  std::string text(std::size_t most, std::size_t& left) const {
    if (rows.empty() || most < std::min(kSmallestPart, rows.size() + 2)) return {};
    if (rows.size() + 2 <= most) {
      left -= rows.size() + 2;
      return "\n" + table(columns, rows);
    }
    left -= most;
    const auto shown = static_cast<std::ptrdiff_t>(most - 3);
    return fmt::format("\n{}… and {} more {}\n",
                       table(columns, {rows.begin(), rows.begin() + shown}),
                       rows.size() - (most - 3), what);
  }
};

Part hosts(const proto::ClusterStatusResponse& status, const std::map<std::string, Rates>& rates,
           TopOrder order) {
  struct Host {
    const proto::NodeStatus* node;
    Rates rates;
  };
  std::vector<Host> sorted;
  for (const auto& node : status.nodes()) {
    const auto found = rates.find(node.node().node_id());
    sorted.push_back({&node, found == rates.end() ? Rates{} : found->second});
  }
  std::ranges::stable_sort(sorted, {}, [order](const Host& host) {
    const double moved = order == TopOrder::kRate ? host.rates.in + host.rates.out : 0;
    return std::tuple(is_well(*host.node), -moved, host.node->node().node_id());
  });
  Part part{{{"HOST"},
             {"RACK"},
             {"STATE"},
             {"OUT", true},
             {"IN", true},
             {"READERS", true},
             {"COPIES", true},
             {"HELD", true},
             {"FREE", true},
             {"HEALTH", true},
             {"SEEN", true}},
            {},
            "hosts"};
  for (const Host& host : sorted) {
    const proto::NodeStatus& node = *host.node;
    std::uint64_t held = 0;
    for (const auto& holding : node.holdings()) {
      if (holding.complete()) held += holding.payload_bytes();
    }
    std::string state = printable(node.state());
    if (node.left_out_ms() > 0) state += ", left out";
    if (node.drained()) state += ", drained";
    part.rows.push_back(
        {printable(node.node().node_id()),
         node.failure_domain().empty() ? "-" : printable(node.failure_domain()), state,
         rate_or_nothing(host.rates.out), rate_or_nothing(host.rates.in),
         fmt::format("{}", node.pullers()), fmt::format("{}", node.holdings_size()),
         format_bytes(held), format_bytes(node.store_free_bytes()),
         fmt::format("{:.2f}", node.health()),
         fmt::format("{:.1f} s", static_cast<double>(node.last_heartbeat_ms_ago()) / 1e3)});
  }
  return part;
}

std::string bar(std::uint64_t done, std::uint64_t total) {
  const double share =
      total == 0 ? 0 : std::min(1.0, static_cast<double>(done) / static_cast<double>(total));
  const auto full = static_cast<std::size_t>(share * kBarCells);
  return fmt::format("[{}{}] {:3.0f} %", std::string(full, '#'), std::string(kBarCells - full, '.'),
                     std::floor(100 * share));
}

std::string time_left(const proto::PullStatus& pull) {
  if (pull.bytes_per_second() <= 0 || pull.bytes_done() >= pull.bytes_total()) return "-";
  const double seconds =
      static_cast<double>(pull.bytes_total() - pull.bytes_done()) / pull.bytes_per_second();
  return seconds < 600 ? fmt::format("{:.1f} s", seconds) : fmt::format("{:.0f} min", seconds / 60);
}

Part pulls(const proto::ClusterStatusResponse& status) {
  Part part{{{"PULLER"}, {"VERSION"}, {"PART"}, {"DONE"}, {"RATE", true}, {"LEFT", true}, {"FROM"}},
            {},
            "pulls"};
  for (const auto& pull : status.pulls()) {
    std::vector<const proto::SourceReport*> sources;
    for (const auto& source : pull.sources()) sources.push_back(&source);
    std::ranges::stable_sort(sources, std::greater<>(), &proto::SourceReport::bytes);
    std::string from;
    for (const proto::SourceReport* source : sources) {
      from += (from.empty() ? "" : ", ") + printable(source->node_id());
      from += source->lost() ? " lost" : " " + rate_or_nothing(source->goodput_bytes_per_second());
    }
    part.rows.push_back({printable(pull.puller()), name_of(pull.id()),
                         pull.shard().empty() ? "whole" : printable(pull.shard()),
                         bar(pull.bytes_done(), pull.bytes_total()),
                         rate_or_nothing(pull.bytes_per_second()), time_left(pull), from});
  }
  return part;
}

Part updates(const proto::ClusterStatusResponse& status) {
  Part part{{{"UPDATE"}, {"GROUP"}, {"PHASE"}, {"READY", true}, {"TIME", true}}, {}, "updates"};
  for (const auto& round : status.rounds()) {
    if (round.phase() == "over") continue;
    const RoundCounts counts = count(round);
    part.rows.push_back(
        {name_of(round.id()), round.group().empty() ? "every" : printable(round.group()),
         printable(round.phase()), fmt::format("{} of {}", counts.ready, counts.members),
         fmt::format("{:.1f} s", static_cast<double>(round.elapsed_ms()) / 1e3)});
  }
  return part;
}

// Those that have not committed.
Part instances(const proto::ClusterStatusResponse& status) {
  Part part{{{"INSTANCE"}, {"VERSION"}, {"STATE"}, {"LOADED", true}, {"WHY"}}, {}, "instances"};
  for (const auto& instance : status.instances()) {
    if (instance.state() == "committed") continue;
    part.rows.push_back(
        {printable(instance.instance()), name_of(instance.id()), printable(instance.state()),
         fmt::format("{} of {}", instance.loaded(), instance.world()), printable(instance.why())});
  }
  return part;
}

std::string summary(const proto::ClusterStatusResponse& status) {
  std::size_t well = 0;
  double moved = 0;
  for (const auto& node : status.nodes()) well += is_well(node) ? 1 : 0;
  for (const auto& pull : status.pulls()) moved += pull.bytes_per_second();
  std::size_t ready = 0;
  for (const auto& version : status.versions()) ready += version.state() == "ready" ? 1 : 0;
  return fmt::format("{} of {} hosts well, {} of {} versions ready, {} pulls, {} wait, {}\n", well,
                     status.nodes_size(), ready, status.versions_size(), status.pulls_size(),
                     status.waiting(), moved > 0 ? format_rate(moved) : "nothing moves");
}

// The columns of a text in UTF-8 whose characters are one column wide.
std::string cut(std::string_view line, std::size_t width) {
  std::size_t columns = 0;
  for (std::size_t i = 0; i < line.size(); ++i) {
    const bool begins = (static_cast<unsigned char>(line[i]) & 0xc0u) != 0x80u;
    if (begins && columns++ == width) return std::string(line.substr(0, i));
  }
  return std::string(line);
}

std::string cut_lines(const std::string& text, std::size_t width) {
  std::string result;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find('\n', at), text.size());
    result += cut(std::string_view(text).substr(at, end - at), width) + "\n";
    at = end + 1;
  }
  return result;
}

}  // namespace

std::string top_frame(const proto::ClusterStatusResponse& status, TopOrder order,
                      const std::string& title, std::size_t width, std::size_t height) {
  std::string text = fmt::format("rekindle top, epoch {}{}, {}\n", status.epoch(),
                                 status.grace() ? ", just started" : "", title);
  text += summary(status);
  const std::array<Part, 4> parts{instances(status), updates(status), pulls(status),
                                  hosts(status, rates_of(status), order)};
  std::size_t left = height == 0 ? SIZE_MAX : height - std::min<std::size_t>(height, 2);
  // Lines for the parts that follow.
  std::size_t after = 0;
  for (const Part& part : parts) after += part.rows.empty() ? 0 : kSmallestPart;
  for (const Part& part : parts) {
    if (part.rows.empty()) continue;
    after -= kSmallestPart;
    // The hosts come last and get what is left; the others get half of it at most.
    const std::size_t most = after == 0 ? left : std::min(left / 2, left - std::min(left, after));
    text += part.text(most, left);
  }
  return cut_lines(text, width);
}

}  // namespace rekindle::cli
