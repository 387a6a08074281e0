#include "recovery/coordinator/leader_term.h"

#include <utility>

#include <boost/asio/this_coro.hpp>
#include <boost/asio/thread_pool.hpp>

#include "recovery/coordinator/committer.h"
#include "recovery/coordinator/coordinator_metrics.h"
#include "recovery/coordinator/coordinator_service.h"
#include "recovery/coordinator/core/core.h"
#include "recovery/coordinator/core/fleet_watch.h"
#include "recovery/coordinator/joint_service.h"
#include "recovery/coordinator/round_service.h"
#include "recovery/coordinator/state_records.h"
#include "recovery/rpc/drills.h"
#include "src/async/task_group.h"
#include "src/base/log.h"

namespace rekindle::coordinator {

namespace asio = boost::asio;

namespace {

constexpr std::chrono::milliseconds kTick{100};
constexpr std::chrono::milliseconds kCloseDeadline{2000};
// A wait without a deadline looks again after this long.
constexpr std::chrono::hours kUnset{24};

// All calls of the coordinator.
struct Services {
  void attach(rpc::RpcServer& server) {
    calls.attach(server);
    rounds.attach(server);
    joint.attach(server);
  }
  // Time has passed in the core.
  void wake_waiters() {
    rounds.wake_waiters();
    joint.wake_waiters();
  }

  CoordinatorService calls;
  RoundService rounds;
  JointService joint;
};

Limits limits_of(const CoordinatorOptions& options) {
  Limits limits;
  limits.max_pullers_per_source = options.max_pullers_per_source;
  limits.max_open_claims = options.max_open_claims;
  limits.replicas = options.replicas;
  limits.recopy_bytes_per_second = options.recopy_bytes_per_second;
  return limits;
}

// The options may change at any moment.
async::Task<void> tick_forever(const CoordinatorOptions& options, Core& core, FleetWatch& watch,
                               Committer& committer, Services& services) {
  for (;;) {
    co_await async::sleep_for(kTick);
    core.set_limits(limits_of(options));
    const TimePoint now = steady_now();
    core.tick(now);
    watch.look(core, now, std::chrono::system_clock::now());
    committer.wake();
    services.wake_waiters();
  }
}

// Counts the calls of a term, and lets its fleet be read, until it goes.
class CountedTerm {
 public:
  CountedTerm(TermMetrics* metrics, const Core& core, rpc::RpcServer& server) : metrics_(metrics) {
    if (metrics_ == nullptr) return;
    metrics_->terms.Increment();
    metrics_->leading = true;
    readings_ = metrics_->metrics.add(
        [&core](metrics::Readings& readings) { read_fleet(core, steady_now(), readings); });
    server.on_call_ended([metrics](proto::Method method, bool failed, Duration took) {
      metrics->calls.count(method, failed, took);
    });
  }
  ~CountedTerm() {
    if (metrics_ != nullptr) metrics_->leading = false;
  }
  CountedTerm(const CountedTerm&) = delete;
  CountedTerm& operator=(const CountedTerm&) = delete;

 private:
  TermMetrics* const metrics_;
  std::shared_ptr<const metrics::Metrics::Read> readings_;
};

// Shows the term on the status page until it goes.
class ShownTerm {
 public:
  ShownTerm(StatusPage& page, const StatusPage::Term& term) : page_(page) {
    page_.begin_term(term);
  }
  ~ShownTerm() { page_.end_term(); }
  ShownTerm(const ShownTerm&) = delete;
  ShownTerm& operator=(const ShownTerm&) = delete;

