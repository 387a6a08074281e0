#include "tests/scale/scenarios.h"

#include <algorithm>
#include <optional>

namespace rekindle::scale {

namespace {

const ModelVersion kModel{"m", 1};
constexpr Duration kSettle = 4s;  // the coordinator's grace, and everybody has reported
constexpr Duration kStartSpread = 500ms;
constexpr double kFirstByte = 4;  // seconds, at most: the dead are known after 2
constexpr Duration kAtMost = 600s;

double model_bytes(const Fleet& fleet) { return static_cast<double>(fleet.chunks().total()); }

// What the links alone need: every joiner takes all of it in, the sources send it once, and all
// that is taken in is sent by somebody.
double limit(const FleetOptions& options, double bytes, double sources, double joiners) {
  const double alone = bytes / options.nic_bytes_per_second;
  return alone * std::max({1.0, 1 / sources, joiners / (sources + joiners)});
}

// From the first byte on for as long as half of them pull.
double least_goodput(const Report& report) {
  std::optional<double> least;
  for (const Sample& sample : report.samples) {
    if (least && 2 * sample.pulling < report.awaited) break;
    if (least || sample.goodput > 0) least = std::min(least.value_or(1e300), sample.goodput);
    if (!least && sample.seconds > kFirstByte) return 0;
  }
  return least.value_or(0);
}

void finish(Fleet& fleet, Report& report, bool all_ready) {
  report.ready_s = fleet.ready_times();
  report.samples = fleet.samples();
  if (!report.samples.empty()) report.all_ready_s = report.samples.back().seconds;
  report.least_goodput = least_goodput(report);
  const Meter& meter = fleet.control().meter();
  report.calls = meter.calls();
  report.cpu_s = meter.cpu_seconds();
  report.busiest_share = meter.busiest_share();
  report.peak_bytes = meter.peak_bytes();
  report.virtual_s = fleet.virtual_seconds();
  report.problems = fleet.failures();
  if (!all_ready) {
    report.problems.push_back(
        fmt::format("{} of {} hosts are ready", report.ready_s.size(), report.awaited));
  }
}

std::vector<HostId> hosts_from(HostId first, HostId count) {
  std::vector<HostId> hosts(count);
  for (HostId i = 0; i < count; ++i) hosts[i] = first + i;
  return hosts;
}

}  // namespace

Report join(FleetOptions options, std::uint32_t sources, std::uint32_t joiners) {
  options.hosts = sources + joiners;
  Fleet fleet(options);
  for (HostId id = 0; id < sources; ++id) fleet.add_holder(id, kModel, /*serves=*/false);
  fleet.run(kSettle);
  Report report;
  report.name = "join";
  report.what = fmt::format("{} empty hosts join {} that hold the model", joiners, sources);
  report.awaited = joiners;
  report.limit_s = limit(options, model_bytes(fleet), sources, joiners);
  const auto awaited = hosts_from(sources, joiners);
  for (const HostId id : awaited) {
    fleet.start_later(id, fleet.assignment(id, kModel, 1), kStartSpread);
  }
  fleet.begin_watch(awaited);
  const bool ready = fleet.run_until_ready(kAtMost);
  finish(fleet, report, ready);
  for (HostId id = 0; id < sources; ++id) report.sent_by_sources += fleet.sent_by(id);
  report.sent_by_sources /= model_bytes(fleet);
  return report;
}

Report single_pull(FleetOptions options) {
  options.hosts_per_instance = 1;
  Report report = join(options, 4, 1);
  report.name = "single";
  report.what = "one host pulls from 4";
  return report;
}

Report rack_lost(FleetOptions options) {
  const HostId rack = options.hosts_per_rack;
  const HostId serving = options.hosts;
  options.hosts += rack;  // spare
  Fleet fleet(options);
  for (HostId id = 0; id < serving; ++id) fleet.add_holder(id, kModel, /*serves=*/true);
  fleet.run(kSettle);
  Report report;
  report.name = "rack";
  report.what = fmt::format("{} hosts serve, a rack of {} loses power, as many spares take over",
                            serving, rack);
  report.awaited = rack;
  report.limit_s = limit(options, model_bytes(fleet), serving - rack, rack);
  const auto spares = hosts_from(serving, rack);
  for (HostId i = 0; i < rack; ++i) {
    fleet.lose_power(i);
    Assignment work = fleet.assignment(i, kModel, 2);
    fleet.start_later(spares[i], std::move(work), kStartSpread);
  }
  fleet.begin_watch(spares);
  const bool ready = fleet.run_until_ready(kAtMost);
  finish(fleet, report, ready);
  return report;
}

Report restart_storm(FleetOptions options) {
  Fleet fleet(options);
  const HostId hosts = options.hosts;
  for (HostId id = 0; id < hosts; ++id) fleet.add_holder(id, kModel, /*serves=*/true);
  fleet.run(kSettle);
  Report report;
  report.name = "storm";
  report.what =
      fmt::format("{} of {} hosts that serve lose power and come back empty", hosts / 2, hosts);
  report.awaited = hosts / 2;
  report.limit_s = limit(options, model_bytes(fleet), hosts - hosts / 2, hosts / 2);
  const auto lost = hosts_from(0, hosts / 2);
  for (const HostId id : lost) {
    fleet.lose_power(id);
    fleet.start_later(id, fleet.assignment(id, kModel, 2), kStartSpread);
  }
  fleet.begin_watch(lost);
  const bool ready = fleet.run_until_ready(kAtMost);
  finish(fleet, report, ready);
  return report;
}

}  // namespace rekindle::scale
