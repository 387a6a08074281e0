#include "recovery/coordinator/etcd/election.h"

#include <array>
#include <ctime>
#include <functional>
#include <optional>
#include <utility>

#include <unistd.h>

#include <boost/asio/this_coro.hpp>
#include <boost/asio/thread_pool.hpp>

#include "recovery/coordinator/committer.h"
#include "recovery/coordinator/core/candidacy.h"
#include "recovery/coordinator/etcd/etcd_state.h"
#include "src/async/task_group.h"
#include "src/base/log.h"

namespace rekindle::coordinator::etcd {

using nlohmann::json;

namespace {

// The leader's key, which the failed branch of a campaign reads.
const json* holder_of(const json& answer) {
  const auto responses = answer.find("responses");
  if (responses == answer.end() || !responses->is_array() || responses->empty()) return nullptr;
  const auto range = responses->front().find("response_range");
  if (range == responses->front().end()) return nullptr;
  const auto pairs = range->find("kvs");
  if (pairs == range->end() || !pairs->is_array() || pairs->empty()) return nullptr;
  return &pairs->front();
}

}  // namespace

std::string leader_key(const EtcdOptions& options) { return options.prefix + "leader"; }

Election::Election(const EtcdOptions& options, Access access, std::string name)
    : key_(to_base64(leader_key(options))),
      name_(std::move(name)),
      ttl_(options.ttl),
      gateway_(std::move(access)) {}

Result<Term> Election::campaign(std::chrono::milliseconds deadline) {
  TRY(const json granted, gateway_.call("/v3/lease/grant", {{"TTL", ttl_.count()}}, deadline));
  Term term;
  term.lease = number_in(granted, "ID");
  if (term.lease == 0) return fail(ErrorCode::kUnavailable, "etcd grants no lease");
  const json txn = {
      {"compare",
       {{{"key", key_}, {"target", "CREATE"}, {"result", "EQUAL"}, {"create_revision", "0"}}}},
      {"success",
       {{{"request_put",
          {{"key", key_}, {"value", to_base64(name_)}, {"lease", std::to_string(term.lease)}}}}}},
      {"failure", {{{"request_range", {{"key", key_}}}}}}};
  TRY(const json answer, gateway_.call("/v3/kv/txn", txn, deadline));
  if (answer.value("succeeded", false)) {
    const auto header = answer.find("header");
    if (header != answer.end()) term.revision = number_in(*header, "revision");
    if (term.revision != 0) return term;
    return fail(ErrorCode::kUnavailable, "etcd answers without a revision");
  }
  std::string leader = "another coordinator";
  if (const json* holder = holder_of(answer)) {
    TRY(leader, from_base64(holder->value("value", "")));
    // The key is ours: an earlier campaign succeeded, and its answer was lost.
    if (leader == name_) {
      return Term{number_in(*holder, "lease"), number_in(*holder, "create_revision")};
    }
  }
  (void)gateway_.call("/v3/lease/revoke", {{"ID", std::to_string(term.lease)}}, deadline);
  return fail(ErrorCode::kUnavailable, "{} leads", leader);
}

Result<bool> Election::keep(const Term& term, std::chrono::milliseconds deadline) {
  TRY(const json answer,
      gateway_.call("/v3/lease/keepalive", {{"ID", std::to_string(term.lease)}}, deadline));
  const auto result = answer.find("result");
  return result != answer.end() && number_in(*result, "TTL") > 0;
}

void Election::resign(const Term& term, std::chrono::milliseconds deadline) {
  (void)gateway_.call("/v3/lease/revoke", {{"ID", std::to_string(term.lease)}}, deadline);
}

}  // namespace rekindle::coordinator::etcd

namespace rekindle::coordinator {

namespace asio = boost::asio;

namespace {

constexpr std::chrono::milliseconds kEtcdDeadline{1000};
constexpr std::chrono::milliseconds kCloseTasksDeadline{2000};

std::string own_name(const CoordinatorOptions& options) {
  std::array<char, 65> host{};
  (void)::gethostname(host.data(), host.size() - 1);
  return fmt::format("the coordinator of pid {} on {} ({}, {})", ::getpid(), host.data(),
                     options.listen, Incarnation::random().hex());
}

BootTime boot_now() {
  timespec at{};
  (void)::clock_gettime(CLOCK_BOOTTIME, &at);
  return std::chrono::duration_cast<BootTime>(std::chrono::seconds(at.tv_sec) +
                                              std::chrono::nanoseconds(at.tv_nsec));
}

// Calls of etcd block, so they have a thread of their own; answers come back to the caller's.
class EtcdThread {
 public:
  EtcdThread(const CoordinatorOptions& options, etcd::Access access)
      : election_(options.etcd, std::move(access), own_name(options)) {}
  ~EtcdThread() { thread_.join(); }

