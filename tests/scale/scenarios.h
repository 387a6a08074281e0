#pragma once

#include <string>
#include <vector>

#include "tests/scale/fleet.h"

namespace rekindle::scale {

struct Report {
  std::string name;
  std::string what;
  std::size_t awaited = 0;
  std::vector<double> ready_s;  // of each host, since it started; sorted
  double all_ready_s = 0;       // since the scenario began
  double limit_s = 0;           // what the network alone needs
  double least_goodput = 0;     // of a tenth of a second, while half of them pull
  double sent_by_sources = 0;   // of the sources that were there at first, in copies of the model
  std::vector<Sample> samples;
  double virtual_s = 0;
  std::uint64_t calls = 0;  // of the coordinator's core
  double cpu_s = 0;
  double busiest_share = 0;
  std::size_t peak_bytes = 0;
  std::vector<std::string> problems;  // empty, or it went wrong
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
