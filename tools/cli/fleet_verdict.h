#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

// The pure part of `rekindle bench fleet`: who reads from whom in which round, and what the figures
// say about hosts, pairs and rails.
namespace rekindle::cli {

// Places in the list of hosts.
struct HostPair {
  std::size_t reader = 0;
  std::size_t source = 0;
  auto operator<=>(const HostPair&) const = default;
};

// Every host reads from every other one once. In a round a host reads from at most one other, and
// is read by at most one. A round has at most `most` pairs.
std::vector<std::vector<HostPair>> all_to_all(std::size_t hosts, std::size_t most);

struct FleetHost {
  std::string name;
  struct Rail {
    std::string name;
    // "": it is up.
    std::string why_down;
    double link_bytes_per_second = 0;  // 0: unknown
  };
  std::vector<Rail> rails;
};

struct PairReading {
  HostPair hosts;
  // Why it was not read, or not to the end. The figures do not count then.
  std::string error;
  std::string transport;
  double bytes_per_second = 0;
  // Of the reader's rails or interface in use; 0: unknown.
  double link_bytes_per_second = 0;
  // That the source puts on each reader; 0: none.
  double cap_bytes_per_second = 0;
  // One for each route over rails.
  struct Rail {
    std::string reader_rail;
    std::string source_rail;
    double bytes_per_second = 0;
    bool broken = false;
  };
  std::vector<Rail> rails;
  // Transports that did not work.
  std::vector<std::string> notes;
};

struct FleetVerdict {
  // Over all pairs that were read; 0: none was.
  double median = 0;
  // The median, over the hosts, of the fastest pair of each. Unlike the median of the pairs it
  // stays when one of three hosts is slow.
  double usual = 0;
  // Under `fraction` of the usual speed, the slowest first.
  std::vector<HostPair> slow;
  // Whatever is slow or broken, one sentence each.
  std::vector<std::string> findings;
  // Pairs and hosts without figures, one sentence each.
  std::vector<std::string> unread;
  // What is no fault, but is better known.
  std::vector<std::string> remarks;
};

FleetVerdict judge_fleet(const std::vector<FleetHost>& hosts,
                         const std::vector<PairReading>& readings, double fraction);

// A matrix, or the quantiles and the slowest ten pairs of more than 16 hosts, and the verdict.
std::string fleet_report(const std::vector<FleetHost>& hosts,
                         const std::vector<PairReading>& readings, const FleetVerdict& verdict);

// Without the unit: "0.85", "21.3", "390".
std::string gigabits(double bytes_per_second);

}  // namespace rekindle::cli
