#include "recovery/agent/agent_metrics.h"

#include <algorithm>
#include <map>
#include <string>
#include <string_view>

namespace rekindle::agent {

namespace {

using Counts = std::map<std::string_view, double>;

void read_store(const proto::AgentStatusResponse& status, const AgentFigures& figures,
                metrics::Readings& readings) {
  readings.gauge("rekindle_store_used_bytes", "Bytes of copies and of unfinished pulls.",
                 static_cast<double>(status.store_bytes()));
  readings.gauge("rekindle_store_pooled_bytes", "Memory that is kept ready for the next copy.",
                 static_cast<double>(figures.pooled_bytes));
  readings.gauge("rekindle_store_budget_bytes", "Bytes that the store may use.",
                 static_cast<double>(status.store_budget_bytes()));
  Counts copies;
  Counts bytes;
  std::uint64_t oldest_us = 0;
  for (const auto& copy : status.copies()) {
    ++copies[copy.state()];
    bytes[copy.state()] += static_cast<double>(copy.bytes());
    if (copy.read_unix_us() == 0) continue;
    oldest_us = oldest_us == 0 ? copy.read_unix_us() : std::min(oldest_us, copy.read_unix_us());
  }
  constexpr std::string_view kStates[] = {"verified", "unverified", "mending", "quarantined",
                                          "lost"};
  readings.gauge_by_state("rekindle_copies", "Complete copies in the store, by state.",
                          {std::begin(kStates), std::end(kStates)}, copies);
  readings.gauge_by_state("rekindle_copies_bytes", "Bytes of complete copies, by state.",
                          {std::begin(kStates), std::end(kStates)}, bytes);
  readings.gauge("rekindle_copies_oldest_read_timestamp_seconds",
                 "When the copy was read that was not read for the longest time; 0: none was.",
                 static_cast<double>(oldest_us) / 1e6);
  readings.counter("rekindle_scrubbed_tiles_total", "Tiles that the scrub has found right.",
                   static_cast<double>(figures.scrub.right));
  readings.counter("rekindle_scrub_wrong_tiles_total", "Tiles that the scrub has found wrong.",
                   static_cast<double>(figures.scrub.wrong));
}

void read_windows(const WindowFigures& windows, metrics::Readings& readings) {
  readings.gauge("rekindle_memory_windows",
                 "Memory windows through which pullers may read by RDMA.",
                 static_cast<double>(windows.in_use));
  readings.gauge("rekindle_memory_windows_limit", "Memory windows that the RDMA devices have.",
                 static_cast<double>(windows.limit));
  readings.counter("rekindle_memory_windows_bound_total", "Memory windows that were bound.",
                   static_cast<double>(windows.bound));
  readings.counter("rekindle_memory_windows_invalidated_total",
                   "Memory windows that were invalidated when a puller's right to read ended.",
                   static_cast<double>(windows.invalidated));
  readings.counter("rekindle_memory_windows_refused_total",
                   "Times that an RDMA device had no memory window left.",
                   static_cast<double>(windows.refused));
}

void read_workers(const proto::AgentStatusResponse& status, metrics::Readings& readings) {
  Counts instances;
  Counts sessions;
  // Of the labels, which are lower case.
  const std::map<std::string_view, std::string_view> names{
      {"ABSENT", "absent"}, {"LOADING", "loading"}, {"COMMITTED", "committed"}, {"UNFIT", "unfit"}};
  for (const auto& instance : status.instances()) {
    if (const auto name = names.find(instance.state()); name != names.end() && instance.named()) {
      ++instances[name->second];
    }
    for (const auto& session : instance.sessions()) ++sessions[session.state()];
  }
  readings.gauge_by_state("rekindle_instances",
                          "Named instances with ranks on this host, by state.",
                          {"absent", "loading", "committed", "unfit"}, instances);
  readings.gauge_by_state("rekindle_worker_sessions", "Workers that are attached, by state.",
                          {"resolving", "serving", "joined", "spreading", "loaded", "committed"},
                          sessions);
}

void read_residents(const proto::AgentStatusResponse& status, const worker::ResidentTotals& totals,
                    metrics::Readings& readings) {
  Counts bytes;
  for (const auto& copy : status.residents()) {
    bytes[copy.users() > 0 ? "used" : "waiting"] += static_cast<double>(copy.bytes());
  }
  readings.gauge_by_state("rekindle_resident_bytes",
                          "GPU memory of resident copies, by whether a worker uses it.",
                          {"used", "waiting"}, bytes);
  readings.counter("rekindle_resident_scrubbed_bytes_total",
                   "Bytes of resident copies that were read again on their GPU.",
                   static_cast<double>(totals.scrubbed_bytes));
  readings.counter("rekindle_resident_scrub_passes_total",
                   "Passes over all resident copies of the host.",
                   static_cast<double>(totals.passes));
  readings.counter("rekindle_resident_wrong_tiles_total",
                   "MiB of resident copies that have changed since their seal.",
                   static_cast<double>(totals.wrong_tiles));
  readings.counter("rekindle_resident_mended_tiles_total",
                   "MiB of resident copies that were made right from this host's copy.",
                   static_cast<double>(totals.mended_tiles));
}

void read_devices(const proto::DeviceProcess& devices, metrics::Readings& readings) {
  readings.gauge_by_state("rekindle_device_process", "1 for the state of the device process.",
                          {"off", "starting", "serving", "restarting"}, {{devices.state(), 1}});
  readings.gauge("rekindle_devices", "GPUs that the device process serves.",
                 devices.devices_size());
  readings.gauge("rekindle_device_pinned_bytes", "Bytes of copies that are pinned for the GPUs.",
                 static_cast<double>(devices.pinned_bytes()));
  readings.gauge("rekindle_device_sessions", "Workers whose buckets the device process fills.",
                 devices.sessions());
  readings.counter("rekindle_device_restarts_total", "Times that the device process has ended.",
                   static_cast<double>(devices.restarts()));
}

}  // namespace

void read_agent(const proto::AgentStatusResponse& status, const AgentFigures& figures,
                metrics::Readings& readings) {
  readings.gauge("rekindle_coordinator_connected", "1 while the agent reaches its coordinator.",
                 status.coordinator_connected() ? 1 : 0);
  readings.gauge("rekindle_heard_epoch", "The highest epoch of a coordinator that was heard of.",
                 static_cast<double>(figures.epoch));
  readings.gauge("rekindle_peer_sessions", "Pulls of other processes that read here.",
                 status.sessions());
  readings.gauge("rekindle_tcp_connections", "Open data streams of pullers.",
                 static_cast<double>(figures.tcp_connections));
  const std::map<std::string, std::uint64_t> served{
      {"tcp", status.bytes_served() - status.bytes_served_encrypted()},
      {"tcp+tls", status.bytes_served_encrypted()}};
  for (const auto& [transport, bytes] : served) {
    readings.counter("rekindle_served_bytes_total",
                     "Payload bytes that this agent has sent. Reads by RDMA and shared memory are "
                     "counted by the puller only.",
                     static_cast<double>(bytes), {{"transport", transport}});
  }
  read_store(status, figures, readings);
  read_windows(figures.windows, readings);
  read_workers(status, readings);
  read_residents(status, figures.residents, readings);
  read_devices(status.devices(), readings);
}

}  // namespace rekindle::agent
