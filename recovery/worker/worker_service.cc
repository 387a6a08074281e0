#include "recovery/worker/worker_service.h"

#include <algorithm>
#include <utility>

#include <boost/asio/this_coro.hpp>

#include "recovery/worker/worker_traces.h"
#include "recovery/worker/worker_wire.h"
#include "src/async/task.h"

namespace rekindle::worker {

namespace asio = boost::asio;

namespace {

constexpr std::size_t kMostEventsPerAnswer = 256;
constexpr std::chrono::milliseconds kLongestEventsWait{10'000};
constexpr std::chrono::milliseconds kCheckInterval{50};
constexpr std::chrono::milliseconds kIdleCheckInterval{250};
// A check that comes so much too late shows that this process was stopped, or starved.
constexpr std::chrono::milliseconds kPause{400};

}  // namespace

Result<std::unique_ptr<WorkerService>> WorkerService::start(Host& host,
                                                            asio::any_io_executor executor,
                                                            ServiceOptions options) {
  TRY(auto files, ReadyFiles::open(options.directory / "ready"));
  std::unique_ptr<WorkerService> service(
      new WorkerService(host, std::move(executor), std::move(options), std::move(files)));
  const ServiceOptions& own = service->options_;
  TRY(service->connections_,
      WorkerConnections::listen(service->executor_,
                                {.directory = own.directory,
                                 .incarnation = own.incarnation,
                                 .allowed_uids = own.allowed_uids,
                                 .keeps_residents = service->residents_.enabled(),
                                 .ping_interval = own.ping_interval,
                                 .silence = own.silence},
                                *service, service->tasks_));
  service->residents_.tell_owners(&service->sessions_);
  service->residents_.recover();
  service->resident_scrub_.start();
  return service;
}

WorkerService::WorkerService(Host& host, asio::any_io_executor executor, ServiceOptions options,
                             ReadyFiles files)
    : host_(host),
      executor_(std::move(executor)),
      options_(std::move(options)),
      tasks_(executor_),
      events_(executor_),
      instances_(std::move(files), events_),
      feeds_(host, executor_),
      orders_(executor_),
      residents_(host, host, events_, tasks_, executor_,
                 {.keeper = {.directory = options_.directory,
                             .program = options_.starts_keeper ? "/proc/self/exe" : ""},
                  .time_to_live = options_.resident_time_to_live,
                  .is_worker = [this](pid_t pid) { return connections_->has(pid); }}),
      resident_scrub_(residents_, tasks_, executor_, options_.resident_scrub),
      sessions_({.copies = host,
                 .devices = host,
                 .instances = instances_,
                 .feeds = feeds_,
                 .fleet = fleet_,
                 .rounds = rounds_,
                 .direct = direct_,
                 .residents = residents_,
                 .events = events_},
                watch_, orders_, tasks_, executor_,
                {.times = options_.session_times,
                 .retire_wait = options_.retire_wait,
                 .verify_uploads = options_.verify_uploads}),
      rounds_(host, host, sessions_, tasks_, executor_, options_.broadcasts),
      direct_(host, host, sessions_, tasks_, executor_),
      fleet_(host, instances_, sessions_, tasks_, executor_, options_.hear_ranks),
      watch_(host, rounds_, tasks_),
      publications_(host, executor_, tasks_, options_.directory / "publish"),
      updates_(host, tasks_) {
  if (options_.metrics != nullptr) metrics_ = std::make_unique<WorkerMetrics>(*options_.metrics);
  events_.tell([this](const Event& event) {
    if (metrics_ != nullptr) metrics_->count(event);
    if (options_.tracer != nullptr) record_recovery(*options_.tracer, event, steady_now());
  });
}

async::Task<void> WorkerService::close(std::chrono::milliseconds deadline) {
  connections_->close();
  events_.close();
  co_await feeds_.close(deadline);
  co_await residents_.close(deadline);
  (void)co_await tasks_.close(deadline);
}

async::Task<Result<proto::LocalSwitchResponse>> WorkerService::switch_model(
    proto::LocalSwitchRequest request) {
  return worker::switch_model({host_, instances_, sessions_, orders_, events_}, std::move(request));
}

void WorkerService::on_arrival() {
  if (!std::exchange(checking_, true)) tasks_.spawn("worker.deadlines", check_deadlines());
}

void WorkerService::on_call(const ClientPtr& client, proto::WorkerFrame frame,
                            std::vector<UniqueFd> descriptors) {
  const std::uint64_t call = frame.call();
  const std::uint64_t session = frame.session();
  if (auto begun = route(client, frame, descriptors); !begun) {
    client->send(error_frame(call, session, begun.error()));
  }
}

Result<void> WorkerService::route(const ClientPtr& client, proto::WorkerFrame& frame,
                                  std::vector<UniqueFd>& descriptors) {
  if (frame.call() == 0) return fail(ErrorCode::kInvalid, "a call has a number above 0");
  switch (frame.kind_case()) {
    case proto::WorkerFrame::kPing:
      client->send(pong_frame(frame.call()));
      return {};
    case proto::WorkerFrame::kAttach:
      return sessions_.attach(client, frame, ++last_number_);
    case proto::WorkerFrame::kLoaded:
      return sessions_.loaded(client, frame);
    case proto::WorkerFrame::kBeginSwitch:
      return sessions_.begin_switch(client, frame);
    case proto::WorkerFrame::kPhases:
      TRY_VOID(sessions_.report_phases(client, frame));
      if (metrics_ != nullptr) metrics_->count(frame.phases().phases());
      return {};
    case proto::WorkerFrame::kSealResident:
      return sessions_.seal_resident(client, std::move(frame), std::move(descriptors));
    case proto::WorkerFrame::kMendResident:
      return sessions_.mend_resident(client, frame);
    case proto::WorkerFrame::kDetach:
      return sessions_.detach(client, frame);
    case proto::WorkerFrame::kWatch:
      TRY_VOID(sessions_.find(client, frame));
      return watch_.watch(client, frame);
    case proto::WorkerFrame::kWatchOrders: {
      TRY(const auto session, sessions_.find(client, frame));
      orders_.watch(session, frame);
      return {};
    }
    case proto::WorkerFrame::kOrderResult:
      return orders_.result(client, frame);
    case proto::WorkerFrame::kPublishBegin:
      return publications_.begin(client, frame, ++last_number_);
    case proto::WorkerFrame::kPublishWritten:
      return publications_.written(client, frame);
    case proto::WorkerFrame::kPublishCommit:
      return publications_.commit(client, frame);
    case proto::WorkerFrame::kPublishAbandon:
      return publications_.abandon(client, frame);
    case proto::WorkerFrame::kUpdate:
      return updates_.begin(client, frame);
    default:
      return fail(ErrorCode::kInvalid, "this agent does not know that call; is it older?");
  }
}

void WorkerService::on_departure(const ClientPtr& client, const Departure& departure) {
  sessions_.client_gone(client, departure);
  publications_.drop(client->id());
}

// Runs while there are connections, or instances that will be forgotten.
async::Task<void> WorkerService::check_deadlines() {
  co_await asio::this_coro::throw_if_cancelled(false);
  while ((connections_->any() || instances_.any_idle()) && !co_await async::is_cancelled()) {
    const auto pause = connections_->any() ? kCheckInterval : kIdleCheckInterval;
    const auto due = steady_now() + pause;
    co_await async::sleep_for(pause);
    const auto now = steady_now();
    if (now - due > kPause) {
      connections_->excuse(now - due);
      sessions_.excuse(now - due);
      continue;
    }
    connections_->check(now);
    sessions_.check(now);
    instances_.forget_idle(now, options_.forget_after);
  }
  checking_ = false;
}

async::Task<proto::AgentEventsResponse> WorkerService::events_after(
    proto::AgentEventsRequest request) {
  co_await asio::this_coro::throw_if_cancelled(false);
  const std::chrono::milliseconds asked(request.wait_ms());
  co_await events_.wait_after(request.after(), steady_now() + std::min(asked, kLongestEventsWait));
  proto::AgentEventsResponse response;
  response.set_incarnation(options_.incarnation.to_bytes());
  response.set_last(events_.last());
  for (const auto& event : events_.after(request.after(), kMostEventsPerAnswer)) {
    *response.add_events() = to_proto(event);
  }
  co_return response;
}

std::vector<proto::FleetEvent> WorkerService::fleet_events(std::uint64_t after,
                                                           std::size_t most) const {
  std::vector<proto::FleetEvent> events;
  for (const Event& event : events_.after(after, most)) events.push_back(to_fleet_event(event));
  return events;
}

namespace {

constexpr std::size_t kMostUpdates = 256;  // of one worker
constexpr std::chrono::milliseconds kStatusWait{1000};
constexpr std::chrono::milliseconds kStatusRetry{250};
constexpr std::chrono::milliseconds kDefaultUpdate{600'000};

// The coordinator may answer later.
bool may_answer_later(const Error& error) {
  return error.code() == ErrorCode::kUnavailable || error.code() == ErrorCode::kPeerLost ||
         error.code() == ErrorCode::kTimeout;
}

}  // namespace

Result<void> UpdateCalls::begin(const std::shared_ptr<Client>& client,
                                const proto::WorkerFrame& frame) {
  std::size_t& under_way = under_way_[client->id()];
  if (under_way >= kMostUpdates) {
    return fail(ErrorCode::kExhausted, "this worker has {} calls under way", under_way);
  }
  ++under_way;
  tasks_.spawn("worker.update", run(client, frame));
  return {};
}

async::Task<void> UpdateCalls::run(std::shared_ptr<Client> client, proto::WorkerFrame frame) {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  const std::chrono::milliseconds asked(frame.deadline_ms());
  const auto give_up = steady_now() + (asked.count() > 0 ? asked : kDefaultUpdate);
  auto order = from_proto(frame.update());
  Result<proto::Updated> updated = proto::Updated();
  if (order) {
    auto running = update(client, std::move(*order), give_up);
    updated = co_await std::move(running);
  } else {
    updated = fail(std::move(order).error());
  }
  const auto under_way = under_way_.find(client->id());
  if (--under_way->second == 0) under_way_.erase(under_way);
  if (!updated) co_return client->send(error_frame(frame.call(), 0, updated.error()));
  proto::AgentFrame answer;
  answer.set_call(frame.call());
  *answer.mutable_updated() = std::move(*updated);
  client->send(answer);
}

async::Task<Result<proto::Updated>> UpdateCalls::update(std::shared_ptr<Client> client,
                                                        UpdateOrder order, TimePoint give_up) {
  CO_TRY(const std::uint64_t round,
         co_await fleet_.begin_update(order.id, order.group, order.gather, order.members));
  while (!client->closed() && !co_await async::is_cancelled()) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(give_up - steady_now());
    if (left.count() <= 0) {
      co_return fail(ErrorCode::kTimeout, "the update to {} goes on; see `rekindle status`",
                     order.id.to_string());
    }
    const auto status = co_await fleet_.update_status(round, std::min(left, kStatusWait));
    if (status) {
      if (status->phase() == "over") co_return updated_from(*status);
      continue;
    }
    // Another coordinator has taken over, which knows nothing of the update.
    if (!may_answer_later(status.error())) {
      co_return fail(ErrorCode::kUnavailable,
                     "the outcome of the update to {} is unknown: {}; see `rekindle status`",
                     order.id.to_string(), status.error().message());
    }
    co_await async::sleep_for(kStatusRetry);
  }
  co_return fail(ErrorCode::kPeerLost, "nobody waits for the update to {} any more",
                 order.id.to_string());
}

}  // namespace rekindle::worker
