#include "recovery/coordinator/leader_term.h"

#include <utility>

#include <boost/asio/redirect_error.hpp>
#include <boost/asio/this_coro.hpp>
#include <boost/asio/use_awaitable.hpp>

#include "recovery/coordinator/committer.h"
#include "recovery/coordinator/core/core.h"
#include "recovery/coordinator/service.h"
#include "recovery/coordinator/state_records.h"
#include "recovery/rpc/grants.h"
#include "src/async/task_group.h"
#include "src/base/log.h"

namespace rekindle::coordinator {

namespace asio = boost::asio;

namespace {

constexpr std::chrono::milliseconds kTick{100};
constexpr std::chrono::milliseconds kCloseDeadline{2000};
constexpr std::chrono::hours kUnset{24};  // looked at again then

async::Task<void> tick_forever(Core& core, Committer& committer, Service& service) {
  asio::steady_timer timer(co_await asio::this_coro::executor);
  for (;;) {
    timer.expires_after(kTick);
    co_await timer.async_wait(asio::use_awaitable);
    core.tick(std::chrono::steady_clock::now());
    committer.wake();
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

// From the moment at which the epoch is durable.
async::Task<Result<void>> lead_until(const TermOptions& options, Core& core, Committer& committer,
                                     Service& service, rpc::RpcServer& server,
                                     async::TaskGroup& tasks, Stop& stop) {
  CO_TRY(const std::string address, server.listen(options.options.listen));
  tasks.spawn("coordinator.tick", tick_forever(core, committer, service));
  log::info("coordinator.ready", "address", address, "epoch", core.epoch(), "versions",
            core.catalog().state().versions.size());
  if (options.options.on_ready) options.options.on_ready(address);
  co_await stop.wait();
  log::info("coordinator.stopping", "why", stop.why());
  co_return Result<void>();
}

}  // namespace

Stop::Stop(asio::any_io_executor executor) : timer_(std::move(executor), kUnset) {}

void Stop::set(std::string why) {
  if (std::exchange(set_, true)) return;
  why_ = std::move(why);
  timer_.cancel();
}

async::Task<void> Stop::wait() {
  while (!set_) {
    boost::system::error_code woken;
    co_await timer_.async_wait(asio::redirect_error(asio::use_awaitable, woken));
    if (!set_) timer_.expires_after(kUnset);
  }
}

async::Task<Result<void>> lead_term(const TermOptions& options, DurableStore& store, Stop& stop) {
  asio::thread_pool thread(1);  // of the store; joined when all else has ended
  CO_TRY(Records stored, co_await run_blocking<Records>(thread, [&store] { return store.load(); }));
  CO_TRY(StateRecords records, StateRecords::parse(std::move(stored)));
  const auto new_pull = [] { return PullId::random(); };
  Core core(options.timing, limits_of(options.options), records.state(), new_pull);

  const auto executor = co_await asio::this_coro::executor;
  const auto lost = [&stop](const Error& error) { stop.set(error.message()); };
  Committer committer(executor, thread, core, std::move(records), store, lost);
  async::TaskGroup tasks(executor);
  tasks.spawn("coordinator.commit", committer.run());
  auto begun = co_await committer.wait(core.start(std::chrono::steady_clock::now()));

  rpc::Identity identity;
  identity.role = proto::ROLE_COORDINATOR;
  identity.node_id = "coordinator";
  identity.incarnation = Incarnation::random();
  identity.secret = options.secret;
  identity.epoch = [&core] { return core.epoch(); };
  Service service(executor, core, committer,
                  {{identity.incarnation, options.secret}, options.timing, options.may_answer});
  const auto server = rpc::RpcServer::create(executor, std::move(identity));
  service.attach(*server);
  if (begun) begun = co_await lead_until(options, core, committer, service, *server, tasks, stop);
  co_await server->close(kCloseDeadline);
  // A batch that is being written needs what is here until its write has ended, however long the
  // store takes.
  while (!co_await tasks.close(kCloseDeadline)) {
    log::warn("coordinator.store_slow", "tasks", tasks.size());
  }
  if (begun && committer.broken()) begun = fail(Error(*committer.broken()));
  co_return begun;
}

}  // namespace rekindle::coordinator
