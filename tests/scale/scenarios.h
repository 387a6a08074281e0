#pragma once

#include <string>
#include <vector>

#include "tests/scale/scale_fleet.h"

namespace rekindle::scale {

struct Report {
  std::string name;
  std::string what;
  std::size_t awaited = 0;
  // Of each host, from its start; sorted.
  std::vector<double> ready_s;
  // From the beginning of the scenario.
  double all_ready_s = 0;
  // The time that the network alone needs.
  double limit_s = 0;
  // In a tenth of a second, while half of the hosts pull.
  double least_goodput = 0;
  // By the sources that were there from the beginning, in copies of the model.
  double sent_by_sources = 0;
  std::vector<Sample> samples;
  double virtual_s = 0;
  std::uint64_t calls = 0;  // of the coordinator's core
  double cpu_s = 0;
  double busiest_share = 0;
  std::size_t peak_bytes = 0;
  // Empty when all went well.
  std::vector<std::string> problems;
};

// One host pulls from as many sources as a pull may have.
Report single_pull(FleetOptions options);
// `joiners` empty hosts come at once; `sources` hold the model.
Report join(FleetOptions options, std::uint32_t sources, std::uint32_t joiners);
// All hosts serve. A rack loses power; as many spare hosts take over.
Report rack_lost(FleetOptions options);
// All hosts serve. Half of them lose power at once and come back empty.
Report restart_storm(FleetOptions options);

}  // namespace rekindle::scale
