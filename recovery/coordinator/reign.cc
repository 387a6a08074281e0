#include "recovery/coordinator/reign.h"

#include <utility>

#include <boost/asio/redirect_error.hpp>
#include <boost/asio/this_coro.hpp>
#include <boost/asio/use_awaitable.hpp>

#include "recovery/coordinator/core/core.h"
#include "recovery/coordinator/service.h"
#include "recovery/rpc/grants.h"
#include "recovery/rpc/task_group.h"
#include "src/base/log.h"

namespace rekindle::coordinator {

namespace asio = boost::asio;

namespace {

constexpr std::chrono::milliseconds kTick{100};
constexpr std::chrono::milliseconds kCloseDeadline{2000};
constexpr std::chrono::hours kUnset{24};  // looked at again then

rpc::Task<void> tick_forever(Core& core, Service& service) {
  asio::steady_timer timer(co_await asio::this_coro::executor);
  for (;;) {
    timer.expires_after(kTick);
    co_await timer.async_wait(asio::use_awaitable);
    core.tick(std::chrono::steady_clock::now());
    service.wake_waiters();
  }
}

Limits limits_of(const CoordinatorOptions& options) {
  Limits limits;
  limits.max_pullers_per_source = options.max_pullers_per_source;
  limits.replicas = options.replicas;
  limits.recopy_bytes_per_second = options.recopy_bytes_per_second;
  return limits;
}

}  // namespace

Stop::Stop(asio::any_io_executor executor) : timer_(std::move(executor), kUnset) {}

void Stop::set(std::string why) {
  if (std::exchange(set_, true)) return;
  why_ = std::move(why);
  timer_.cancel();
}

rpc::Task<void> Stop::wait() {
  while (!set_) {
    boost::system::error_code woken;
    co_await timer_.async_wait(asio::redirect_error(asio::use_awaitable, woken));
    if (!set_) timer_.expires_after(kUnset);
  }
}

rpc::Task<Result<void>> reign_until(const ReignOptions& options, DurableStore& store, Stop& stop) {
  CO_TRY(DurableState durable, store.load());
  const auto persist = [&](const DurableState& state) -> Result<void> {
    auto saved = store.save(state);
    if (!saved && saved.error().code() == ErrorCode::kStale) stop.set(saved.error().message());
    return saved;
  };
  const auto new_pull = [] { return PullId::random(); };
  Core core(options.timing, limits_of(options.options), std::move(durable), persist, new_pull);
  CO_TRY_VOID(core.start(std::chrono::steady_clock::now()));

  const auto executor = co_await asio::this_coro::executor;
  rpc::Identity identity;
  identity.role = proto::ROLE_COORDINATOR;
  identity.node_id = "coordinator";
  identity.incarnation = Incarnation::random();
  identity.secret = options.secret;
  identity.epoch = [&core] { return core.epoch(); };
  Service service(executor, core, {identity.incarnation, options.secret}, options.timing);
  rpc::TaskGroup tasks(executor);
  const auto server = rpc::RpcServer::create(executor, std::move(identity));
  service.attach(*server);
  CO_TRY(const std::string address, server->listen(options.options.listen));
  tasks.spawn("coordinator.tick", tick_forever(core, service));
  log::info("coordinator.ready", "address", address, "epoch", core.epoch(), "versions",
            core.catalog().state().versions.size());
  if (options.options.on_ready) options.options.on_ready(address);

  co_await stop.wait();
  log::info("coordinator.stopping", "why", stop.why());
  co_await server->close(kCloseDeadline);
  co_await tasks.close(kCloseDeadline);
  co_return Result<void>();
}

}  // namespace rekindle::coordinator
