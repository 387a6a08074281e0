#include "recovery/worker/order_desk.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include <boost/asio/this_coro.hpp>

#include "recovery/rpc/convert.h"
#include "recovery/worker/worker_wire.h"
#include "src/base/log.h"

namespace rekindle::worker {

namespace {

// For the results of the other ranks once one has failed. They go back to what they served, or wait
// in vain for one that has died.
constexpr std::chrono::seconds kAfterFailure{5};

std::string worker_name(const Session& session) {
  return fmt::format("rank {} of {} (pid {})", session.rank(), session.instance,
                     session.client->pid());
}

}  // namespace

Result<std::vector<OrderDesk::GivenPtr>> OrderDesk::reserve(
    const std::vector<SessionPtr>& sessions) {
  for (const SessionPtr& session : sessions) {
    if (session->state.ended()) {
      return fail(ErrorCode::kStale, "{} has ended its session", worker_name(*session));
    }
    if (open_.contains(session->id())) {
      return fail(ErrorCode::kUnavailable, "{} has not finished an earlier order; try again later",
                  worker_name(*session));
    }
  }
  std::vector<GivenPtr> given;
  for (const SessionPtr& session : sessions) {
    given.push_back(std::make_shared<Given>(Given{++last_number_, session->client->id()}));
    open_[session->id()] = given.back();
  }
  return given;
}

async::Task<Result<OrderDesk::Results>> OrderDesk::give(std::vector<SessionPtr> sessions,
                                                        proto::Order order, TimePoint give_up) {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  CO_TRY(const auto given, reserve(sessions));
  auto asking = wait_for_all_to_ask(sessions, given, give_up);
  if (auto asked = co_await std::move(asking); !asked) {
    for (const SessionPtr& session : sessions) open_.erase(session->id());
    co_return fail(std::move(asked).error());
  }
  send(sessions, given, std::move(order));
  const auto is_open = [](const GivenPtr& one) { return !one->result; };
  const auto has_failed = [](const GivenPtr& one) { return one->result && !*one->result; };
  bool failed = false;
  while (std::ranges::any_of(given, is_open) && steady_now() < give_up &&
         !co_await async::is_cancelled()) {
    if (!failed && std::ranges::any_of(given, has_failed)) {
      failed = true;
      give_up = std::min(give_up, steady_now() + kAfterFailure);
    }
    co_await changed_.wait_until(give_up);
  }
  Results results;
  for (std::size_t i = 0; i < given.size(); ++i) {
    given[i]->awaited = false;
    if (given[i]->result) {
      open_.erase(sessions[i]->id());
      results.push_back(std::move(*given[i]->result));
    } else {
      results.push_back(fail(ErrorCode::kTimeout, "has not answered; it may still carry it out"));
    }
  }
  co_return results;
}

// Each rank asks until it gets an order. So all ranks get theirs when the last one asks.
async::Task<Result<void>> OrderDesk::wait_for_all_to_ask(std::vector<SessionPtr> sessions,
                                                         std::vector<GivenPtr> given,
                                                         TimePoint give_up) {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  while (true) {
    const Session* silent = nullptr;
    for (std::size_t i = 0; i < sessions.size(); ++i) {
      if (given[i]->result) {
        co_return fail(
            std::move(given[i]->result->error()).with_context(worker_name(*sessions[i])));
      }
      if (silent == nullptr && !asking_.contains(sessions[i]->id())) silent = sessions[i].get();
    }
    if (silent == nullptr) co_return Result<void>();
    if (steady_now() >= give_up || co_await async::is_cancelled()) {
      co_return fail(ErrorCode::kTimeout,
                     "{} takes no order: it hangs, or does not call rk_watch_order() or "
                     "Session.next_order(); nothing has changed",
                     worker_name(*silent));
    }
    co_await changed_.wait_until(give_up);
  }
}

void OrderDesk::send(const std::vector<SessionPtr>& sessions, const std::vector<GivenPtr>& given,
                     proto::Order order) {
  for (std::size_t i = 0; i < sessions.size(); ++i) {
    order.set_number(given[i]->number);
    proto::AgentFrame frame;
    frame.set_call(asking_.extract(sessions[i]->id()).mapped());
    frame.set_session(sessions[i]->id());
    *frame.mutable_order() = order;
    given[i]->sent = true;
    log::info("worker.order", "order", given[i]->number, "session", sessions[i]->id(), "pid",
              sessions[i]->client->pid());
    sessions[i]->client->send(frame);
  }
}

void OrderDesk::watch(const SessionPtr& session, const proto::WorkerFrame& frame) {
  asking_[session->id()] = frame.call();
  changed_.notify();
}

Result<void> OrderDesk::result(const ClientPtr& client, const proto::WorkerFrame& frame) {
  const proto::OrderResult& result = frame.order_result();
  const auto found = std::ranges::find_if(open_, [&](const auto& item) {
    return item.second->number == result.order() && item.second->client == client->id();
  });
  if (found == open_.end() || !found->second->sent || found->second->result) {
    return fail(ErrorCode::kStale, "this agent waits for no result of order {}", result.order());
  }
  const GivenPtr given = found->second;
  log::info("worker.order_result", "order", result.order(), "pid", client->pid(), "error",
            result.error().message());
  if (!given->awaited) open_.erase(found);
  auto good = rpc::from_status(result.error());
  finish(*given, good ? Result<proto::OrderResult>(result) : fail(std::move(good).error()));
  client->send(done_frame(frame.call(), frame.session()));
  return {};
}

void OrderDesk::session_ended(SessionId session, const Error& why) {
  asking_.erase(session);
  const auto found = open_.find(session);
  if (found != open_.end() && !found->second->sent) finish(*found->second, fail(why));
  changed_.notify();
}

void OrderDesk::client_gone(const ClientPtr& client, const Error& why) {
  for (auto item = open_.begin(); item != open_.end();) {
    const GivenPtr given = item->second;
    const bool gone = given->client == client->id();
    item = gone && !given->awaited ? open_.erase(item) : std::next(item);
    if (gone) finish(*given, fail(ErrorCode::kPeerLost, "{}", why.message()));
  }
}

void OrderDesk::finish(Given& given, Result<proto::OrderResult> result) {
  if (!given.result) given.result = std::move(result);
  changed_.notify();
}

}  // namespace rekindle::worker
