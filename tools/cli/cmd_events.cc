#include <cstdio>
#include <memory>
#include <string>
#include <utility>

#include "recovery/agent/local_agent.h"
#include "recovery/rpc/address.h"
#include "tools/cli/arguments.h"
#include "tools/cli/cli_session.h"
#include "tools/cli/command_line.h"
#include "tools/cli/output.h"
#include "tools/cli/remote.h"
#include "tools/cli/status_view.h"

namespace rekindle::cli {
namespace {

constexpr std::uint32_t kWaitMs = 1000;
constexpr std::chrono::milliseconds kEventsRetry{250};

struct EventsArgs {
  std::string agent;
  bool fleet = false;
  bool follow = false;
};

// The events of an agent, each once. After a restart of the agent they begin anew.
class EventsSource {
 public:
  // Calls wait for events.
  static constexpr std::chrono::milliseconds kPause{0};

  static Result<EventsSource> create(const Settings& settings, const EventsArgs& args) {
    EventsSource source;
    const std::string address =
        args.agent.empty() ? "unix:" + agent::agent_socket(settings.store).string() : args.agent;
    TRY(source.remote_, Remote::create(settings, address));
    return source;
  }

  Result<proto::AgentEventsResponse> next(std::uint32_t wait_ms) {
    proto::AgentStatusRequest request;
    request.mutable_events()->set_after(after_);
    request.mutable_events()->set_wait_ms(wait_ms);
    TRY(auto status, (remote_->call<proto::AGENT_STATUS>(request)));
    if (!status.has_events()) {
      return fail(ErrorCode::kUnavailable, "the agent at {} is older and reports no events",
                  remote_->address());
    }
    proto::AgentEventsResponse response = std::move(*status.mutable_events());
    if (response.incarnation() != incarnation_) {
      const bool known = !incarnation_.empty();
      incarnation_ = response.incarnation();
      after_ = 0;
      if (known) return next(0);
    }
    if (response.events_size() > 0) after_ = response.events().rbegin()->number();
    return response;
  }

 private:
  std::unique_ptr<Remote> remote_;
  std::string incarnation_;
  std::uint64_t after_ = 0;
};

// The events of the fleet, each once. After a change of the coordinator they begin anew.
class FleetEventsSource {
 public:
  static constexpr std::chrono::milliseconds kPause{kWaitMs};

  static Result<FleetEventsSource> create(const Settings& settings) {
    if (settings.coordinator.empty()) {
      return fail(ErrorCode::kInvalid, "--fleet: give the fleet's --coordinator HOST:PORT");
    }
    FleetEventsSource source;
    TRY(source.remote_, Remote::create(settings, settings.coordinator));
    return source;
  }

  Result<proto::FleetEventsResponse> next(std::uint32_t wait_ms) {
    proto::ClusterStatusRequest request;
    request.mutable_events()->set_after(after_);
    TRY(auto status, (remote_->call<proto::COORDINATOR_STATUS>(request)));
    if (!status.has_events()) {
      return fail(ErrorCode::kUnavailable, "the coordinator at {} is older and reports no events",
                  remote_->address());
    }
    proto::FleetEventsResponse response = std::move(*status.mutable_events());
    // Numbers count anew in each term, and each term has another incarnation.
    const Incarnation before = std::exchange(term_, remote_->answered_by());
    if (!before.is_nil() && before != term_) {
      after_ = 0;
      return next(wait_ms);
    }
    if (response.events_size() > 0) after_ = response.events().rbegin()->number();
    return response;
  }

 private:
  std::unique_ptr<Remote> remote_;
  Incarnation term_;
  std::uint64_t after_ = 0;
};

template <typename Response>
Result<void> show(const Settings& settings, const Response& response) {
  for (const auto& event : response.events()) {
    if (settings.json) {
      print_json_line(to_json(event));
    } else {
      print_line(to_line(event));
    }
  }
  return flush_output();
}

// Until a signal comes. An unreachable daemon does not end it.
template <typename Source>
Result<int> follow(const Settings& settings, Source source) {
  Interrupts interrupts;
  bool away = false;
  while (true) {
    const auto response = source.next(kWaitMs);
    if (!response && !away && !settings.quiet) {
      std::fprintf(stderr, "rekindle events: %s; waiting for it\n",
                   printable(response.error().message()).c_str());
    }
    away = !response;
    if (response) TRY_VOID(show(settings, *response));
    // Nobody reads any more.
    if (std::ferror(stdout) != 0) return kExitOk;
    if (interrupts.within(away ? kEventsRetry : Source::kPause)) return kExitOk;
  }
}

template <typename Source>
Result<int> print_events(const Settings& settings, bool follows, Source source) {
  if (follows) return follow(settings, std::move(source));
  while (true) {
    TRY(const auto response, source.next(0));
    TRY_VOID(show(settings, response));
    if (response.events_size() == 0 || response.events().rbegin()->number() >= response.last()) {
      return kExitOk;
    }
  }
}

Result<int> events(const Settings& settings, const EventsArgs& args) {
  if (args.fleet) {
    if (!args.agent.empty()) {
      return fail(ErrorCode::kInvalid, "--agent and --fleet: give one of them");
    }
    TRY(auto source, FleetEventsSource::create(settings));
    return print_events(settings, args.follow, std::move(source));
  }
  if (!args.agent.empty() && !args.agent.starts_with(rpc::kUnixPrefix)) {
    TRY_VOID(check_address("--agent", args.agent));
  }
  TRY(auto source, EventsSource::create(settings, args));
  return print_events(settings, args.follow, std::move(source));
}

}  // namespace

void add_events(Command& app, Session& session) {
  Command sub = app.command(
      "events",
      "Show the events of the workers of an agent: the one named with --agent, or else this\n"
      "host's. The lines tell how long each phase of a recovery took; --json prints one object\n"
      "a line.");
  auto args = std::make_shared<EventsArgs>();
  sub.option("--agent", args->agent, "Ask this agent").type_name("HOST:PORT");
  sub.flag("--fleet", args->fleet,
           "Ask the coordinator instead, for the events of the whole fleet in its term: hosts,\n"
           "versions, pulls, updates, and those that agents have told it");
  sub.flag("-f,--follow", args->follow, "Continue until interrupted");
  sub.runs(session, "events", [&session, args] { return events(session.settings, *args); });
}

}  // namespace rekindle::cli
