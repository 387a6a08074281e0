#include "recovery/agent/coordinator_link.h"

#include <algorithm>
#include <random>
#include <utility>

#include <boost/asio/this_coro.hpp>

#include "recovery/rpc/address.h"
#include "recovery/rpc/convert.h"
#include "recovery/rpc/methods.h"
#include "src/base/log.h"

namespace rekindle::agent {

using async::Task;

namespace {

constexpr std::chrono::milliseconds kRegisterDeadline{2000};
constexpr std::chrono::milliseconds kAnnounceDeadline{5000};

// A text that is not an address is reported by the attempt to connect to it.
std::vector<std::string> addresses_in(const std::string& text) {
  return rpc::parse_addresses(text).value_or(std::vector<std::string>{text});
}

}  // namespace

CoordinatorLink::CoordinatorLink(boost::asio::any_io_executor executor,
                                 const rpc::Identity& identity, GrantClock& grant_clock,
                                 const std::string& coordinator)
    : identity_(identity),
      grant_clock_(grant_clock),
      configured_(!coordinator.empty()),
      registration_(addresses_in(coordinator), identity.role == proto::ROLE_AGENT,
                    std::random_device{}()),
      wake_(executor),
      changed_(executor),
      tasks_(executor) {}

void CoordinatorLink::start(std::string failure_domain, Callbacks callbacks) {
  if (!configured_) return;
  failure_domain_ = std::move(failure_domain);
  callbacks_ = std::move(callbacks);
  tasks_.spawn("coordinator.link", run());
}

Task<void> CoordinatorLink::close(std::chrono::milliseconds deadline) {
  registration_.stop();
  if (client_ != nullptr) client_->close();
  wake_.notify();
  (void)co_await tasks_.close(deadline);
}

Task<void> CoordinatorLink::run() {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  while (true) {
    if (client_ != nullptr && !client_->connected()) {
      drop_connection(
          {ErrorCode::kPeerLost, fmt::format("coordinator {} closed the connection", address())});
    }
    const auto next = registration_.next(steady_now());
    if (next.step == CoordinatorRegistration::Step::kStop) break;
    if (next.step == CoordinatorRegistration::Step::kWait) {
      co_await wake_.wait_until(next.until);
      if (co_await async::is_cancelled()) break;
      continue;
    }
    auto performed = co_await perform(next.step);
    if (!performed) drop_connection(std::move(performed).error());
  }
  if (client_ != nullptr) client_->close();
  client_.reset();
}

Task<Result<void>> CoordinatorLink::perform(CoordinatorRegistration::Step step) {
  using Step = CoordinatorRegistration::Step;
  switch (step) {
    case Step::kConnect:
      return connect();
    case Step::kRegister:
      return register_node();
    case Step::kAnnounce:
      return announce();
    case Step::kHeartbeat:
    case Step::kWait:
    case Step::kStop:
      break;
  }
  return heartbeat();
}

void CoordinatorLink::drop_connection(Error why) {
  if (client_ != nullptr) client_->close();
  client_.reset();
  const std::string lost = address();
  if (registration_.lost(std::move(why), steady_now())) {
    log::warn("coordinator.lost", "address", lost, "cause", last_error().message());
  }
  changed_.notify();
}

std::shared_ptr<rpc::RpcClient> CoordinatorLink::client() const {
  return client_ != nullptr && client_->connected() ? client_ : nullptr;
}

Error CoordinatorLink::problem() const {
  if (!configured_) return {ErrorCode::kUnavailable, "no coordinator"};
  return Error(last_error()).with_context("coordinator " + address());
}

Task<Result<std::shared_ptr<rpc::RpcClient>>> CoordinatorLink::wait_connected(
    std::chrono::milliseconds deadline) {
  const TimePoint give_up = steady_now() + deadline;
  while (client() == nullptr) {
    const bool cancelled = co_await async::is_cancelled();
    if (registration_.hopeless() || cancelled || steady_now() >= give_up) {
      co_return fail(problem());
    }
    co_await changed_.wait_until(give_up);
  }
  co_return client();
}

void CoordinatorLink::announce_soon() {
  if (!configured_) return;
  registration_.copies_changed();
  wake_.notify();
}

Task<void> CoordinatorLink::announce_now() {
  if (!registration_.is_registered() || client() == nullptr) co_return;
  const auto announced = co_await announce();
  if (!announced) announce_soon();
}

Task<Result<void>> CoordinatorLink::connect() {
  CO_TRY(client_,
         co_await rpc::RpcClient::connect(address(), identity_, registration_.connect_deadline(),
                                          {}, proto::ROLE_COORDINATOR));
  registration_.connected(steady_now());
  changed_.notify();
  if (!is_member()) {
    log::info("coordinator.connected", "address", address(), "epoch", epoch());
  }
  co_return Result<void>();
}

Task<Result<void>> CoordinatorLink::register_node() {
  proto::RegisterRequest request;
  *request.mutable_node() = callbacks_.self();
  request.set_failure_domain(failure_domain_);
  request.set_highest_epoch(epoch());
  auto response = co_await rpc::call<proto::COORDINATOR_REGISTER>(client_, std::move(request),
                                                                  kRegisterDeadline);
  if (!response) {
    if (!std::exchange(refusal_logged_, true)) {
      log::error("coordinator.refused", "address", address(), "error", response.error());
    }
    co_return fail(std::move(response).error());
  }
  refusal_logged_ = false;
  CO_TRY_VOID(check_epoch(response->epoch()));
  callbacks_.registered(client_->peer().incarnation);
  registration_.registered(response->heartbeat_interval_ms(), response->ttl_ms(), steady_now());
  CO_TRY_VOID(co_await announce());
  log::info("coordinator.connected", "address", address(), "epoch", epoch());
  co_return Result<void>();
}

Result<void> CoordinatorLink::check_epoch(std::uint64_t answered) {
  grant_clock_.epochs().confirm(answered, steady_now());
  if (answered >= epoch()) return {};
  return fail(ErrorCode::kStale,
              "coordinator {} leads in epoch {}, but epoch {} was heard of: it has been replaced; "
              "stop it if it goes on",
              address(), answered, epoch());
}

Task<Result<void>> CoordinatorLink::announce() {
  registration_.begin_announcement();
  proto::AnnounceRequest request;
  request.set_node_id(identity_.node_id);
  request.set_incarnation(identity_.incarnation.to_bytes());
  request.set_epoch(epoch());
  request.set_full(true);
  for (auto& holding : callbacks_.holdings()) *request.add_add() = std::move(holding);
  auto response = co_await rpc::call<proto::COORDINATOR_ANNOUNCE>(client_, std::move(request),
                                                                  kAnnounceDeadline);
  if (!response) {
    registration_.copies_changed();
    co_return fail(std::move(response).error());
  }
  const auto& conflicts = response->conflicts();
  const bool again =
      std::ranges::any_of(conflicts, [](const auto& conflict) { return conflict.again(); });
  registration_.announced(again, steady_now());
  for (const auto& conflict : conflicts) {
    const auto id = rpc::from_proto(conflict.id());
    if (!conflict.again() && id) callbacks_.other_root(*id, conflict.why());
  }
  co_return Result<void>();
}

Task<Result<void>> CoordinatorLink::heartbeat() {
  proto::HeartbeatRequest request;
  request.set_node_id(identity_.node_id);
  request.set_incarnation(identity_.incarnation.to_bytes());
  request.set_epoch(epoch());
  callbacks_.fill(request);
  CO_TRY(const auto response, co_await rpc::call<proto::COORDINATOR_HEARTBEAT>(
                                  client_, std::move(request), registration_.ttl()));
  CO_TRY_VOID(check_epoch(response.epoch()));
  const rpc::Peer& coordinator = client_->peer();
  grant_clock_.observe(coordinator.incarnation, coordinator.public_key,
                       response.coordinator_time_ms(), steady_now());
  grant_clock_.hear_coordinator(steady_now());
  has_rights_ = response.has_rights();
  registration_.heartbeat_answered(steady_now());
  callbacks_.obey(response);
  co_return Result<void>();
}

}  // namespace rekindle::agent
