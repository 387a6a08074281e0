#include <csignal>
#include <optional>
#include <utility>

#include <boost/asio/as_tuple.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/signal_set.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>

#include "recovery/coordinator/coordinator.h"
#include "recovery/coordinator/core/core.h"
#include "recovery/coordinator/service.h"
#include "recovery/coordinator/state_directory.h"
#include "recovery/rpc/grants.h"
#include "recovery/rpc/rpc.h"
#include "recovery/rpc/task_group.h"
#include "src/base/log.h"

namespace rekindle::coordinator {

namespace asio = boost::asio;

namespace {

constexpr std::chrono::milliseconds kTick{100};
constexpr std::chrono::milliseconds kCloseDeadline{2000};

Result<Timing> make_timing(const CoordinatorOptions& options) {
  Timing timing;
  timing.heartbeat_interval = options.heartbeat_interval;
  timing.suspect_after = options.suspect_after;
  timing.dead_after = options.dead_after;
  if (timing.heartbeat_interval <= Duration::zero() ||
      timing.suspect_after < 2 * timing.heartbeat_interval ||
      timing.dead_after <= timing.suspect_after) {
    return fail(ErrorCode::kInvalid,
                "heartbeat {} ms, suspect after {} ms, dead after {} ms: suspicion needs at least "
                "two heartbeats and must come before death",
                options.heartbeat_interval.count(), options.suspect_after.count(),
                options.dead_after.count());
  }
  return timing;
}

rpc::Task<void> tick_forever(Core& core) {
  asio::steady_timer timer(co_await asio::this_coro::executor);
  for (;;) {
    timer.expires_after(kTick);
    co_await timer.async_wait(asio::use_awaitable);
    core.tick(std::chrono::steady_clock::now());
  }
}

// Waits for a signal, then ends everything in order.
rpc::Task<void> run_until_signal(asio::signal_set& signals, rpc::RpcServer& server,
                                 rpc::TaskGroup& tasks) {
  const auto [error, number] = co_await signals.async_wait(asio::as_tuple(asio::use_awaitable));
  if (!error) log::info("coordinator.stopping", "signal", number);
  co_await server.close(kCloseDeadline);
  co_await tasks.close(kCloseDeadline);
}

}  // namespace

Result<void> run_coordinator(const CoordinatorOptions& options) {
  TRY(const Timing timing, make_timing(options));
  TRY(const std::string secret, rpc::read_secret(options.secret_file.string()));
  TRY(const StateDirectory directory, StateDirectory::open(options.state_directory));
  TRY(DurableState durable, directory.load());

  Limits limits;
  limits.max_pullers_per_source = options.max_pullers_per_source;
  Core core(
      timing, limits, std::move(durable),
      [&](const DurableState& state) { return directory.save(state); },
      [] { return PullId::random(); });
  TRY_VOID(core.start(std::chrono::steady_clock::now()));

  asio::io_context io(1);
  asio::signal_set signals(io, SIGTERM, SIGINT);
  rpc::Identity identity;
  identity.role = proto::ROLE_COORDINATOR;
  identity.node_id = "coordinator";
  identity.incarnation = Incarnation::random();
  identity.secret = secret;
  identity.epoch = [&core] { return core.epoch(); };
  Service service(core, {identity.incarnation, secret}, timing);
  rpc::TaskGroup tasks(io.get_executor());
  const auto server = rpc::RpcServer::create(io.get_executor(), std::move(identity));
  service.attach(*server);
  TRY(const std::string address, server->listen(options.listen));
  tasks.spawn("coordinator.tick", tick_forever(core));
  log::info("coordinator.ready", "address", address, "epoch", core.epoch(), "versions",
            core.catalog().state().versions.size());
  if (options.on_ready) options.on_ready(address);

  std::exception_ptr failed;
  asio::co_spawn(io, run_until_signal(signals, *server, tasks),
                 [&](const std::exception_ptr& exception) {
                   failed = exception;
                   io.stop();
                 });
  io.run();
  if (failed) std::rethrow_exception(failed);
  return {};
}

}  // namespace rekindle::coordinator