 private:
  StatusPage& page_;
};

// Serves calls; the epoch is durable.
async::Task<Result<void>> serve_until(const TermOptions& options, Core& core, FleetWatch& watch,
                                      Committer& committer, Services& services,
                                      rpc::RpcServer& server, async::TaskGroup& tasks, Stop& stop) {
  CO_TRY(const std::string address, server.listen(options.options.listen));
  tasks.spawn("coordinator.tick", tick_forever(options.options, core, watch, committer, services));
  log::info("coordinator.ready", "address", address, "epoch", core.fleet().epoch(), "versions",
            core.fleet().catalog.all().size());
  if (options.options.on_ready) {
    options.options.on_ready({address, options.metrics != nullptr ? options.metrics->address : "",
                              options.page.address()});
  }
  co_await stop.wait();
  log::info("coordinator.stopping", "why", stop.why());
  co_return Result<void>();
}

}  // namespace

void Stop::set(std::string why) {
  if (is_set()) return;
  why_ = std::move(why);
  changed_.notify();
}

async::Task<void> Stop::wait() {
  while (!is_set()) co_await wait_until(steady_now() + kUnset);
}

async::Task<void> Stop::wait_until(TimePoint deadline) {
  while (!is_set() && steady_now() < deadline) co_await changed_.wait_until(deadline);
}

async::Task<Result<void>> lead_term(const TermOptions& options, DurableStore& store, Stop& stop) {
  // The store blocks here. Joined when all else has ended.
  asio::thread_pool thread(1);
  CO_TRY(Records stored, co_await run_blocking<Records>(thread, [&store] { return store.load(); }));
  auto parsed = StateRecords::parse(std::move(stored));
  if (!parsed) co_return fail(std::move(parsed).error().with_context(store.place()));
  StateRecords records = std::move(*parsed);
  const auto new_pull = [] { return PullId::random(); };
  Core core(options.timing, limits_of(options.options), records.state(), new_pull);
  core.trust(options.options.trust);

  const auto executor = co_await asio::this_coro::executor;
  const auto lost = [&stop](const Error& error) { stop.set(error.message()); };
  Committer committer(executor, thread, core, std::move(records), store, lost);
  async::TaskGroup tasks(executor);
  tasks.spawn("coordinator.commit", committer.run());
  auto begun = co_await committer.wait(core.start(std::chrono::steady_clock::now()));

  rpc::Identity identity =
      rpc::make_identity(proto::ROLE_COORDINATOR, "coordinator", options.credentials);
  identity.epoch = [&core] { return core.fleet().epoch(); };
  FleetWatch watch(identity.incarnation);
  GrantSigner signer(identity, options.timing.grant_ttl);
  Services services{{core,
                     watch,
                     committer,
                     {signer, options.timing, options.may_answer, options.tracer, &options.access}},
                    {executor, core, options.may_answer, options.tracer, &options.access},
                    {executor, core, options.may_answer, options.tracer}};
  const auto server = rpc::RpcServer::create(executor, std::move(identity));
  if (options.tracer != nullptr) server->trace_calls(*options.tracer);
  server->guard_calls(options.access);
  core.set_may_claim([&options](const Member& member, const ModelVersion& id) {
    return options.access.may_announce(member.info.principals, id.model);
  });
  core.set_may_hold([&options](const Member& member, const std::string& model) {
    return options.access.may_hold(member.info.principals, model);
  });
  const auto following_rights = options.access.on_change([&core] { core.rights_changed(); });
  services.attach(*server);
  rpc::serve_drills(*server, executor, {options.options.allow_drills});
  const CountedTerm counted(begun ? options.metrics : nullptr, core, *server);
  if (begun) {
    // What comes from now on is an event.
    watch.look(core, steady_now(), std::chrono::system_clock::now());
    const ShownTerm shown(options.page, {core, watch, options.may_answer});
    begun = co_await serve_until(options, core, watch, committer, services, *server, tasks, stop);
  }
  co_await server->close(kCloseDeadline);
  // A batch that is being written uses the objects of this frame, however long the store takes.
  while (!co_await tasks.close(kCloseDeadline)) {
    log::warn("coordinator.store_slow", "tasks", tasks.size());
  }
  if (begun && committer.broken()) begun = fail(Error(*committer.broken()));
  co_return begun;
}

}  // namespace rekindle::coordinator
