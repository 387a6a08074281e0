#include "recovery/agent/coordinator_link.h"

#include <algorithm>
#include <random>
#include <utility>

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>

#include "recovery/rpc/convert.h"
#include "recovery/rpc/methods.h"
#include "src/async/task.h"
#include "src/base/log.h"

namespace rekindle::agent {

using async::Task;
using std::chrono::milliseconds;

namespace {

constexpr milliseconds kConnectDeadline{2000};
constexpr milliseconds kFirstBackoff{100};
constexpr milliseconds kConnectDeadlineOfSeveral{700};  // a dead host answers no SYN
constexpr milliseconds kMaxBackoff{1000};
constexpr milliseconds kStableAfter{2000};  // a connection that lived this long resets the back-off
constexpr milliseconds kAnnounceDeadline{5000};
constexpr milliseconds kAnnounceAgain{1000};  // what the coordinator could not make durable

milliseconds jittered(milliseconds backoff) {
  static thread_local std::minstd_rand random(std::random_device{}());
  return backoff / 2 + milliseconds(random() % static_cast<unsigned>(backoff.count() / 2 + 1));
}

}  // namespace

CoordinatorLink::CoordinatorLink(boost::asio::any_io_executor executor,
                                 std::vector<std::string> addresses, const rpc::Identity& identity,
                                 std::string failure_domain, bool member, GrantClock& grant_clock,
                                 Callbacks callbacks)
    : executor_(std::move(executor)),
      addresses_(std::move(addresses)),
      identity_(identity),
      failure_domain_(std::move(failure_domain)),
      member_(member),
      grant_clock_(grant_clock),
      callbacks_(std::move(callbacks)),
      sleep_timer_(std::make_shared<boost::asio::steady_timer>(executor_)) {}

Task<void> CoordinatorLink::run() {
  milliseconds backoff = kFirstBackoff;
  // All that may lead are asked well within the grace of one that has just begun to.
  const milliseconds deadline =
      addresses_.size() > 1 ? kConnectDeadlineOfSeveral : kConnectDeadline;
  while (!stopping_) {
    auto connected = co_await rpc::RpcClient::connect(address(), identity_, deadline);
    const auto began = std::chrono::steady_clock::now();
    if (connected) {
      client_ = std::move(*connected);
      auto served = co_await serve_connection();
      if (!served) last_error_ = served.error();
      registered_ = false;
      client_->close();
      client_.reset();
    } else {
      last_error_ = connected.error();
    }
    if (stopping_) break;
    if (std::chrono::steady_clock::now() - began > kStableAfter) backoff = kFirstBackoff;
    if (backoff == kFirstBackoff) {
      log::warn("coordinator.lost", "address", address(), "cause", last_error_.message());
    }
    current_ = (current_ + 1) % addresses_.size();
    // All are asked before the next pause.
    if (!connected && current_ != 0) continue;
    co_await sleep(jittered(backoff));
    backoff = std::min(backoff * 2, kMaxBackoff);
  }
}

void CoordinatorLink::stop() {
  stopping_ = true;
  if (client_ != nullptr) client_->close();
  sleep_timer_->cancel();
}

std::shared_ptr<rpc::RpcClient> CoordinatorLink::client() const {
  return client_ != nullptr && client_->connected() ? client_ : nullptr;
}

Task<Result<std::shared_ptr<rpc::RpcClient>>> CoordinatorLink::wait_connected(
    milliseconds deadline) {
  const auto give_up = std::chrono::steady_clock::now() + deadline;
  while (client() == nullptr) {
    // A wrong name or secret does not get better by waiting.
    const ErrorCode code = last_error_.code();
    const bool hopeless =
        code == ErrorCode::kNotFound || code == ErrorCode::kDenied || code == ErrorCode::kInvalid;
    const bool cancelled = co_await async::is_cancelled();
    if (hopeless || cancelled || std::chrono::steady_clock::now() > give_up) {
      co_return fail(Error(last_error_).with_context("coordinator " + address()));
    }
    co_await async::sleep_for(milliseconds(20));
  }
  co_return client();
}

void CoordinatorLink::announce_soon() {
  announce_due_ = true;
  sleep_timer_->cancel();
}

Task<void> CoordinatorLink::announce_now() {
  if (!member_ || !registered_ || client() == nullptr) co_return;
  auto announced = co_await announce(true);
  if (!announced) announce_soon();
}

Task<void> CoordinatorLink::sleep(milliseconds duration) {
  sleep_timer_->expires_after(duration);
  boost::system::error_code woken;
  co_await sleep_timer_->async_wait(boost::asio::redirect_error(boost::asio::use_awaitable, woken));
}

Task<Result<void>> CoordinatorLink::serve_connection() {
  if (member_) CO_TRY_VOID(co_await register_and_announce());
  log::info("coordinator.connected", "address", address(), "epoch", epoch());
  while (!stopping_ && client_->connected()) {
    if (member_) {
      CO_TRY_VOID(co_await heartbeat());
      const bool again = announce_again_ && std::chrono::steady_clock::now() >= *announce_again_;
      if (announce_due_ || again) CO_TRY_VOID(co_await announce(true));
    }
    co_await sleep(heartbeat_interval_);
  }
  co_return fail(ErrorCode::kPeerLost, "coordinator {} closed the connection", address());
}

Task<Result<void>> CoordinatorLink::register_and_announce() {
  proto::RegisterRequest request;
  *request.mutable_node() = callbacks_.self();
  request.set_failure_domain(failure_domain_);
  request.set_highest_epoch(epoch());
  auto response = co_await rpc::call<proto::COORDINATOR_REGISTER>(client_, std::move(request),
                                                                  kConnectDeadline);
  if (!response) {
    if (!std::exchange(refused_, true)) {
      log::error("coordinator.refused", "address", address(), "error", response.error());
    }
    co_return fail(std::move(response).error());
  }
  refused_ = false;
  CO_TRY_VOID(check_epoch(response->epoch()));
  registered_ = true;
  heartbeat_interval_ =
      milliseconds(std::clamp<std::uint32_t>(response->heartbeat_interval_ms(), 10, 10000));
  ttl_ = milliseconds(std::clamp<std::uint32_t>(response->ttl_ms(), 100, 60000));
  co_return co_await announce(true);
}

Result<void> CoordinatorLink::check_epoch(std::uint64_t answered) {
  grant_clock_.epochs().confirm(answered, std::chrono::steady_clock::now());
  if (answered >= epoch()) return {};
  return fail(ErrorCode::kStale,
              "coordinator {} leads in epoch {}, but epoch {} was heard of: it has been replaced; "
              "stop it if it goes on",
              address(), answered, epoch());
}

Task<Result<void>> CoordinatorLink::announce(bool full) {
  announce_due_ = false;
  announce_again_.reset();
  proto::AnnounceRequest request;
  request.set_node_id(identity_.node_id);
  request.set_incarnation(identity_.incarnation.to_bytes());
  request.set_epoch(epoch());
  request.set_full(full);
  for (auto& holding : callbacks_.holdings()) *request.add_add() = std::move(holding);
  auto response = co_await rpc::call<proto::COORDINATOR_ANNOUNCE>(client_, std::move(request),
                                                                  kAnnounceDeadline);
  if (!response) {
    announce_due_ = true;
    co_return fail(std::move(response).error());
  }
  const auto& conflicts = response->conflicts();
  if (std::ranges::any_of(conflicts, [](const auto& conflict) { return conflict.again(); })) {
    announce_again_ = std::chrono::steady_clock::now() + kAnnounceAgain;
  }
  for (const auto& conflict : conflicts) {
    const auto id = rpc::from_proto(conflict.id());
    if (!conflict.again() && id && callbacks_.other_root)
      callbacks_.other_root(*id, conflict.why());
  }
  co_return Result<void>();
}

Task<Result<void>> CoordinatorLink::heartbeat() {
  proto::HeartbeatRequest request;
  request.set_node_id(identity_.node_id);
  request.set_incarnation(identity_.incarnation.to_bytes());
  request.set_epoch(epoch());
  request.set_progress(callbacks_.progress());
  callbacks_.fill(request);
  CO_TRY(const auto response,
         co_await rpc::call<proto::COORDINATOR_HEARTBEAT>(client_, std::move(request), ttl_));
  CO_TRY_VOID(check_epoch(response.epoch()));
  grant_clock_.observe(client_->peer().incarnation, response.coordinator_time_ms(),
                       std::chrono::steady_clock::now());
  callbacks_.obey(response);
  co_return Result<void>();
}

}  // namespace rekindle::agent
