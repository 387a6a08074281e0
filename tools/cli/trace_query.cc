#include "tools/cli/trace_query.h"

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <system_error>
#include <utility>

#include "proto/trace.pb.h"
#include "recovery/agent/local_agent.h"
#include "recovery/trace/trace_wire.h"
#include "tools/cli/output.h"
#include "tools/cli/remote.h"

namespace rekindle::cli {
namespace {

constexpr std::size_t kIdDigits = 32;

bool is_id(const std::string& word) {
  return word.size() == kIdDigits &&
         std::ranges::all_of(word, [](unsigned char c) { return std::isxdigit(c) != 0; });
}

// Ids have small letters wherever they are kept.
std::string as_kept(std::string word) {
  if (!is_id(word)) return word;
  for (char& digit : word)
    digit = static_cast<char>(std::tolower(static_cast<unsigned char>(digit)));
  return word;
}

Result<proto::TraceResponse> ask(const Settings& settings, const std::string& address,
                                 const proto::TraceRequest& request) {
  TRY(const auto remote, Remote::create(settings, address));
  return remote->call<proto::FIND_TRACE>(request);
}

// An id may be that of a pull or that of a trace.
Result<proto::TraceResponse> ask_first(const Settings& settings, const TraceWanted& wanted,
                                       const std::string& address) {
  proto::TraceRequest request;
  request.set_operation(wanted.operation.empty() ? "pull" : wanted.operation);
  request.set_subject(wanted.subject);
  auto response = ask(settings, address, request);
  const bool none = !response && response.error().code() == ErrorCode::kNotFound;
  trace::TraceId id;
  if (!none || !is_id(wanted.subject) || !from_hex(wanted.subject, id.bytes.data(), 16)) {
    return response;
  }
  request.Clear();
  request.set_trace_id(id.to_bytes());
  return ask(settings, address, request);
}

// Each span once.
class Merged {
 public:
  Result<void> add(const proto::TraceResponse& response) {
    for (const auto& message : response.spans()) {
      TRY(auto span, trace::from_proto(message));
      if (known_.insert(span.context).second) spans_.push_back(std::move(span));
    }
    return {};
  }
  std::vector<trace::Span> take() {
    std::ranges::stable_sort(spans_, {}, &trace::Span::start);
    return std::move(spans_);
  }

 private:
  std::set<trace::Context> known_;
  std::vector<trace::Span> spans_;
};

// Of the span itself, or of the nearest span above it: the source or rank whose track it is on.
std::string track_of(const trace::Span& span,
                     const std::map<trace::Context, const trace::Span*>& by_context) {
  const trace::Span* at = &span;
  for (std::size_t depth = 0; at != nullptr && depth < 16; ++depth) {
    for (const auto key : {trace::kSource, trace::kRank}) {
      const std::string* name = at->text(key);
      if (name != nullptr) return std::string(key.substr(key.find('.') + 1)) + " " + *name;
    }
    const auto parent = by_context.find({at->context.trace, at->parent});
    at = parent == by_context.end() ? nullptr : parent->second;
  }
  return "operation";
}

// Tracks on which spans only follow or contain each other.
class Lanes {
 public:
  // The number of the lane, from 0.
  std::size_t place(const trace::Span& span) {
    for (std::size_t lane = 0; lane < open_.size(); ++lane) {
      auto& ends = open_[lane];
      while (!ends.empty() && ends.back() <= span.start) ends.pop_back();
      if (!ends.empty() && ends.back() < span.end()) continue;
      ends.push_back(span.end());
      return lane;
    }
    open_.push_back({span.end()});
    return open_.size() - 1;
  }

 private:
  // The ends of the spans that contain the present time, the outermost first.
  std::vector<std::vector<std::chrono::nanoseconds>> open_;
};

Json arguments_of(const trace::Span& span) {
  Json arguments = Json::object();
  for (const auto& attribute : span.attributes) {
    if (const auto* text = std::get_if<std::string>(&attribute.value)) {
      arguments[attribute.key] = *text;
    } else {
      arguments[attribute.key] = std::get<std::int64_t>(attribute.value);
    }
  }
  if (!span.error.empty()) arguments["error"] = span.error;
  arguments["span"] = span.context.span.hex();
  if (!span.parent.is_nil()) arguments["parent"] = span.parent.hex();
  return arguments;
}

double microseconds(std::chrono::nanoseconds time) {
  return static_cast<double>(time.count()) / 1000;
}

// Numbers the processes and tracks, and names them in events of their own.
class ChromeTrace {
 public:
  int process(const std::string& name) { return number(processes_, name, "process_name", name, 0); }
  int track(int process, const std::string& name) {
    return number(tracks_, fmt::format("{} {}", process, name), "thread_name", name, process);
  }
  Json events = Json::array();

