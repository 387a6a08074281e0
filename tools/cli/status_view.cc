#include "tools/cli/status_view.h"

#include <algorithm>
#include <cmath>

#include "recovery/rpc/convert.h"
#include "src/base/units.h"
#include "src/crypto/signing_key.h"

namespace rekindle::cli {
namespace {

std::string hex(const proto::Digest& digest) { return rpc::from_proto(digest).hex(); }

std::string duration(std::uint64_t ms) {
  const std::uint64_t s = ms / 1000;
  if (s < 60) return fmt::format("{} s", s);
  if (s < 3600) return fmt::format("{} min", s / 60);
  if (s < 48 * 3600) return fmt::format("{} h {} min", s / 3600, s / 60 % 60);
  return fmt::format("{} days", s / 86400);
}

std::string percent(std::uint64_t done, std::uint64_t total) {
  if (total == 0) return "-";
  return fmt::format("{:.0f} %",
                     std::floor(100.0 * static_cast<double>(done) / static_cast<double>(total)));
}

std::uint64_t held_tiles(const proto::IndexRanges& ranges) {
  std::uint64_t tiles = 0;
  for (int i = 0; i < std::min(ranges.begin_size(), ranges.end_size()); ++i) {
    if (ranges.end(i) > ranges.begin(i)) tiles += ranges.end(i) - ranges.begin(i);
  }
  return tiles;
}

Json holding_json(const proto::Holding& holding) {
  return {{"model", holding.id().model()},
          {"version", holding.id().version()},
          {"root", hex(holding.root())},
          {"layout", hex(holding.layout())},
          {"payload_bytes", holding.payload_bytes()},
          {"checkpoint_bytes", holding.checkpoint_bytes()},
          {"complete", holding.complete()},
          {"whole", holding.whole()},
          {"held_tiles", holding.complete() ? Json() : Json(held_tiles(holding.held()))}};
}

template <typename Keys>
Json key_ids(const Keys& keys) {
  Json result = Json::array();
  for (const auto& key : keys) result.push_back(crypto::key_id(key));
  return result;
}

template <typename Ids>
Json ids_json(const Ids& ids) {
  Json result = Json::array();
  for (const auto& id : ids) result.push_back({{"model", id.model()}, {"version", id.version()}});
  return result;
}

template <typename Holdings>
Json holdings_json(const Holdings& holdings) {
  Json result = Json::array();
  for (const auto& holding : holdings) result.push_back(holding_json(holding));
  return result;
}

std::string describe(const proto::Holding& holding) {
  std::string text = name_of(holding.id());
  if (!holding.whole()) text += " " + percent(holding.payload_bytes(), holding.checkpoint_bytes());
  if (!holding.complete()) text += " (arriving)";
  return text;
}

std::string state_of(const proto::NodeStatus& node) {
  std::string text = printable(node.state());
  if (node.left_out_ms() > 0) text += fmt::format(" for {}", duration(node.left_out_ms()));
  if (!node.drained()) return text;
  text += node.pullers() == 0 ? ", drained" : fmt::format(", draining: {} readers", node.pullers());
  for (const auto& id : node.sole_copies()) text += fmt::format(", only copy of {}", name_of(id));
  return text;
}

std::string state_of(const proto::VersionStatus& version) {
  std::string text = printable(version.state());
  if (version.readers() > 0) text += fmt::format(", {} readers", version.readers());
  return text;
}

std::string copies_of(const proto::VersionStatus& version) {
  std::string text = fmt::format("{}", version.whole_copies());
  if (version.replicas() == 0) return text;
  text += fmt::format(" of {}", version.replicas());
  if (!version.copying_to().empty()) {
    text +=
        fmt::format(", {} to {}", percent(version.copying_bytes_done(), version.checkpoint_bytes()),
                    printable(version.copying_to()));
  } else if (!version.short_of_copies().empty()) {
    text += ": " + printable(version.short_of_copies());
  }
  return text;
}

std::string instances_table(const proto::ClusterStatusResponse& status) {
  std::vector<std::vector<std::string>> rows;
  for (const auto& instance : status.instances()) {
    rows.push_back({printable(instance.instance()), fmt::format("{}", instance.generation()),
                    name_of(instance.id()), printable(instance.state()),
                    fmt::format("{} of {}", instance.loaded(), instance.world()),
                    printable(instance.why())});
  }
  return table(
      {{"INSTANCE"}, {"GENERATION", true}, {"VERSION"}, {"STATE"}, {"LOADED", true}, {"WHY"}},
      rows);
}

std::string nodes_table(const proto::ClusterStatusResponse& status) {
  std::vector<std::vector<std::string>> rows;
  for (const auto& node : status.nodes()) {
    std::string held;
    std::uint64_t bytes = 0;
    for (const auto& holding : node.holdings()) {
      held += (held.empty() ? "" : ", ") + describe(holding);
      bytes += holding.complete() ? holding.payload_bytes() : 0;
    }
    rows.push_back(
        {printable(node.node().node_id()), state_of(node),
         printable(node.node().control_endpoint()),
         fmt::format("{:.1f} s", static_cast<double>(node.last_heartbeat_ms_ago()) / 1e3),
         format_bytes(bytes), held.empty() ? "-" : held});
  }
  return table({{"NODE"}, {"STATE"}, {"ADDRESS"}, {"SEEN", true}, {"HELD", true}, {"VERSIONS"}},
               rows);
}

std::string versions_table(const proto::ClusterStatusResponse& status) {
  std::vector<std::vector<std::string>> rows;
  for (const auto& version : status.versions()) {
    rows.push_back({name_of(version.id()), state_of(version),
                    format_bytes(version.checkpoint_bytes()), copies_of(version),
                    hex(version.root())});
  }
  return table({{"VERSION"}, {"STATE"}, {"SIZE", true}, {"WHOLE COPIES", true}, {"ROOT"}}, rows);
}

std::string pulls_table(const proto::ClusterStatusResponse& status) {
  std::vector<std::vector<std::string>> rows;
  for (const auto& pull : status.pulls()) {
    std::string sources;
    for (const auto& source : pull.sources()) {
      sources += (sources.empty() ? "" : ", ") + printable(source.node_id());
      if (source.lost()) sources += " (lost)";
    }
    rows.push_back({printable(pull.puller()), name_of(pull.id()),
                    pull.shard().empty() ? "whole" : printable(pull.shard()),
                    percent(pull.bytes_done(), pull.bytes_total()),
                    format_bytes(pull.bytes_total()), format_rate(pull.bytes_per_second()),
                    sources});
  }
  return table({{"PULLER"},
                {"VERSION"},
                {"PART"},
                {"DONE", true},
                {"OF", true},
                {"RATE", true},
                {"SOURCES"}},
               rows);
}

Json device_process_json(const proto::DeviceProcess& process) {
  Json devices = Json::array();
  for (const auto& device : process.devices()) {
    devices.push_back(
        {{"id", device.id()}, {"name", device.name()}, {"total_bytes", device.total_bytes()}});
  }
  return {{"state", process.state()},
          {"devices", devices},
          {"held_bytes", process.held_bytes()},
          {"pinned_bytes", process.pinned_bytes()},
          {"sessions", process.sessions()},
          {"restarts", process.restarts()},
          {"pid", process.pid()},
          {"problem", process.problem()}};
}

// The devices, and the state of the process that drives them.
std::string devices_text(const proto::DeviceProcess& process) {
  // An older agent does not report it.
  if (process.state().empty()) return {};
  if (process.devices().empty()) {
    return fmt::format("devices      none, {}: {}\n", printable(process.state()),
                       process.problem().empty() ? "-" : printable(process.problem()));
  }
  std::string list;
  for (const auto& device : process.devices()) {
    list += fmt::format("{}{} ({}, {})", list.empty() ? "" : ", ", printable(device.id()),
                        printable(device.name()), format_bytes(device.total_bytes()));
  }
  std::string text =
      fmt::format("devices      {}\n             {}, {} of {} pinned, {} sessions", list,
                  printable(process.state()), format_bytes(process.pinned_bytes()),
                  format_bytes(process.held_bytes()), process.sessions());
  if (process.restarts() > 0) text += fmt::format(", {} restarts", process.restarts());
  if (!process.problem().empty()) text += "; last problem: " + printable(process.problem());
  return text + "\n";
}

}  // namespace

std::string name_of(const proto::ModelVersion& id) {
  return printable(fmt::format("{}@{}", id.model(), id.version()));
}

Json to_json(const proto::ClusterStatusResponse& status) {
  Json nodes = Json::array();
  for (const auto& node : status.nodes()) {
    nodes.push_back({{"node", node.node().node_id()},
                     {"state", node.state()},
                     {"address", node.node().control_endpoint()},
                     {"failure_domain", node.failure_domain()},
                     {"drained", node.drained()},
                     {"pullers", node.pullers()},
                     {"sole_copies", ids_json(node.sole_copies())},
                     {"health", node.health()},
                     {"left_out_ms", node.left_out_ms()},
                     {"store_free_bytes", node.store_free_bytes()},
                     {"last_heartbeat_ms_ago", node.last_heartbeat_ms_ago()},
                     {"holdings", holdings_json(node.holdings())}});
  }
  Json versions = Json::array();
  for (const auto& version : status.versions()) {
    versions.push_back({{"model", version.id().model()},
                        {"version", version.id().version()},
                        {"state", version.state()},
                        {"root", hex(version.root())},
                        {"signers", key_ids(version.signers())},
                        {"checkpoint_bytes", version.checkpoint_bytes()},
                        {"whole_copies", version.whole_copies()},
                        {"replicas", version.replicas()},
                        {"short_of_copies", version.short_of_copies()},
                        {"copying_to", version.copying_to()},
                        {"copying_bytes_done", version.copying_bytes_done()},
                        {"readers", version.readers()}});
  }
  Json pulls = Json::array();
  for (const auto& pull : status.pulls()) {
    Json sources = Json::array();
    for (const auto& source : pull.sources()) {
      sources.push_back({{"node", source.node_id()},
                         {"bytes", source.bytes()},
                         {"bytes_per_second", source.goodput_bytes_per_second()},
                         {"failures", source.failures()},
                         {"lost", source.lost()},
                         {"cause", source.cause()}});
    }
    pulls.push_back({{"puller", pull.puller()},
                     {"model", pull.id().model()},
                     {"version", pull.id().version()},
                     {"shard", pull.shard()},
                     {"bytes_done", pull.bytes_done()},
                     {"bytes_total", pull.bytes_total()},
                     {"bytes_per_second", pull.bytes_per_second()},
                     {"sources", sources}});
  }
  Json instances = Json::array();
  for (const auto& instance : status.instances()) {
    instances.push_back({{"instance", instance.instance()},
                         {"generation", instance.generation()},
                         {"model", instance.id().model()},
                         {"version", instance.id().version()},
                         {"state", instance.state()},
                         {"loaded", instance.loaded()},
                         {"world", instance.world()},
                         {"why", instance.why()}});
  }
  Json rounds = Json::array();
  for (const auto& round : status.rounds()) rounds.push_back(to_json(round));
  return {{"epoch", status.epoch()}, {"uptime_ms", status.uptime_ms()},
          {"grace", status.grace()}, {"nodes", nodes},
          {"versions", versions},    {"pulls", pulls},
          {"instances", instances},  {"waiting", status.waiting()},
          {"rounds", rounds}};
}

std::string to_text(const proto::ClusterStatusResponse& status) {
  std::string text =
      fmt::format("coordinator up {}, epoch {}{}\n\n", duration(status.uptime_ms()), status.epoch(),
                  status.grace() ? ", just started: agents still report in" : "");
  text += nodes_table(status);
  if (status.versions_size() > 0) text += "\n" + versions_table(status);
  if (status.pulls_size() > 0) text += "\n" + pulls_table(status);
  if (status.instances_size() > 0) text += "\n" + instances_table(status);
  if (status.rounds_size() > 0) text += "\n" + rounds_table(status);
  if (status.waiting() > 0) text += fmt::format("\n{} pulls wait for a source\n", status.waiting());
  return text;
}

Json copies_json(const proto::AgentStatusResponse& status) {
  Json copies = Json::array();
  for (const auto& copy : status.copies()) copies.push_back(to_json(copy));
  return copies;
}

Json residents_json(const proto::AgentStatusResponse& status) {
  Json residents = Json::array();
  for (const auto& copy : status.residents()) {
    residents.push_back({{"id", name_of(copy.id())},
                         {"device", copy.device()},
                         {"bytes", copy.bytes()},
                         {"instance", copy.instance()},
                         {"users", copy.users()},
                         {"read_unix_us", copy.read_unix_us()}});
  }
  return residents;
}

std::string residents_text(const proto::AgentStatusResponse& status) {
  if (status.residents().empty()) return {};
  std::vector<std::vector<std::string>> rows;
  for (const auto& copy : status.residents()) {
    rows.push_back({name_of(copy.id()), printable(copy.device()), format_bytes(copy.bytes()),
                    copy.users() > 0 ? "in use" : "waits for its worker",
                    copy.read_unix_us() == 0 ? "-" : utc_time(copy.read_unix_us()),
                    printable(copy.instance())});
  }
  return "\n" +
         table({{"RESIDENT"}, {"DEVICE"}, {"BYTES", true}, {"STATE"}, {"LAST READ"}, {"INSTANCE"}},
               rows);
}

std::string encryption_text(const proto::AgentStatusResponse& status) {
  std::string text;
  if (status.bytes_served_encrypted() > 0) {
    text += fmt::format(" ({} encrypted)", format_bytes(status.bytes_served_encrypted()));
  }
  if (status.requires_encryption()) text += ", encrypted only";
  if (status.encrypts()) text += ", pulls encrypted";
  return text;
}

Json to_json(const proto::AgentStatusResponse& status) {
  return {{"node", status.node().node_id()},
          {"address", status.node().control_endpoint()},
          {"software", status.software()},
          {"uptime_ms", status.uptime_ms()},
          {"store", status.store()},
          {"store_bytes", status.store_bytes()},
          {"store_budget_bytes", status.store_budget_bytes()},
          {"sessions", status.sessions()},
          {"bytes_served", status.bytes_served()},
          {"bytes_served_encrypted", status.bytes_served_encrypted()},
          {"encrypts", status.encrypts()},
          {"requires_encryption", status.requires_encryption()},
          {"coordinator", status.coordinator()},
          {"coordinator_connected", status.coordinator_connected()},
          {"holdings", holdings_json(status.holdings())},
          {"copies", copies_json(status)},
          {"instances", instances_json(status)},
          {"residents", residents_json(status)},
          {"devices", device_process_json(status.devices())}};
}

std::string to_text(const proto::AgentStatusResponse& status) {
  std::string coordinator = "none";
  if (!status.coordinator().empty()) {
    coordinator = printable(status.coordinator()) +
                  (status.coordinator_connected() ? " (connected)" : " (not reachable)");
  }
  std::string text = fmt::format(
      "agent        {} at {}, {}, up {}\nstore        {}, {} of {}\ncoordinator  {}\n"
      "serving      {} pullers, {} so far{}\n",
      printable(status.node().node_id()), printable(status.node().control_endpoint()),
      printable(status.software()), duration(status.uptime_ms()), printable(status.store()),
      format_bytes(status.store_bytes()), format_bytes(status.store_budget_bytes()), coordinator,
      status.sessions(), format_bytes(status.bytes_served()), encryption_text(status));
  text += devices_text(status.devices()) + "\n";
  std::vector<std::vector<std::string>> rows;
  for (const auto& holding : status.holdings()) {
    rows.push_back(
        {name_of(holding.id()), holding.complete() ? "ready" : "arriving",
         holding.whole() ? "whole" : percent(holding.payload_bytes(), holding.checkpoint_bytes()),
         format_bytes(holding.payload_bytes()), hex(holding.root()),
         hex(holding.layout()).substr(0, 16)});
  }
  return text +
         table({{"VERSION"}, {"STATE"}, {"PART"}, {"BYTES", true}, {"ROOT"}, {"LAYOUT"}}, rows) +
         copies_text({status.copies().begin(), status.copies().end()}) + residents_text(status) +
         instances_text(status);
}

Json to_json(const proto::CopyStatus& copy) {
  return {{"model", copy.id().model()},    {"version", copy.id().version()},
          {"directory", copy.directory()}, {"bytes", copy.bytes()},
          {"state", copy.state()},         {"read_unix_us", copy.read_unix_us()},
          {"found", copy.found()}};
}

std::string copies_text(const std::vector<proto::CopyStatus>& copies) {
  if (copies.empty()) return {};
  std::vector<std::vector<std::string>> rows;
  std::string found;
  for (const auto& copy : copies) {
    const std::string name =
        printable(fmt::format("{}@{}", copy.id().model(), copy.id().version()));
    const std::string read = copy.read_unix_us() == 0 ? "-" : utc_time(copy.read_unix_us());
    rows.push_back(
        {name, copy.state(), format_bytes(copy.bytes()), read, printable(copy.directory())});
    if (!copy.found().empty()) found += fmt::format("{}: {}\n", name, printable(copy.found()));
  }
  return "\n" +
         table({{"COPY"}, {"BYTES ARE"}, {"BYTES", true}, {"LAST READ"}, {"DIRECTORY"}}, rows) +
         found;
}

}  // namespace rekindle::cli
