#include "recovery/coordinator/etcd/candidate.h"

#include <algorithm>
#include <array>
#include <ctime>
#include <functional>
#include <optional>
#include <utility>

#include <unistd.h>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/this_coro.hpp>
#include <boost/asio/thread_pool.hpp>
#include <boost/asio/use_awaitable.hpp>

#include "recovery/coordinator/committer.h"
#include "recovery/coordinator/etcd/etcd_state.h"
#include "src/async/task_group.h"
#include "src/base/log.h"

namespace rekindle::coordinator {

namespace asio = boost::asio;
using std::chrono::milliseconds;

namespace {

constexpr milliseconds kAsk{1000};  // of etcd
constexpr milliseconds kBetweenTries{300};
constexpr milliseconds kAfterFailure{1000};  // in which another one may lead
constexpr milliseconds kStep{50};
constexpr milliseconds kCloseDeadline{2000};

std::string own_name(const CoordinatorOptions& options) {
  std::array<char, 65> host{};
  (void)::gethostname(host.data(), host.size() - 1);
  return fmt::format("the coordinator of pid {} on {} ({}, {})", ::getpid(), host.data(),
                     options.listen, Incarnation::random().hex());
}

async::Task<void> pause(milliseconds duration) {
  asio::steady_timer timer(co_await asio::this_coro::executor, duration);
  boost::system::error_code cancelled;
  co_await timer.async_wait(asio::redirect_error(asio::use_awaitable, cancelled));
}

async::Task<void> pause_unless(const Stop& told, milliseconds duration) {
  for (milliseconds passed{}; passed < duration && !told.is_set(); passed += kStep) {
    co_await pause(kStep);
  }
}

// Calls of etcd block, so they have a thread of their own; answers come back to the caller's.
class Etcd {
 public:
  Etcd(const CoordinatorOptions& options, std::vector<rpc::HostPort> endpoints)
      : election_(options.etcd, std::move(endpoints), own_name(options)) {}
  ~Etcd() { thread_.join(); }

  async::Task<Result<etcd::Term>> campaign() {
    return on_thread<etcd::Term>([this] { return election_.campaign(kAsk); });
  }
  async::Task<Result<bool>> keep(etcd::Term term, milliseconds deadline) {
    return on_thread<bool>([this, term, deadline] { return election_.keep(term, deadline); });
  }
  async::Task<Result<bool>> resign(etcd::Term term) {
    return on_thread<bool>([this, term]() -> Result<bool> {
      election_.resign(term, kAsk);
      return true;
    });
  }

 private:
  template <class T>
  async::Task<Result<T>> on_thread(std::function<Result<T>()> call) {
    return run_blocking<T>(thread_, std::move(call));
  }

  etcd::Election election_;  // on thread_ only
  asio::thread_pool thread_{1};
};

// Until when the lease in etcd is known to last. It is counted from before the request that kept it
// was sent, on a clock that goes on while this host is suspended: when the lease is held by this
// clock, it is held in etcd, and nobody else leads.
class Lease {
 public:
  explicit Lease(std::chrono::seconds ttl) : ttl_(ttl) {}

  static milliseconds now() {
    timespec at{};
    (void)::clock_gettime(CLOCK_BOOTTIME, &at);
    return std::chrono::duration_cast<milliseconds>(std::chrono::seconds(at.tv_sec) +
                                                    std::chrono::nanoseconds(at.tv_nsec));
  }
  void kept(milliseconds asked_at) { until_ = std::max(until_, asked_at + ttl_); }
  milliseconds left() const { return until_ - now(); }
  Result<void> check() const {
    if (left() > milliseconds::zero()) return {};
    return fail(ErrorCode::kUnavailable,
                "this coordinator has not reached etcd for {} s and cannot know that it still "
                "leads; retry, or ask the others",
                ttl_.count());
  }

 private:
  const std::chrono::seconds ttl_;
  milliseconds until_{};
};

// Stops the term when its lease is over, or may be: etcd has not confirmed it for as long as it
// lasts.
async::Task<void> keep_lease(Etcd& etcd, etcd::Term term, std::chrono::seconds ttl, Lease& lease,
                             Stop& over) {
  bool away = false;
  while (!over.is_set()) {
    const milliseconds interval = away ? kBetweenTries : milliseconds(ttl) / 3;
    co_await pause(std::clamp(lease.left(), milliseconds::zero(), interval));
    const milliseconds asked_at = Lease::now();
    if (lease.left() <= milliseconds::zero()) {
      over.set(lease.check().error().message());
      break;
    }
    const auto kept = co_await etcd.keep(term, std::clamp(lease.left(), kStep, kAsk));
    if (!kept && !std::exchange(away, true)) {
      log::warn("coordinator.etcd_away", "error", kept.error());
    }
    if (kept && std::exchange(away, false)) log::info("coordinator.etcd_back");
    if (kept && *kept) lease.kept(asked_at);
    if (kept && !*kept) over.set("the lease in etcd has run out");
  }
}

// Sets the second when the first is.
async::Task<void> pass_on(Stop& told, Stop& over) {
  co_await told.wait();
  over.set(told.why());
}

async::Task<std::optional<etcd::Term>> win(Etcd& etcd, Stop& told) {
  std::string said;
  while (!told.is_set()) {
    const auto won = co_await etcd.campaign();
    if (won) co_return *won;
    if (std::exchange(said, won.error().message()) != won.error().message()) {
      log::info("coordinator.standing_by", "why", won.error().message());
    }
    co_await pause(kBetweenTries);
  }
  co_return std::nullopt;
}

}  // namespace

async::Task<Result<void>> stand_and_lead(const TermOptions& options, Stop& told) {
  const auto executor = co_await asio::this_coro::executor;
  const etcd::EtcdOptions& where = options.options.etcd;
  CO_TRY(const auto endpoints, etcd::parse_endpoints(where.urls));
  Etcd etcd(options.options, endpoints);
  while (!told.is_set()) {
    const auto term = co_await win(etcd, told);
    if (!term) break;
    Lease lease(where.ttl);
    const milliseconds asked_at = Lease::now();
    const auto kept = co_await etcd.keep(*term, kAsk);
    if (!kept || !*kept) {
      (void)co_await etcd.resign(*term);
      co_await pause_unless(told, kBetweenTries);
      continue;
    }
    lease.kept(asked_at);
    Stop over(executor);
    async::TaskGroup tasks(executor);
    tasks.spawn("coordinator.lease", keep_lease(etcd, *term, where.ttl, lease, over));
    tasks.spawn("coordinator.told", pass_on(told, over));
    etcd::EtcdState state(where, endpoints, *term);
    TermOptions leased = options;
    leased.may_answer = [&lease] { return lease.check(); };
    auto led = co_await lead_term(leased, state, over);
    over.set("the term has ended");
    co_await tasks.close(kCloseDeadline);
    (void)co_await etcd.resign(*term);
    // Bad options, a damaged state: no other try ends otherwise. Etcd away: the next one may.
    const bool again = led || led.error().code() == ErrorCode::kUnavailable ||
                       led.error().code() == ErrorCode::kStale;
    if (!again) co_return led;
    if (led) continue;
    log::warn("coordinator.term_failed", "error", led.error());
    co_await pause_unless(told, kAfterFailure);
  }
  co_return Result<void>();
}

}  // namespace rekindle::coordinator
