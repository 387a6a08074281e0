#include "recovery/pull/pull_job.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <set>
#include <string>
#include <utility>

#include <boost/asio/this_coro.hpp>

#include "recovery/pull/pull_context.h"
#include "recovery/pull/pull_destination.h"
#include "recovery/pull/pull_policy.h"
#include "recovery/pull/source_plan.h"
#include "recovery/pull/source_pool.h"
#include "recovery/pull/target_resolver.h"
#include "recovery/pull/transfer.h"
#include "recovery/swarm/availability.h"
#include "src/async/task_group.h"

namespace rekindle::pull {

namespace {

constexpr std::chrono::milliseconds kGrantDelay{250};
// A grant lives for a minute.
constexpr std::chrono::seconds kOffersFreshFor{20};
constexpr std::chrono::seconds kRecruitClose{5};
constexpr std::size_t kMissingShown = 5;

Error interrupted() {
  return {ErrorCode::kUnavailable,
          "cancelled; what has verified is kept, the same command goes on from there"};
}

}  // namespace

// Joins the parts of a pull.
class PullJob::Driver {
 public:
  Driver(const PullEnvironment& environment, PullRequest request, OnProgress progress,
         PullTimes times, PullWatch watch);

  async::Task<Result<Outcome>> run();
  async::Task<Result<PlanSummary>> plan_only();

 private:
  async::Task<Result<Outcome>> run_phases();
  async::Task<Result<void>> transfer_all();
  async::Task<Result<void>> find_more_sources(const planner::Plan& plan);
  async::Task<Result<void>> transfer_once(std::shared_ptr<const planner::Plan> plan);
  async::Task<Result<void>> transfer_and_recruit(Transfer& transfer);
  Transfer::Options transfer_options(std::shared_ptr<const planner::Plan> plan);
  PlanInputs plan_inputs();
  PullRounds::Next next(const planner::Plan& plan);
  Error no_source_error(const planner::Plan& plan);
  TransferSummary summarize(const store::StoredVersion& stored);
  void enter_phase(const std::string& name) { context_.progress.enter_phase(name, steady_now()); }

