#include "tools/cli/workers_view.h"

#include <cmath>
#include <utility>
#include <vector>

#include "src/base/units.h"

namespace rekindle::cli {
namespace {

template <typename Message>
Json phases_json(const Message& message) {
  Json phases = Json::object();
  for (const auto& phase : message.phases()) phases[phase.name()] = phase.elapsed_us();
  return phases;
}

Json session_json(const proto::WorkerSession& session) {
  return {{"session", session.session()},
          {"rank", session.rank()},
          {"pid", session.pid()},
          {"state", session.state()},
          {"rung", session.rung()},
          {"bytes_done", session.bytes_done()},
          {"bytes_total", session.bytes_total()},
          {"phases_us", phases_json(session)}};
}

Json instance_json(const proto::WorkerInstance& instance) {
  Json sessions = Json::array();
  for (const auto& session : instance.sessions()) sessions.push_back(session_json(session));
  return {{"instance", instance.name()},
          {"named", instance.named()},
          {"state", instance.state()},
          {"model", instance.has_id() ? Json(instance.id().model()) : Json()},
          {"version", instance.has_id() ? Json(instance.id().version()) : Json()},
          {"generation", instance.generation()},
          {"world", instance.world()},
          {"why", instance.why()},
          {"sessions", std::move(sessions)}};
}

std::string version_of(const proto::WorkerInstance& instance) {
  if (!instance.has_id()) return "-";
  return printable(fmt::format("{}@{}", instance.id().model(), instance.id().version()));
}

// "plan 3 ms, wire 1200 ms": the phases that took time.
template <typename Message>
std::string phases_of(const Message& message) {
  std::string text;
  for (const auto& phase : message.phases()) {
    if (phase.elapsed_us() == 0) continue;
    text += fmt::format("{}{} {:.1f} ms", text.empty() ? "" : ", ", printable(phase.name()),
                        static_cast<double>(phase.elapsed_us()) / 1e3);
  }
  return text.empty() ? "-" : text;
}

std::string arrived(const proto::WorkerSession& session) {
  if (session.bytes_total() == 0) return "-";
  const double part = 100.0 * static_cast<double>(session.bytes_done()) /
                      static_cast<double>(session.bytes_total());
  return fmt::format("{:.0f} % of {}", std::floor(part), format_bytes(session.bytes_total()));
}

}  // namespace

Json instances_json(const proto::AgentStatusResponse& status) {
  Json result = Json::array();
  for (const auto& instance : status.instances()) result.push_back(instance_json(instance));
  return result;
}

std::string instances_text(const proto::AgentStatusResponse& status) {
  if (status.instances_size() == 0) return {};
  std::vector<std::vector<std::string>> instances, sessions;
  for (const auto& instance : status.instances()) {
    const std::string name = printable(instance.name());
    instances.push_back({name, printable(instance.state()), version_of(instance),
                         fmt::format("{}", instance.generation()),
                         fmt::format("{}", instance.world()),
                         instance.why().empty() ? "-" : printable(instance.why())});
    for (const auto& session : instance.sessions()) {
      sessions.push_back({name, fmt::format("{}", session.rank()), fmt::format("{}", session.pid()),
                          printable(session.state()),
                          session.rung().empty() ? "-" : printable(session.rung()),
                          arrived(session), phases_of(session)});
    }
  }
  std::string text = "\n" + table({{"INSTANCE"},
                                   {"STATE"},
                                   {"VERSION"},
                                   {"GENERATION", true},
                                   {"RANKS", true},
                                   {"WHY NOT READY"}},
                                  instances);
  if (!sessions.empty()) {
    text += "\n" + table({{"INSTANCE"},
                          {"RANK", true},
                          {"PID", true},
                          {"WORKER"},
                          {"RUNG"},
                          {"HERE", true},
                          {"TIMES"}},
                         sessions);
  }
  return text;
}

Json to_json(const proto::AgentEvent& event) {
  Json json{{"number", event.number()},
            {"time", utc_time(event.unix_us())},
            {"unix_us", event.unix_us()},
            {"event", event.kind()},
            {"instance", event.instance()}};
  if (event.has_id()) {
    json["model"] = event.id().model();
    json["version"] = event.id().version();
  }
  if (event.has_rank()) {
    json["rank"] = event.rank();
    json["session"] = event.session();
    json["pid"] = event.pid();
    if (!event.rung().empty()) json["rung"] = event.rung();
    json["phases_us"] = phases_json(event);
  }
  if (!event.why().empty()) json["why"] = event.why();
  return json;
}

std::string to_line(const proto::AgentEvent& event) {
  std::string line = utc_time(event.unix_us());
  if (!event.instance().empty()) line += " " + event.instance();
  if (event.has_rank()) line += fmt::format("/{} pid {}", event.rank(), event.pid());
  if (event.has_id()) line += fmt::format(" {}@{}", event.id().model(), event.id().version());
  if (!event.rung().empty()) line += " " + event.rung();
  line += " " + event.kind();
  if (!event.why().empty()) line += ": " + event.why();
  if (const auto phases = phases_of(event); event.has_rank() && phases != "-") {
    line += (event.why().empty() ? ": " : "; ") + phases;
  }
  return printable(line);
}

}  // namespace rekindle::cli
