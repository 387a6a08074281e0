#include "recovery/worker/worker_service.h"

#include <algorithm>
#include <utility>

#include <boost/asio/this_coro.hpp>

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
  TRY(service->connections_, WorkerConnections::listen(service->executor_,
                                                       {.directory = own.directory,
                                                        .incarnation = own.incarnation,
                                                        .allowed_uids = own.allowed_uids,
                                                        .ping_interval = own.ping_interval,
                                                        .silence = own.silence},
                                                       *service, service->tasks_));
  return service;
}

WorkerService::WorkerService(Host& host, asio::any_io_executor executor, ServiceOptions options,
                             ReadyFiles files)
    : executor_(std::move(executor)),
      options_(std::move(options)),
      tasks_(executor_),
      events_(executor_),
      instances_(std::move(files), events_),
      feeds_(host, executor_),
      sessions_({.copies = host,
                 .devices = host,
                 .instances = instances_,
                 .feeds = feeds_,
                 .fleet = fleet_,
                 .rounds = rounds_,
                 .events = events_},
                watch_, tasks_, executor_,
                {.times = options_.session_times,
                 .retire_wait = options_.retire_wait,
                 .verify_uploads = options_.verify_uploads}),
      rounds_(host, host, sessions_, tasks_, executor_),
      fleet_(host, instances_, sessions_, tasks_, executor_, options_.hear_ranks),
      watch_(host, rounds_, tasks_),
      publications_(host, tasks_, options_.directory / "publish"),
      updates_(host, tasks_) {}

async::Task<void> WorkerService::close(std::chrono::milliseconds deadline) {
  connections_->close();
  events_.close();
  co_await feeds_.close(deadline);
  (void)co_await tasks_.close(deadline);
}

void WorkerService::on_arrival() {
  if (!std::exchange(checking_, true)) tasks_.spawn("worker.deadlines", check_deadlines());
}

void WorkerService::on_call(const ClientPtr& client, const proto::WorkerFrame& frame) {
  if (auto begun = route(client, frame); !begun) {
    client->send(error_frame(frame.call(), frame.session(), begun.error()));
  }
}

Result<void> WorkerService::route(const ClientPtr& client, const proto::WorkerFrame& frame) {
  if (frame.call() == 0) return fail(ErrorCode::kInvalid, "a call has a number above 0");
  switch (frame.kind_case()) {
    case proto::WorkerFrame::kPing:
      client->send(pong_frame(frame.call()));
      return {};
    case proto::WorkerFrame::kAttach:
      return sessions_.attach(client, frame, ++last_number_);
    case proto::WorkerFrame::kLoaded:
      return sessions_.loaded(client, frame);
    case proto::WorkerFrame::kDetach:
      return sessions_.detach(client, frame);
    case proto::WorkerFrame::kWatch:
      TRY_VOID(sessions_.find(client, frame));
      return watch_.watch(client, frame);
    case proto::WorkerFrame::kPublishBegin:
      return publications_.begin(client, frame, ++last_number_);
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

}  // namespace rekindle::worker