  const WantedSpec wanted_spec_;
  PullContext context_;
  SourcePool sources_;
  TargetResolver resolver_;
  PullDestination destination_;
  PullRounds rounds_;
  const std::shared_ptr<PullCounters> counters_ = std::make_shared<PullCounters>();
  // The user knows of their failure.
  std::set<std::string> failed_transports_;
  // The last bytes that several sources brought together and that did not verify.
  std::string wrong_together_;
  std::uint32_t suspicion_ = 0;  // see swarm::SliceCandidates
  std::uint64_t resumed_bytes_ = 0;
};

PullJob::Driver::Driver(const PullEnvironment& environment, PullRequest request,
                        OnProgress progress, PullTimes times, PullWatch watch)
    : wanted_spec_{request.shard, request.spec_json, request.tensors_regex, request.boxes},
      context_{.environment = environment,
               .request = request,
               .times = times,
               .finder = {environment, request.ref, request.from, wanted_spec_.to_string()},
               .silence = {times.silence, steady_now()},
               .progress = {request.ref.model, std::move(progress)}},
      sources_(context_),
      resolver_(context_, sources_, wanted_spec_),
      destination_(context_, std::move(watch)) {}

async::Task<Result<PullJob::Outcome>> PullJob::Driver::run() {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  context_.progress.start(steady_now());
  auto outcome = co_await run_phases();
  if (!outcome && co_await async::is_cancelled()) outcome = fail(interrupted());
  Result<void> verdict;
  if (!outcome) verdict = fail(outcome.error());
  co_await context_.finder.close(verdict);
  sources_.close();
  if (outcome) co_return outcome;
  co_return fail(
      std::move(outcome).error().with_context("pull " + context_.request.ref.to_string()));
}

async::Task<Result<PullJob::Outcome>> PullJob::Driver::run_phases() {
  CO_TRY_VOID(co_await resolver_.resolve());
  if (co_await async::is_cancelled()) co_return fail(interrupted());
  CO_TRY_VOID(co_await resolver_.find_wanted());
  std::shared_ptr<const store::StoredVersion> stored;
  if (context_.request.mend == nullptr) {
    CO_TRY(stored, co_await destination_.find_here());
  }
  if (stored != nullptr) {
    resumed_bytes_ = stored->manifest.layout.payload_bytes();
  } else {
    CO_TRY_VOID(co_await destination_.begin());
    sources_.know_layout(context_.target.packed->layout);
    auto transferred = co_await transfer_all();
    co_await destination_.release_memory();
    if (!transferred) {
      co_await destination_.abandon();
      co_return fail(std::move(transferred).error());
    }
    CO_TRY(stored, co_await destination_.commit());
  }
  enter_phase("ready");
  co_return Outcome{summarize(*stored), std::move(stored)};
}

async::Task<Result<void>> PullJob::Driver::transfer_all() {
  const bool waited = co_await destination_.wait_while_held();
  if (co_await async::is_cancelled()) co_return fail(interrupted());
  enter_phase("connect");
  context_.silence.heard(steady_now());
  // The offers may have expired: making room takes long, and so does a hold.
  const bool fresh = !waited && context_.finder.age(steady_now()) < kOffersFreshFor;
  if (fresh) {
    co_await sources_.connect();
  } else {
    co_await sources_.look();
  }
  for (bool first = true;; first = false) {
    sources_.add_local();
    CO_TRY(std::shared_ptr<const planner::Plan> plan, plan_over(plan_inputs()));
    const std::uint64_t total = context_.progress.bytes_total();
    const std::uint64_t verified = total - std::min(total, plan->wanted_bytes());
    context_.progress.set_verified(verified);
    if (first) resumed_bytes_ = verified;
    const auto step = next(*plan);
    if (step == PullRounds::Next::kDone) co_return Result<void>();
    if (co_await async::is_cancelled()) co_return fail(interrupted());
    if (step == PullRounds::Next::kFindSources) {
      CO_TRY_VOID(co_await find_more_sources(*plan));
      continue;
    }
    CO_TRY_VOID(co_await transfer_once(std::move(plan)));
  }
}

PullRounds::Next PullJob::Driver::next(const planner::Plan& plan) {
  PullRounds::PlanFacts facts{.has_slices = plan.slice_count() > 0,
                              .has_missing = !plan.missing().empty(),
                              .any_growing = any_growing(sources_.sources())};
  if (facts.has_slices && facts.any_growing) {
    facts.nothing_readable = nothing_readable(plan, sources_.sources());
  }
  return PullRounds::next(facts);
}

async::Task<Result<void>> PullJob::Driver::find_more_sources(const planner::Plan& plan) {
  const bool worth_waiting =
      any_growing(sources_.sources()) || context_.finder.queued().has_value();
  const auto search = PullRounds::search({.has_fallback = sources_.has_fallback(),
                                          .worth_waiting = worth_waiting,
                                          .silent = context_.silence.over(steady_now())});
  if (search == PullRounds::Search::kReadFallback) {
    CO_TRY_VOID(co_await sources_.add_fallback());
    context_.progress.show(fmt::format("no source is left; reading the rest from {}",
                                       context_.request.fallback.string()));
    co_return Result<void>();
  }
  if (search == PullRounds::Search::kGiveUp) co_return fail(no_source_error(plan));
  co_await sources_.wait_to_ask_again();
  co_await sources_.look();
  co_return Result<void>();
}

// Runs one transfer and prepares the next one. An error ends the pull.
async::Task<Result<void>> PullJob::Driver::transfer_once(
    std::shared_ptr<const planner::Plan> plan) {
  enter_phase("transfer");
  const VerifiedTiles& verified = *destination_.verified();
  const auto tiles = verified.count();
  const auto quarantined = sources_.faults().quarantined().size();
  context_.progress.begin_transfer(sources_.sources());
  Transfer transfer(context_.environment, context_.silence, transfer_options(plan));
  auto done = co_await transfer_and_recruit(transfer);
  if (auto wrong = transfer.wrong_together(); wrong.slices > 0) wrong_together_ = wrong.where;
  const bool grants_refused = sources_.judge();
  PullReport report = context_.progress.report(sources_.sources());
  if (done) report.bytes_done = report.bytes_total;
  context_.finder.report(std::move(report));

  if (co_await async::is_cancelled()) co_return fail(interrupted());
  if (!done && done.error().code() != ErrorCode::kUnavailable) co_return done;
  const bool gained =
      verified.count() > tiles || sources_.faults().quarantined().size() > quarantined;
  const auto after = rounds_.after({.gained = gained,
                                    .grants_refused = grants_refused,
                                    .silent = context_.silence.over(steady_now())});
  if (after == PullRounds::After::kAwaitGrants) co_await async::sleep_for(kGrantDelay);
  if (after == PullRounds::After::kStop) {
    if (!done) co_return done;
    co_return fail(ErrorCode::kCorrupt,
                   "bytes of {}, put together from several sources, do not verify: check each "
                   "source's copy with `rekindle verify`",
                   wrong_together_);
  }
  sources_.forget_lost();
  if (!done) {
    co_await sources_.look();
  } else if (plan->missing().empty()) {
    // All slices came, so tiles that are left did not verify.
    ++suspicion_;
  }
  co_return Result<void>();
}

Transfer::Options PullJob::Driver::transfer_options(std::shared_ptr<const planner::Plan> plan) {
  const PullTarget& target = context_.target;
  Transfer::Options options{
      .work = {.plan = plan,
               .destination = destination_.pending(),
               .verified = destination_.verified(),
               .counters = counters_,
               .suspicion = suspicion_,
               .growing = growing_sources(sources_.sources())},
      .sources = sources_.table(),
      .paths = {.id = target.resolved.id,
                .root = target.resolved.root,
                .forced_transport = context_.request.transport,
                .note = [this](std::string note) { context_.progress.show(std::move(note)); },
                .first_failure_of =
                    [this](const std::string& transport) {
                      return failed_transports_.insert(transport).second;
                    },
                .use_memory =
                    [this](transport::HandshakeConnector& connector) {
                      destination_.use_memory(connector);
                    }},
      .tick = [this](const transport::BatchProgress& batch) {
        context_.progress.tick(batch, sources_.sources());
      }};
  if (context_.environment.share) {
    options.order_seed = swarm::order_seed(context_.environment.identity.incarnation);
    options.order = swarm::slice_order(*plan, options.order_seed);
  }
  return options;
}

async::Task<Result<void>> PullJob::Driver::transfer_and_recruit(Transfer& transfer) {
  if (!context_.request.from.empty()) co_return co_await transfer.run();
  async::TaskGroup recruiting(context_.environment.executor);
  recruiting.spawn("pull.recruit", sources_.recruit(transfer));
  auto done = co_await transfer.run();
  // The recruiting refers to the transfer and must not outlive it.
  while (!co_await recruiting.close(kRecruitClose)) {
  }
  co_return done;
}

PlanInputs PullJob::Driver::plan_inputs() {
  return {.checkpoint = *context_.target.checkpoint,
          .destination = context_.target.packed->layout,
          .sources = sources_.sources(),
          .verified = destination_.verified().get(),
          .trades = static_cast<bool>(context_.environment.share)};
}

Error PullJob::Driver::no_source_error(const planner::Plan& plan) {
  const PlanInputs inputs = plan_inputs();
  std::vector<planner::MissingBox> missing(plan.missing().begin(), plan.missing().end());
  const auto unread = held_by_nobody(plan, inputs);
  missing.insert(missing.end(), unread.begin(), unread.end());
  std::string quarantined;
  for (const auto& [name, why] : sources_.faults().quarantined()) {
    quarantined += fmt::format("source {} is {}; ", name, why);
  }
  if (!quarantined.empty()) quarantined += "check its copy with `rekindle verify`; ";
  return {ErrorCode::kNotFound,
          fmt::format(
              "NO_SOURCE: no living source holds {} part(s) of {}: {}; {}start an agent that "
              "holds it, or give --fallback DIR",
              missing.size(), context_.target.resolved.id.to_string(),
              planner::describe_missing(inputs.checkpoint, missing, kMissingShown), quarantined)};
}

TransferSummary PullJob::Driver::summarize(const store::StoredVersion& stored) {
  const Manifest& manifest = stored.manifest;
  TransferSummary summary;
  summary.id = context_.target.resolved.id;
  summary.root = manifest.checkpoint->root;
  summary.layout = manifest.layout.digest();
  summary.path = stored.directory;
  summary.bytes = manifest.layout.payload_bytes();
  summary.resumed_bytes = resumed_bytes_;
  summary.fetched_bytes = counters_->landed_bytes;
  summary.refetched_bytes = counters_->rejected_bytes;
  summary.tensors = count_tensors(manifest.checkpoint->tensors, manifest.layout);
  context_.progress.summarize(summary, steady_now());
  return summary;
}

async::Task<Result<PlanSummary>> PullJob::Driver::plan_only() {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  CO_TRY_VOID(co_await resolver_.resolve());
  CO_TRY_VOID(co_await resolver_.find_wanted());
  co_await sources_.connect();
  sources_.add_local();
  CO_TRY(const auto plan, plan_over(plan_inputs()));
  auto summary = summarize_plan(*plan, context_.target, sources_.sources());
  sources_.close();
  co_await context_.finder.close({});
  co_return summary;
}

PullJob::PullJob(const PullEnvironment& environment, PullRequest request, OnProgress progress,
                 PullTimes times, PullWatch watch)
    : driver_(std::make_unique<Driver>(environment, std::move(request), std::move(progress), times,
                                       std::move(watch))) {}

PullJob::~PullJob() = default;

async::Task<Result<PullJob::Outcome>> PullJob::run() { return driver_->run(); }

async::Task<Result<PlanSummary>> PullJob::plan_only() { return driver_->plan_only(); }

}  // namespace rekindle::pull
