// What a person or a router sees of the workers here.
#include <algorithm>
#include <utility>

#include <boost/asio/this_coro.hpp>

#include "recovery/worker/service.h"
#include "src/async/task.h"
#include "src/base/clock.h"

namespace rekindle::worker {

namespace {

constexpr std::size_t kMostEvents = 256;  // in one answer
constexpr std::chrono::milliseconds kLongestWait{10'000};

}  // namespace

void WorkerService::add_status(proto::AgentStatusResponse& status) const {
  const auto now = steady_now();
  for (const auto& [name, entry] : instances_.all()) {
    auto& instance = *status.add_instances();
    instance.set_name(name);
    instance.set_named(entry->named);
    instance.set_state(std::string(to_string(entry->state.state())));
    instance.set_generation(entry->state.generation());
    instance.set_world(entry->state.world());
    if (const auto& id = entry->state.version()) {
      instance.mutable_id()->set_model(id->model);
      instance.mutable_id()->set_version(id->version);
    }
    instance.set_why(entry->state.why());
    for (const auto& [id, session] : sessions_) {
      if (session->instance != name) continue;
      auto& shown = *instance.add_sessions();
      shown = status_of(session->state, session->rank, session->client->pid(), now);
      shown.set_group(session->group);
      const auto in_round = rounds_.phase_of(id);
      if (session->state.state() == SessionState::kServing && !in_round.empty()) {
        shown.set_state(std::string(in_round));
      }
    }
  }
}

std::uint32_t WorkerService::readers_of(const ModelVersion& id) const {
  return static_cast<std::uint32_t>(std::ranges::count_if(
      sessions_, [&id](const auto& item) { return item.second->wanted == id; }));
}

async::Task<proto::AgentEventsResponse> WorkerService::events_after(
    proto::AgentEventsRequest request) {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  const std::chrono::milliseconds asked(request.wait_ms());
  const auto give_up = steady_now() + std::min(asked, kLongestWait);
  while (events_.last() <= request.after() && steady_now() < give_up && !closing_ &&
         !co_await async::is_cancelled()) {
    co_await events_.changed.wait_until(give_up);
  }
  proto::AgentEventsResponse response;
  response.set_incarnation(options_.incarnation.to_bytes());
  response.set_last(events_.last());
  for (const auto& event : events_.after(request.after(), kMostEvents)) {
    *response.add_events() = to_proto(event);
  }
  co_return response;
}

// How far a session is; each phase is told once.
void WorkerService::note_phase(Session& session) {
  const Phase phase = session.state.phases().current();
  if (phase <= session.told) return;
  session.told = phase;
  note(session, phase == Phase::kReady ? "loaded" : std::string(to_string(phase)));
}

void WorkerService::note(const Session& session, std::string kind, std::string why) {
  Event event;
  event.kind = std::move(kind);
  event.why = std::move(why);
  event.instance = session.instance;
  event.rank = session.rank;
  event.session = session.state.id();
  event.pid = session.client->pid();
  if (session.wanted.version != 0) event.version = session.wanted;
  if (session.attached) event.rung = std::string(to_string(session.state.rung()));
  event.phases = session.state.phases().at(steady_now());
  events_.add(std::move(event));
}

}  // namespace rekindle::worker