  async::Task<Result<etcd::Term>> campaign() {
    return run_blocking<etcd::Term>(thread_, [this] { return election_.campaign(kEtcdDeadline); });
  }
  async::Task<Result<bool>> keep(etcd::Term term, std::chrono::milliseconds deadline) {
    return run_blocking<bool>(thread_,
                              [this, term, deadline] { return election_.keep(term, deadline); });
  }
  async::Task<Result<bool>> resign(etcd::Term term) {
    return run_blocking<bool>(thread_, [this, term]() -> Result<bool> {
      election_.resign(term, kEtcdDeadline);
      return true;
    });
  }

 private:
  // On thread_ only.
  etcd::Election election_;
  asio::thread_pool thread_{1};
};

// Renews the lease until the term is over, and ends the term when the lease is.
async::Task<void> keep_lease(EtcdThread& etcd, etcd::Term term, LeaderLease& lease, Stop& over) {
  auto state = LeaderLease::State::kHeld;
  while (!over.is_set()) {
    co_await over.wait_until(steady_now() + lease.next_request_in(boot_now()));
    if (over.is_set()) co_return;
    auto next = lease.advance(boot_now());
    if (next != LeaderLease::State::kOver) {
      const BootTime asked_at = boot_now();
      const auto renewed = co_await etcd.keep(term, lease.request_limit(asked_at));
      next = lease.answered(asked_at, renewed, boot_now());
      if (next == LeaderLease::State::kAway && state != next) {
        log::warn("coordinator.etcd_away", "error", renewed.error());
      }
    }
    if (next == LeaderLease::State::kHeld && state != next) log::info("coordinator.etcd_back");
    if (next == LeaderLease::State::kOver) over.set(lease.why_over());
    state = next;
  }
}

// Sets the second when the first is.
async::Task<void> pass_on(Stop& told, Stop& over) {
  co_await told.wait();
  over.set(told.why());
}

// One term under a lease that was confirmed at `confirmed_at`.
async::Task<Result<void>> lead_with_lease(const TermOptions& options, const etcd::Access& access,
                                          EtcdThread& etcd, etcd::Term term, BootTime confirmed_at,
                                          Stop& told) {
  const auto executor = co_await asio::this_coro::executor;
  LeaderLease lease(options.options.etcd.ttl, confirmed_at);
  Stop over(executor);
  async::TaskGroup tasks(executor);
  tasks.spawn("coordinator.lease", keep_lease(etcd, term, lease, over));
  tasks.spawn("coordinator.told", pass_on(told, over));
  etcd::EtcdState state(options.options.etcd, access, term);
  TermOptions leased = options;
  leased.may_answer = [&lease] { return lease.check(boot_now()); };
  auto led = co_await lead_term(leased, state, over);
  over.set("the term has ended");
  co_await tasks.close(kCloseTasksDeadline);
  co_return led;
}

}  // namespace

async::Task<Result<void>> stand_and_lead(const TermOptions& options, Stop& told) {
  CO_TRY(const auto access, etcd::access_of(options.options.etcd));
  EtcdThread etcd(options.options, access);
  Candidacy candidacy;
  etcd::Term term;
  BootTime confirmed_at{};
  for (;;) {
    co_await told.wait_until(steady_now() + candidacy.pause());
    if (told.is_set()) candidacy.stop();
    switch (candidacy.state()) {
      case Candidacy::State::kStandingBy: {
        const auto won = co_await etcd.campaign();
        if (won) term = *won;
        const auto loss = candidacy.campaigned(won ? Result<void>() : fail(Error(won.error())));
        if (loss) {
          log::info("coordinator.standing_by", "why", *loss);
          options.page.stand_by(*loss);
        }
        break;
      }
      case Candidacy::State::kConfirming: {
        confirmed_at = boot_now();
        const auto renewed = co_await etcd.keep(term, kEtcdDeadline);
        candidacy.confirmed(renewed);
        if (candidacy.state() != Candidacy::State::kLeading) (void)co_await etcd.resign(term);
        break;
      }
      case Candidacy::State::kLeading: {
        const auto led = co_await lead_with_lease(options, access, etcd, term, confirmed_at, told);
        (void)co_await etcd.resign(term);
        candidacy.term_ended(led);
        if (!led && candidacy.state() != Candidacy::State::kOver) {
          log::warn("coordinator.term_failed", "error", led.error());
        }
        break;
      }
      case Candidacy::State::kOver:
        co_return candidacy.outcome();
    }
  }
}

}  // namespace rekindle::coordinator
