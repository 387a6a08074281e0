#include "recovery/coordinator/coordinator.h"

#include <csignal>
#include <utility>

#include <boost/asio/as_tuple.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/signal_set.hpp>
#include <boost/asio/use_awaitable.hpp>

#include "recovery/coordinator/etcd/election.h"
#include "recovery/coordinator/leader_term.h"
#include "recovery/coordinator/state_directory.h"
#include "recovery/rpc/grants.h"
#include "src/base/log.h"

namespace rekindle::coordinator {

namespace asio = boost::asio;

namespace {

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

async::Task<void> stop_at_signal(asio::signal_set& signals, Stop& told) {
  const auto [error, number] = co_await signals.async_wait(asio::as_tuple(asio::use_awaitable));
  if (!error) told.set(fmt::format("signal {}", number));
}

async::Task<Result<void>> lead(const TermOptions& options, Stop& told) {
  if (!options.options.etcd.urls.empty()) co_return co_await stand_and_lead(options, told);
  CO_TRY(StateDirectory directory, StateDirectory::open(options.options.state_directory));
  co_return co_await lead_term(options, directory, told);
}

}  // namespace

Result<void> run_coordinator(const CoordinatorOptions& options) {
  TRY(const Timing timing, make_timing(options));
  TRY(const std::string secret, rpc::read_secret(options.secret_file.string()));
  const TermOptions term{options, timing, secret};

  asio::io_context io(1);
  asio::signal_set signals(io, SIGTERM, SIGINT);
  Stop told(io.get_executor());
  asio::co_spawn(io, stop_at_signal(signals, told), asio::detached);
  Result<void> outcome;
  std::exception_ptr failed;
  asio::co_spawn(io, lead(term, told),
                 [&](const std::exception_ptr& exception, Result<void> result) {
                   failed = exception;
                   outcome = std::move(result);
                   io.stop();
                 });
  io.run();
  if (failed) std::rethrow_exception(failed);
  return outcome;
}

}  // namespace rekindle::coordinator
