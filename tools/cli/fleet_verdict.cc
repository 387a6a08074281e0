#include "tools/cli/fleet_verdict.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tools/cli/output.h"

namespace rekindle::cli {
namespace {

constexpr std::size_t kLargestMatrix = 16;
constexpr std::size_t kSlowestShown = 10;
// Names or lines of one kind; more of them hide the others.
constexpr std::size_t kMostListed = 10;
// One peer alone does not tell which of the two ends is slow.
constexpr std::size_t kPeersToBlame = 2;

double median_of(std::vector<double> values) {
  if (values.empty()) return 0;
  std::ranges::sort(values);
  const std::size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

std::string list_of(const std::set<std::string>& names) {
  std::vector<std::string> shown;
  for (const auto& name : names) {
    if (shown.size() < kMostListed) shown.push_back(name);
  }
  const std::size_t left = names.size() - shown.size();
  return fmt::format("{}{}", fmt::join(shown, ", "),
                     left > 0 ? fmt::format(" and {} more", left) : "");
}

// "0.9 Gb/s", or "0.9 to 1.2 Gb/s".
std::string range_of(const std::vector<double>& rates) {
  const auto [least, most] = std::ranges::minmax(rates);
  const std::string low = gigabits(least), high = gigabits(most);
  return (low == high ? low : low + " to " + high) + " Gb/s";
}

// The two directions in which an end moves bytes.
enum class Direction { kReceives, kSends };

// One measured way between two ends, which are hosts or rails.
struct Observation {
  std::string reader_host, reader_rail;
  std::string source_host, source_rail;
  double rate = 0;
  bool slow = false;
  double cap = 0;
};

struct End {
  std::string host;
  std::string rail;  // "": the whole host
  auto operator<=>(const End&) const = default;
};

// Finds the ends that explain slow ways: an end is to blame in a direction if all its ways in that
// direction are slow, with at least two other hosts.
class Elimination {
 public:
  explicit Elimination(std::vector<Observation> observations) : all_(std::move(observations)) {
    for (const auto& one : all_) {
      add({{one.reader_host, one.reader_rail}, Direction::kReceives}, one, one.source_host);
      add({{one.source_host, one.source_rail}, Direction::kSends}, one, one.reader_host);
    }
  }

  bool blames(const End& end, Direction direction) const {
    const auto found = ways_.find({end, direction});
    return found != ways_.end() && found->second.fast == 0 &&
           found->second.peers.size() >= kPeersToBlame;
  }
  // The end has a way that is fast in this direction.
  bool clears(const End& end, Direction direction) const {
    const auto found = ways_.find({end, direction});
    return found != ways_.end() && found->second.fast > 0;
  }
  std::set<End> ends() const {
    std::set<End> ends;
    for (const auto& [key, ways] : ways_) ends.insert(key.first);
    return ends;
  }
  std::vector<double> slow_rates(const End& end, Direction direction) const {
    const auto found = ways_.find({end, direction});
    return found == ways_.end() ? std::vector<double>() : found->second.slow;
  }
  // Slow ways of which neither end is to blame.
  std::vector<Observation> unexplained() const {
    std::vector<Observation> left;
    for (const auto& one : all_) {
      const bool explained = blames({one.reader_host, one.reader_rail}, Direction::kReceives) ||
                             blames({one.source_host, one.source_rail}, Direction::kSends);
      if (one.slow && !explained) left.push_back(one);
    }
    return left;
  }

 private:
  struct Ways {
    std::set<std::string> peers;
    std::size_t fast = 0;
    std::vector<double> slow;
  };
  using Key = std::pair<End, Direction>;

  void add(const Key& key, const Observation& one, const std::string& peer) {
    Ways& ways = ways_[key];
    ways.peers.insert(peer);
    if (one.slow) {
      ways.slow.push_back(one.rate);
    } else {
      ++ways.fast;
    }
  }

  const std::vector<Observation> all_;
  std::map<Key, Ways> ways_;
};

class Judge {
 public:
  Judge(const std::vector<FleetHost>& hosts, const std::vector<PairReading>& readings,
        double fraction)
      : hosts_(hosts), readings_(readings), fraction_(fraction) {}

  FleetVerdict verdict() {
    judge_pairs();
    judge_rails();
    name_dead_rails();
    name_lost_transports();
    name_unread();
    return std::move(verdict_);
  }

 private:
  const std::string& reader(const PairReading& reading) const {
    return hosts_[reading.hosts.reader].name;
  }
  const std::string& source(const PairReading& reading) const {
    return hosts_[reading.hosts.source].name;
  }

  void judge_pairs() {
    std::vector<double> rates;
    std::map<std::size_t, double> best;
    for (const auto& reading : readings_) {
      if (!reading.error.empty()) continue;
      rates.push_back(reading.bytes_per_second);
      for (const std::size_t host : {reading.hosts.reader, reading.hosts.source}) {
        best[host] = std::max(best[host], reading.bytes_per_second);
        link_[host] = std::max(link_[host],
                               host == reading.hosts.reader ? reading.link_bytes_per_second : 0.0);
      }
    }
    verdict_.median = median_of(rates);
    std::vector<double> bests;
    for (const auto& [host, rate] : best) bests.push_back(rate);
    verdict_.usual = median_of(bests);
    std::vector<Observation> observations;
    std::vector<std::pair<double, HostPair>> slow;
    for (const auto& reading : readings_) {
      if (!reading.error.empty()) continue;
      const bool is_slow = reading.bytes_per_second < fraction_ * verdict_.usual;
      if (is_slow) slow.emplace_back(reading.bytes_per_second, reading.hosts);
      observations.push_back({reader(reading), "", source(reading), "", reading.bytes_per_second,
                              is_slow, reading.cap_bytes_per_second});
    }
    std::ranges::sort(slow);
    for (const auto& [rate, pair] : slow) verdict_.slow.push_back(pair);
    const Elimination elimination(std::move(observations));
    for (std::size_t host = 0; host < hosts_.size(); ++host) blame_host(host, elimination);
    for (const auto& one : elimination.unexplained()) name_pair(one, elimination);
  }

  void blame_host(std::size_t index, const Elimination& elimination) {
    const std::string& name = hosts_[index].name;
    const bool sends = elimination.blames({name, ""}, Direction::kSends);
    const bool receives = elimination.blames({name, ""}, Direction::kReceives);
    if (!sends && !receives) return;
    auto rates = sends ? elimination.slow_rates({name, ""}, Direction::kSends)
                       : elimination.slow_rates({name, ""}, Direction::kReceives);
    if (sends && receives) {
      const auto more = elimination.slow_rates({name, ""}, Direction::kReceives);
      rates.insert(rates.end(), more.begin(), more.end());
    }
    std::string text =
        sends && receives
            ? fmt::format(
                  "every read to and from {} is slow ({}, others {}): {} itself or its link", name,
                  range_of(rates), gigabits(verdict_.usual), name)
        : sends ? fmt::format("every read from {} is slow ({}, others {}): the sending side of {}",
                              name, range_of(rates), gigabits(verdict_.usual), name)
                : fmt::format("every read by {} is slow ({}, others {}): the receiving side of {}",
                              name, range_of(rates), gigabits(verdict_.usual), name);
    verdict_.findings.push_back(text + why_host(index));
  }

  // What is known about a slow host.
  std::string why_host(std::size_t index) const {
    std::string why;
    for (const auto& reading : readings_) {
      if (reading.hosts.source != index || reading.cap_bytes_per_second <= 0) continue;
      why = fmt::format("; its agent gives each reader at most {} Gb/s (--max-rate)",
                        gigabits(reading.cap_bytes_per_second));
    }
    const auto link = link_.find(index);
    if (link == link_.end() || link->second <= 0) return why;
    if (link->second < verdict_.usual) {
      why += fmt::format("; its link has only {} Gb/s", gigabits(link->second));
    }
    return why;
  }

  void name_pair(const Observation& one, const Elimination& elimination) {
    const bool reads_well = elimination.clears({one.reader_host, ""}, Direction::kReceives);
    const bool sends_well = elimination.clears({one.source_host, ""}, Direction::kSends);
    std::string where = "too few other pairs tell which side is slow";
    if (reads_well && sends_well) {
      where = fmt::format("both are faster with others, so look at the way between them");
    }
    std::string text =
        fmt::format("{} reads from {} at {} Gb/s, others at {}: {}", one.reader_host,
                    one.source_host, gigabits(one.rate), gigabits(verdict_.usual), where);
    if (one.cap > 0) {
      text += fmt::format("; the agent of {} gives each reader at most {} Gb/s (--max-rate)",
                          one.source_host, gigabits(one.cap));
    }
    verdict_.findings.push_back(std::move(text));
  }

  // A cap makes the rails share, and their rates say nothing then.
  void judge_rails() {
    std::vector<Observation> observations;
    for (const auto& reading : readings_) {
      if (!reading.error.empty() || reading.cap_bytes_per_second > 0) continue;
      for (const auto& rail : reading.rails) {
        observations.push_back({reader(reading), rail.reader_rail, source(reading),
                                rail.source_rail, rail.broken ? 0 : rail.bytes_per_second, false,
                                0});
      }
    }
    std::map<End, double> best;
    for (const auto& one : observations) {
      for (const End& end :
           {End{one.reader_host, one.reader_rail}, End{one.source_host, one.source_rail}}) {
        best[end] = std::max(best[end], one.rate);
      }
    }
    std::vector<double> bests;
    for (const auto& [end, rate] : best) bests.push_back(rate);
    const double usual = median_of(bests);
    for (auto& one : observations) one.slow = one.rate < fraction_ * usual;
    const Elimination elimination(std::move(observations));
    for (const End& end : elimination.ends()) blame_rail(end, best, elimination);
    for (const auto& one : elimination.unexplained()) {
      if (blamed_rails_.contains({one.reader_host, one.reader_rail}) ||
          blamed_rails_.contains({one.source_host, one.source_rail})) {
        continue;
      }
      verdict_.findings.push_back(fmt::format(
          "rail {} of {} reads from rail {} of {} at {} Gb/s, where rails move {}: the cable or "
          "switch between them, or one of the two",
          one.reader_rail, one.reader_host, one.source_rail, one.source_host, gigabits(one.rate),
          gigabits(usual)));
    }
  }

  void blame_rail(const End& end, const std::map<End, double>& best,
                  const Elimination& elimination) {
    const bool sends = elimination.blames(end, Direction::kSends);
    const bool receives = elimination.blames(end, Direction::kReceives);
    if (!sends && !receives) return;
    blamed_rails_.insert(end);
    std::vector<double> others;
    for (const auto& [other, rate] : best) {
      const bool of_host = other.host == end.host && other.rail != end.rail;
      if (of_host) others.push_back(rate);
    }
    const std::string against =
        others.empty() ? ""
                       : fmt::format(" where its other rails move {}", gigabits(median_of(others)));
    auto rates = sends ? elimination.slow_rates(end, Direction::kSends) : std::vector<double>();
    if (receives) {
      const auto more = elimination.slow_rates(end, Direction::kReceives);
      rates.insert(rates.end(), more.begin(), more.end());
    }
    verdict_.findings.push_back(fmt::format("rail {} of {} {} {}{}", end.rail, end.host,
                                            sends && receives ? "moves"
                                            : sends           ? "sends"
                                                              : "receives",
                                            range_of(rates), against));
  }

  void name_dead_rails() {
    for (std::size_t index = 0; index < hosts_.size(); ++index) {
      const FleetHost& host = hosts_[index];
      double fastest = 0;
      for (const auto& rail : host.rails) {
        if (rail.why_down.empty()) fastest = std::max(fastest, rail.link_bytes_per_second);
      }
      for (const auto& rail : host.rails) {
        if (!rail.why_down.empty()) {
          verdict_.findings.push_back(
              fmt::format("rail {} of {} is down: {}", rail.name, host.name, rail.why_down));
        } else {
          name_unused_rail(index, rail, fastest);
        }
      }
    }
  }

  // A pull leaves rails alone that have less than half of the speed of the fastest one.
  void name_unused_rail(std::size_t index, const FleetHost::Rail& rail, double fastest) {
    std::set<std::string> reached, lacking;
    for (const auto& reading : readings_) {
      const bool counts =
          reading.hosts.reader == index && reading.error.empty() && reading.transport == "verbs";
      if (!counts) continue;
      const bool used = std::ranges::any_of(
          reading.rails, [&](const auto& route) { return route.reader_rail == rail.name; });
      (used ? reached : lacking).insert(source(reading));
    }
    if (lacking.empty()) return;
    const std::string& host = hosts_[index].name;
    const bool known = rail.link_bytes_per_second > 0;
    if (known && rail.link_bytes_per_second * 2 < fastest) {
      verdict_.remarks.push_back(
          fmt::format("rail {} of {} is not used: its link has {} Gb/s, the fastest one of the "
                      "host {}",
                      rail.name, host, gigabits(rail.link_bytes_per_second), gigabits(fastest)));
    } else if (reached.empty()) {
      verdict_.findings.push_back(
          fmt::format("rail {} of {} is up, and reaches no other host", rail.name, host));
    } else {
      verdict_.findings.push_back(fmt::format("rail {} of {} is up, and does not reach {}",
                                              rail.name, host, list_of(lacking)));
    }
  }

  void name_lost_transports() {
    std::size_t lines = 0;
    for (const auto& reading : readings_) {
      for (const auto& note : reading.notes) {
        if (++lines <= kMostListed) {
          verdict_.findings.push_back(fmt::format("{} reads from {} over {}: {}", reader(reading),
                                                  source(reading), reading.transport, note));
        }
      }
    }
    if (lines > kMostListed) {
      verdict_.findings.push_back(
          fmt::format("{} more pairs have lost a transport", lines - kMostListed));
    }
  }

  // If a host fails with all others, one line names it.
  void name_unread() {
    std::set<std::size_t> silent;
    for (std::size_t host = 0; host < hosts_.size(); ++host) {
      const PairReading* first = nullptr;
      std::size_t pairs = 0, failed = 0;
      for (const auto& reading : readings_) {
        if (reading.hosts.reader != host && reading.hosts.source != host) continue;
        ++pairs;
        if (reading.error.empty()) continue;
        ++failed;
        // The host's own words say more than those of its readers.
        if (first == nullptr || (first->hosts.reader != host && reading.hosts.reader == host)) {
          first = &reading;
        }
      }
      if (failed < pairs || pairs < 2 * kPeersToBlame) continue;
      silent.insert(host);
      verdict_.unread.push_back(
          fmt::format("no pair with {} was read: {}", hosts_[host].name, first->error));
    }
    std::size_t lines = 0;
    for (const auto& reading : readings_) {
      const bool told =
          silent.contains(reading.hosts.reader) || silent.contains(reading.hosts.source);
      if (reading.error.empty() || told || ++lines > kMostListed) continue;
      verdict_.unread.push_back(
          fmt::format("{} from {}: {}", reader(reading), source(reading), reading.error));
    }
    if (lines > kMostListed) {
      verdict_.unread.push_back(fmt::format("{} more pairs were not read", lines - kMostListed));
    }
  }

  const std::vector<FleetHost>& hosts_;
  const std::vector<PairReading>& readings_;
  const double fraction_;
  // Of each host, as its device tells it.
  std::map<std::size_t, double> link_;
  std::set<End> blamed_rails_;
  FleetVerdict verdict_;
};

std::string matrix(const std::vector<FleetHost>& hosts, const std::vector<PairReading>& readings,
                   const FleetVerdict& verdict) {
  const std::set<HostPair> slow(verdict.slow.begin(), verdict.slow.end());
  std::map<HostPair, std::string> cells;
  std::map<std::size_t, double> links;
  for (const auto& reading : readings) {
    const bool read = reading.error.empty();
    cells[reading.hosts] =
        !read ? "failed"
              : gigabits(reading.bytes_per_second) + (slow.contains(reading.hosts) ? "*" : "");
    double& link = links[reading.hosts.reader];
    if (read) link = std::max(link, reading.link_bytes_per_second);
  }
  std::vector<Column> columns{{"READER"}};
  for (const auto& host : hosts) columns.push_back({printable(host.name), true});
  columns.push_back({"LINK", true});
  std::vector<std::vector<std::string>> rows;
  for (std::size_t i = 0; i < hosts.size(); ++i) {
    std::vector<std::string> row{printable(hosts[i].name)};
    for (std::size_t j = 0; j < hosts.size(); ++j) {
      const auto cell = cells.find({i, j});
      row.push_back(cell == cells.end() ? "-" : cell->second);
    }
    row.push_back(links[i] > 0 ? gigabits(links[i]) : "unknown");
    rows.push_back(std::move(row));
  }
  return table(columns, rows);
}

std::string quantiles(const std::vector<FleetHost>& hosts,
                      const std::vector<PairReading>& readings) {
  std::vector<std::pair<double, HostPair>> rates;
  for (const auto& reading : readings) {
    if (reading.error.empty()) rates.emplace_back(reading.bytes_per_second, reading.hosts);
  }
  if (rates.empty()) return "";
  std::ranges::sort(rates);
  std::vector<std::vector<std::string>> rows;
  const std::vector<std::pair<const char*, std::size_t>> parts{
      {"slowest", 0}, {"5 %", 5}, {"25 %", 25}, {"50 %", 50}, {"75 %", 75}, {"fastest", 100}};
  for (const auto& [name, percent] : parts) {
    rows.push_back({name, gigabits(rates[(rates.size() - 1) * percent / 100].first)});
  }
  std::string text = table({{"PAIRS"}, {"Gb/s", true}}, rows);
  rows.clear();
  for (const auto& [rate, pair] : rates) {
    if (rows.size() == kSlowestShown) break;
    rows.push_back(
        {printable(hosts[pair.reader].name), printable(hosts[pair.source].name), gigabits(rate)});
  }
  return text + "\n" + table({{"READER"}, {"SOURCE"}, {"Gb/s", true}}, rows);
}

}  // namespace

// In round k of n - 1, host i reads from host i + k. Each round is cut where it is too long.
std::vector<std::vector<HostPair>> all_to_all(std::size_t hosts, std::size_t most) {
  std::vector<std::vector<HostPair>> rounds;
  for (std::size_t step = 1; step < hosts; ++step) {
    rounds.emplace_back();
    for (std::size_t reader = 0; reader < hosts; ++reader) {
      if (rounds.back().size() == std::max<std::size_t>(most, 1)) rounds.emplace_back();
      rounds.back().push_back({reader, (reader + step) % hosts});
    }
  }
  return rounds;
}

FleetVerdict judge_fleet(const std::vector<FleetHost>& hosts,
                         const std::vector<PairReading>& readings, double fraction) {
  return Judge(hosts, readings, fraction).verdict();
}

std::string fleet_report(const std::vector<FleetHost>& hosts,
                         const std::vector<PairReading>& readings, const FleetVerdict& verdict) {
  std::string text;
  if (hosts.size() <= kLargestMatrix) {
    text = "Gb/s; the source is above, * is slow, LINK is what the reader's devices report\n" +
           matrix(hosts, readings, verdict);
  } else {
    text = quantiles(hosts, readings);
  }
  if (verdict.median > 0) {
    text += fmt::format("median {} Gb/s, usual speed of a host {} Gb/s\n", gigabits(verdict.median),
                        gigabits(verdict.usual));
  }
  for (const auto& line : verdict.findings) text += "slow or broken: " + printable(line) + "\n";
  for (const auto& line : verdict.unread) text += "not read: " + printable(line) + "\n";
  for (const auto& line : verdict.remarks) text += "note: " + printable(line) + "\n";
  if (verdict.findings.empty() && verdict.unread.empty()) {
    text += "every pair was read, and none is slow\n";
  }
  return text;
}

std::string gigabits(double bytes_per_second) {
  const double value = bytes_per_second * 8 / 1e9;
  if (value < 1) return fmt::format("{:.3f}", value);
  return value < 100 ? fmt::format("{:.1f}", value) : fmt::format("{:.0f}", value);
}

}  // namespace rekindle::cli
