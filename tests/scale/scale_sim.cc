// scale_sim [--scenario single|join|rack|storm|all] [--hosts N] [--joiners N] [--sources N]
//           [--bytes N] [--chunk N] [--nic BYTES_PER_SECOND] [--seed N] [--svg FILE] [--assert]
//           [--follow]
//
// A fleet in virtual time, as large as wanted. Prints when its hosts were ready beside what the
// links alone would need, and what the coordinator's core cost. --assert: fails when a join takes
// more than twice a single pull, when somebody is not ready, or when goodput was ever zero.
#include <algorithm>
#include <charconv>
#include <cstdio>
#include <fstream>
#include <string>
#include <string_view>

#include "tests/scale/plot.h"
#include "tests/scale/scenarios.h"

namespace rekindle::scale {
namespace {

struct Options {
  FleetOptions fleet;
  std::string scenario = "all";
  std::uint64_t joiners = 500;
  std::uint64_t sources = 4;
  std::string svg;
  bool checked = false;
};

bool parse_number(std::string_view text, std::uint64_t& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() && value > 0;
}

bool parse(int argc, char** argv, Options& options) {
  for (int i = 1; i < argc; ++i) {
    const std::string_view name = argv[i];
    if (name == "--assert" || name == "--follow") {
      (name == "--assert" ? options.checked : options.fleet.follow) = true;
      continue;
    }
    if (i + 1 == argc) return false;
    const std::string_view value = argv[++i];
    std::uint64_t number = 0;
    if (name == "--scenario") {
      options.scenario = value;
    } else if (name == "--svg") {
      options.svg = value;
    } else if (!parse_number(value, number)) {
      return false;
    } else if (name == "--hosts") {
      options.fleet.hosts = static_cast<std::uint32_t>(number);
    } else if (name == "--joiners") {
      options.joiners = number;
    } else if (name == "--sources") {
      options.sources = number;
    } else if (name == "--bytes") {
      options.fleet.model_bytes = number;
    } else if (name == "--chunk") {
      options.fleet.chunk_bytes = number;
    } else if (name == "--nic") {
      options.fleet.nic_bytes_per_second = static_cast<double>(number);
    } else if (name == "--seed") {
      options.fleet.seed = number;
    } else {
      return false;
    }
  }
  return true;
}

void print(const Report& report) {
  fmt::print("{}: {}\n", report.name, report.what);
  if (!report.ready_s.empty()) {
    const auto& times = report.ready_s;
    fmt::print(
        "  ready after {:.1f} s (first), {:.1f} s (median), {:.1f} s (last); all after {:.1f} s, "
        "the links alone {:.1f} s: {:.2f}\n",
        times.front(), times[times.size() / 2], times.back(), report.all_ready_s, report.limit_s,
        report.all_ready_s / report.limit_s);
  }
  if (report.awaited > 1) {
    fmt::print("  goodput of all at least {:.1f} GB/s\n", report.least_goodput / 1e9);
  }
  if (report.sent_by_sources > 0) {
    fmt::print("  the first sources sent {:.1f} copies\n", report.sent_by_sources);
  }
  fmt::print(
      "  coordinator: {} calls in {:.1f} s, {:.1f} % of a core, {:.1f} % in the busiest second, "
      "{:.1f} MiB\n",
      report.calls, report.virtual_s, 100 * report.cpu_s / report.virtual_s,
      100 * report.busiest_share, static_cast<double>(report.peak_bytes) / (1 << 20));
  for (std::size_t i = 0; i < std::min<std::size_t>(report.problems.size(), 5); ++i) {
    fmt::print("  {}\n", report.problems[i]);
  }
  std::fflush(stdout);
}

int run(const Options& options) {
  const auto wanted = [&](std::string_view name) {
    return options.scenario == "all" || options.scenario == name;
  };
  std::vector<Report> reports;
  double single_s = 0;
  int rc = 0;
  const auto take = [&](Report report) {
    print(report);
    if (!report.problems.empty()) rc = 1;
    if (report.name == "single") {
      single_s = report.all_ready_s;
    } else {
      reports.push_back(std::move(report));
    }
  };
  if (wanted("single") || wanted("join")) take(single_pull(options.fleet));
  if (wanted("join")) {
    take(join(options.fleet, static_cast<std::uint32_t>(options.sources),
              static_cast<std::uint32_t>(options.joiners)));
    const double ratio = reports.back().all_ready_s / single_s;
    fmt::print("  {:.2f} of a single pull\n", ratio);
    if (options.checked && ratio > 2) rc = 1;
  }
  if (wanted("rack")) take(rack_lost(options.fleet));
  if (wanted("storm")) take(restart_storm(options.fleet));
  for (const Report& report : reports) {
    if (options.checked && report.least_goodput <= 0) rc = 1;
  }
  if (!options.svg.empty()) std::ofstream(options.svg) << plot(reports);
  return rc;
}

}  // namespace
}  // namespace rekindle::scale

int main(int argc, char** argv) {
  rekindle::scale::Options options;
  if (!rekindle::scale::parse(argc, argv, options)) {
    std::fputs("usage: see the head of tests/scale/scale_sim.cc\n", stderr);
    return 2;
  }
  return rekindle::scale::run(options);
}
