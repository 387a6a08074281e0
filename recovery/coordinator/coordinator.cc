#include "recovery/coordinator/coordinator.h"

#include <csignal>
#include <memory>
#include <optional>
#include <utility>

#include <boost/asio/as_tuple.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/signal_set.hpp>
#include <boost/asio/thread_pool.hpp>
#include <boost/asio/use_awaitable.hpp>

#include "recovery/coordinator/access_control.h"
#include "recovery/coordinator/committer.h"
#include "recovery/coordinator/etcd/election.h"
#include "recovery/coordinator/leader_term.h"
#include "recovery/coordinator/state_directory.h"
#include "recovery/rpc/grants.h"
#include "recovery/rpc/otlp_exporter.h"
#include "src/base/log.h"

namespace rekindle::coordinator {

namespace asio = boost::asio;

namespace {

constexpr std::chrono::milliseconds kCloseDeadline{2000};

Result<Timing> make_timing(const CoordinatorOptions& options) {
  Timing timing;
  timing.heartbeat_interval = options.heartbeat_interval;
  timing.suspect_after = options.suspect_after;
  timing.dead_after = options.dead_after;
  timing.grant_ttl = rpc::grant_times().life;
  if (timing.heartbeat_interval <= Duration::zero() ||
      timing.suspect_after < 2 * timing.heartbeat_interval ||
      timing.dead_after <= timing.suspect_after) {
    return fail(ErrorCode::kInvalid,
                "--heartbeat {} ms, --suspect-after {} ms, --dead-after {} ms: suspicion needs at "
                "least two heartbeats and must come before death",
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

// Where Prometheus scrapes this process, whether it leads or stands by.
class Scraped {
 public:
  explicit Scraped(const rpc::Tracing& tracing) : tracing_(tracing) {}

  // "": nowhere.
  Result<void> listen(const asio::any_io_executor& executor, const std::string& address,
                      const rpc::HttpProtection& protection) {
    if (address.empty()) return {};
    counted_.emplace(metrics_);
    readings_ = metrics_.add([this](metrics::Readings& readings) {
      readings.gauge("rekindle_coordinator_leading",
                     "1 while this coordinator leads, 0 while it stands by.",
                     counted_->leading ? 1 : 0);
      tracing_.read(readings);
    });
    TRY(server_, rpc::serve_metrics(executor, address, protection, metrics_));
    counted_->address = server_->address();
    return {};
  }
  async::Task<void> close() {
    if (server_ != nullptr) co_await server_->close(kCloseDeadline);
  }
  // nullptr: nobody asks for metrics.
  TermMetrics* counted() { return counted_ ? &*counted_ : nullptr; }

 private:
  const rpc::Tracing& tracing_;
  metrics::Metrics metrics_;
  std::optional<TermMetrics> counted_;
  std::shared_ptr<const metrics::Metrics::Read> readings_;
  std::unique_ptr<rpc::HttpServer> server_;
};

// The thread of the audit log resumes calls of the context, so it ends before the context.
struct AuditEnd {
  AccessControl& access;
  ~AuditEnd() { access.set_audit(nullptr); }
};

async::Task<Result<void>> lead_shown(const TermOptions& options, Stop& told, Scraped& scraped) {
  auto leading = lead(options, told);
  auto outcome = co_await std::move(leading);
  co_await scraped.close();
  co_await options.page.close(kCloseDeadline);
  co_return outcome;
}

// Another file, or none, would take effect although the log tells that this needs a restart.
Result<CoordinatorOptions> reread_with_rights_of(
    const std::string& file, const std::function<Result<CoordinatorOptions>()>& reread) {
  TRY(CoordinatorOptions read, reread());
  if (read.rights_file == file) return read;
  read.rights = nullptr;
  if (!file.empty()) {
    TRY(auto rights, rpc::Rights::read(file));
    read.rights = std::make_shared<const rpc::Rights>(std::move(rights));
  }
  return read;
}

// Reads the options again at each SIGHUP. A term looks at `current` at each tick.
async::Task<void> reload_at_signal(asio::signal_set& signals, asio::thread_pool& thread,
                                   CoordinatorOptions& current,
                                   std::shared_ptr<rpc::Credentials> credentials,
                                   AccessControl& access) {
  for (;;) {
    const auto [error, number] = co_await signals.async_wait(asio::as_tuple(asio::use_awaitable));
    if (error) co_return;
    auto reading = run_blocking<CoordinatorOptions>(
        thread, [file = current.rights_file, reread = current.reread] {
          return reread_with_rights_of(file, reread);
        });
    auto read = co_await std::move(reading);
    if (read && credentials != nullptr) {
      if (auto taken = credentials->reload(read->credentials); !taken) read = fail(taken.error());
    }
    access.reloaded(read ? Result<void>() : fail(read.error()));
    if (!read) {
      log::error("config.refused", "why", read.error(), "effect", "the settings stay as they are");
      continue;
    }
    current.max_pullers_per_source = read->max_pullers_per_source;
    current.max_open_claims = read->max_open_claims;
    current.replicas = read->replicas;
    current.recopy_bytes_per_second = read->recopy_bytes_per_second;
    access.set_rights(read->rights);
    log::info("config.reloaded");
  }
}

}  // namespace

Result<void> check_timing(const CoordinatorOptions& options) {
  TRY_VOID(make_timing(options));
  return {};
}

Result<void> run_coordinator(const CoordinatorOptions& options) {
  TRY(const Timing timing, make_timing(options));
  TRY(const auto credentials, rpc::Credentials::open(options.credentials));
  TRY_VOID(rpc::check_exposure("the coordinator", options.listen, credentials,
                               options.credentials.insecure));
  // Outlives the calls that the context may still have.
  TRY(const auto tracing, rpc::Tracing::create("coordinator", "coordinator", options.otlp));
  AccessControl access;
  access.set_rights(options.rights);
  if (!options.audit.empty()) {
    TRY(auto audit, rpc::AuditLog::open(options.audit));
    access.set_audit(std::move(audit));
    access.note({.act = "coordinator_started"});
  }
  asio::io_context io(1);
  const AuditEnd audit_end{access};
  Scraped scraped(*tracing);
  TRY(auto tokens, rpc::HttpTokens::open(options.http_token_file));
  const rpc::HttpProtection protection{credentials, std::move(tokens),
                                       options.http_open || options.credentials.insecure};
  TRY_VOID(scraped.listen(io.get_executor(), options.metrics, protection));
  CoordinatorOptions current = options;
  StatusPage page;
  if (!options.http.empty()) {
    TRY(auto reading, rpc::http_access("--http", options.http, protection));
    // The page shows all models.
    reading.allow = [&access](std::span<const std::string> principals) -> Result<void> {
      TRY_VOID(access.allow(principals, rpc::Verb::kRead, ""));
      return {};
    };
    TRY_VOID(page.listen(io.get_executor(), options.http, std::move(reading)));
  }
  const TermOptions term{current,           timing, credentials,      {},
                         scraped.counted(), page,   &tracing->tracer, access};

  asio::signal_set signals(io, SIGTERM, SIGINT);
  Stop told(io.get_executor());
  asio::co_spawn(io, stop_at_signal(signals, told), asio::detached);
  asio::signal_set hangups(io);
  asio::thread_pool rereading(1);
  if (options.reread) {
    hangups.add(SIGHUP);
    asio::co_spawn(io, reload_at_signal(hangups, rereading, current, credentials, access),
                   asio::detached);
  }
  Result<void> outcome;
  std::exception_ptr failed;
  asio::co_spawn(io, lead_shown(term, told, scraped),
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
