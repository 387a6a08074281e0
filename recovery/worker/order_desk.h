#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <boost/asio/any_io_executor.hpp>

#include "proto/worker.pb.h"
#include "recovery/worker/session_serving.h"
#include "recovery/worker/worker_connections.h"
#include "src/async/task.h"

namespace rekindle::worker {

// What this agent wants of its workers, and their results. A worker asks for an order between two
// steps, so an order waits for that. A session has one order at a time. Control thread only.
class OrderDesk {
 public:
  explicit OrderDesk(boost::asio::any_io_executor executor) : changed_(std::move(executor)) {}

  // In the order of the sessions. An error: the worker could not carry the order out, has died
  // (kPeerLost), or has not answered in time (kTimeout). In the last case it may still carry the
  // order out, and gets no other one before it has answered.
  using Results = std::vector<Result<proto::OrderResult>>;
  // Gives the order to the workers of these sessions when all of them ask for one, and waits for
  // their results; once one has failed, a few seconds for those of the others. An error: no worker
  // got the order. kUnavailable: one of them has another order.
  // kTimeout: one of them did not ask. kStale: a session has ended.
  async::Task<Result<Results>> give(std::vector<SessionPtr> sessions, proto::Order order,
                                    TimePoint give_up);

  // Whether the worker of the session asks for an order, or has one.
  bool watched(SessionId session) const {
    return asking_.contains(session) || open_.contains(session);
  }

  // --- calls of workers
  // A second call of a session replaces the first.
  void watch(const SessionPtr& session, const proto::WorkerFrame& frame);
  // kStale: there is no such order.
  Result<void> result(const ClientPtr& client, const proto::WorkerFrame& frame);

  // The worker may still answer an order that it has.
  void session_ended(SessionId session, const Error& why);
  void client_gone(const ClientPtr& client, const Error& why);

 private:
  struct Given {
    std::uint64_t number = 0;
    ClientId client = 0;
    bool sent = false;
    // Somebody waits for the result.
    bool awaited = true;
    std::optional<Result<proto::OrderResult>> result;
  };
  using GivenPtr = std::shared_ptr<Given>;

  Result<std::vector<GivenPtr>> reserve(const std::vector<SessionPtr>& sessions);
  async::Task<Result<void>> wait_for_all_to_ask(std::vector<SessionPtr> sessions,
                                                std::vector<GivenPtr> given, TimePoint give_up);
  void send(const std::vector<SessionPtr>& sessions, const std::vector<GivenPtr>& given,
            proto::Order order);
  void finish(Given& given, Result<proto::OrderResult> result);

  // By the session that each was given to. A session may have ended since.
  std::map<SessionId, GivenPtr> open_;
  // The calls that wait for an order.
  std::map<SessionId, std::uint64_t> asking_;
  std::uint64_t last_number_ = 0;
  async::Notifier changed_;
};

}  // namespace rekindle::worker