 private:
  int number(std::map<std::string, int>& numbers, const std::string& key, const char* what,
             const std::string& name, int process) {
    const auto [entry, fresh] = numbers.emplace(key, static_cast<int>(numbers.size()) + 1);
    const int value = entry->second;
    if (fresh) {
      events.push_back({{"ph", "M"},
                        {"name", what},
                        {"pid", process == 0 ? value : process},
                        {"tid", process == 0 ? 0 : value},
                        {"args", {{"name", name}}}});
    }
    return value;
  }
  std::map<std::string, int> processes_;
  std::map<std::string, int> tracks_;
};

// A recovery is known to the agent of its host. A pull that the coordinator has not heard of may be
// known to the agent of this host.
Result<std::vector<std::string>> addresses_of(const Settings& settings, const TraceWanted& wanted) {
  const auto socket = agent::agent_socket(settings.store);
  const std::string local = "unix:" + socket.string();
  if (!wanted.agent.empty()) return std::vector{wanted.agent};
  if (wanted.operation == "recovery") return std::vector{local};
  std::vector<std::string> addresses;
  if (!settings.coordinator.empty()) addresses.push_back(settings.coordinator);
  std::error_code ignored;
  if (wanted.operation != "update" && std::filesystem::exists(socket, ignored)) {
    addresses.push_back(local);
  }
  if (!addresses.empty()) return addresses;
  return fail(ErrorCode::kInvalid, "give the fleet's --coordinator HOST:PORT");
}

// The trace of the operation that ended last, among the answers. The error of the first that gave
// none.
Result<trace::TraceId> find_newest(const Settings& settings, const TraceWanted& wanted,
                                   const std::vector<std::string>& addresses) {
  std::optional<trace::Span> newest;
  std::optional<Error> problem;
  const std::string& kind = wanted.operation;
  for (const std::string& address : addresses) {
    const auto answer = ask_first(settings, wanted, address);
    if (!answer) {
      if (!problem) problem = answer.error();
      continue;
    }
    for (const auto& message : answer->spans()) {
      TRY(auto span, trace::from_proto(message));
      if (!kind.empty() && !is_wanted(span, kind, wanted.subject)) continue;
      if (!newest || span.end() > newest->end()) newest = std::move(span);
    }
  }
  if (newest) return newest->context.trace;
  if (problem) return fail(std::move(*problem));
  return fail(ErrorCode::kNotFound, "the spans of {} have no {} in them", wanted.subject,
              kind.empty() ? "operation" : kind);
}

}  // namespace

bool is_wanted(const trace::Span& span, const std::string& operation, const std::string& subject) {
  const std::string kept = as_kept(subject);
  // An instance may look like an id.
  for (const std::string& name : {subject, kept}) {
    if (trace::is_operation_on(span, operation, name)) return true;
  }
  const std::string* const kind = span.text(trace::kOperation);
  return kind != nullptr && *kind == operation && kept == span.context.trace.hex();
}

TraceWanted trace_wanted(const std::string& word) {
  if (is_id(word)) return {.operation = "", .subject = word, .agent = ""};
  if (word.find('@') != std::string::npos) {
    return {.operation = "update", .subject = word, .agent = ""};
  }
  return {.operation = "recovery", .subject = word, .agent = ""};
}

Result<CollectedTrace> collect_trace(const Settings& settings, TraceWanted wanted,
                                     std::chrono::milliseconds patience) {
  if (wanted.operation != "recovery") wanted.subject = as_kept(wanted.subject);
  TRY(const auto addresses, addresses_of(settings, wanted));
  TRY(const auto newest, find_newest(settings, wanted, addresses));
  proto::TraceRequest request;
  request.set_trace_id(newest.to_bytes());
  Merged merged;
  CollectedTrace collected;
  std::map<std::string, std::string> nodes;
  const TimePoint until = steady_now() + patience;
  const auto gather = [&](const std::string& name, const std::string& address) {
    if (steady_now() >= until) {
      collected.silent.push_back(name + ": not asked, because others took too long to answer");
      return;
    }
    const auto answer = ask(settings, address, request);
    if (!answer && answer.error().code() == ErrorCode::kNotFound) return;
    const auto added = answer ? merged.add(*answer) : Result<void>(fail(answer.error()));
    if (!added) collected.silent.push_back(name + ": " + added.error().message());
    if (!answer) return;
    for (const auto& node : answer->nodes()) nodes[node.node_id()] = node.control_endpoint();
  };
  for (const std::string& address : addresses) gather(address, address);
  if (wanted.operation == "recovery" && !settings.coordinator.empty()) {
    gather("the coordinator", settings.coordinator);
  }
  for (const auto& [name, endpoint] : nodes) gather(name, endpoint);
  collected.spans = merged.take();
  if (collected.spans.empty()) {
    return fail(ErrorCode::kNotFound, "the spans of trace {} have just gone", newest.hex());
  }
  return collected;
}

std::string to_chrome_trace(const std::vector<trace::Span>& spans) {
  std::map<trace::Context, const trace::Span*> by_context;
  for (const auto& span : spans) by_context[span.context] = &span;
  // On one track, the span that contains another one comes first.
  std::vector<const trace::Span*> order;
  for (const auto& span : spans) order.push_back(&span);
  std::ranges::stable_sort(order, [](const trace::Span* a, const trace::Span* b) {
    return std::pair(a->start, -a->duration) < std::pair(b->start, -b->duration);
  });
  ChromeTrace out;
  std::map<std::string, Lanes> lanes;
  for (const trace::Span* span : order) {
    const std::string process = span->service + " " + span->node;
    const std::string track = track_of(*span, by_context);
    const std::size_t lane = lanes[process + "\n" + track].place(*span);
    const int pid = out.process(process);
    const int tid = out.track(pid, lane == 0 ? track : fmt::format("{} ({})", track, lane + 1));
    out.events.push_back({{"ph", "X"},
                          {"name", span->name},
                          {"cat", span->service},
                          {"ts", microseconds(span->start - order.front()->start)},
                          {"dur", microseconds(span->duration)},
                          {"pid", pid},
                          {"tid", tid},
                          {"args", arguments_of(*span)}});
  }
  const Json document{{"displayTimeUnit", "ms"}, {"traceEvents", std::move(out.events)}};
  return document.dump(1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace rekindle::cli
