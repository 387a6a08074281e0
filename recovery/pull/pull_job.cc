#include "recovery/pull/pull_job.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <set>
#include <string>
#include <utility>

#include <boost/asio/this_coro.hpp>

#include "recovery/pull/direct_transfer.h"
#include "recovery/pull/pull_context.h"
#include "recovery/pull/pull_destination.h"
#include "recovery/pull/pull_plans.h"
#include "recovery/pull/pull_policy.h"
#include "recovery/pull/source_plan.h"
#include "recovery/pull/source_pool.h"
#include "recovery/pull/target_resolver.h"
#include "recovery/pull/transfer.h"
#include "recovery/swarm/availability.h"
#include "src/async/task_group.h"
#include "src/base/log.h"

namespace rekindle::pull {

namespace {

constexpr std::chrono::milliseconds kGrantDelay{250};
// A grant lives for a minute.
constexpr std::chrono::seconds kOffersFreshFor{20};
constexpr std::chrono::seconds kRecruitClose{5};
// For other sources, after those of a transfer are lost.
constexpr std::chrono::milliseconds kSearch{1000};
constexpr std::size_t kMissingShown = 5;
// Until a device has its slots. Opening a GPU takes tenths of a second.
constexpr std::chrono::seconds kSlotsWait{10};
constexpr std::chrono::seconds kDirectReport{1};

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
  using PlanRef = PullPlans::PlanRef;
  struct TransferTables;

  async::Task<Result<Outcome>> run_phases();
  async::Task<Result<void>> transfer_all();
  async::Task<Result<void>> fetch(bool waited);
  async::Task<void> serve_direct_reads();
  async::Task<std::string> read_directly(DirectReads& reads);
  async::Task<std::vector<proto::Source>> ask_again();
  async::Task<Result<void>> find_more_sources(PlanRef plan);
  async::Task<Result<void>> transfer_once(PlanRef plan);
  async::Task<Result<void>> transfer_and_recruit(Transfer& transfer);
  async::Task<Result<Transfer::Options>> transfer_options(PlanRef plan);
  async::Task<Result<PlanRef>> plan();
  async::Task<Result<PullRounds::Next>> next(PlanRef plan);
  async::Task<Error> no_source_error(PlanRef plan);
  template <typename T>
  async::Task<Result<T>> compute(std::function<Result<T>()> work) {
    auto computing = context_.environment.plans->run(std::move(work));
    co_return co_await context_.wait_for(std::move(computing));
  }
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
  // While the rest is held.
  std::shared_ptr<const FirstTiles> first_tiles_;
};

PullJob::Driver::Driver(const PullEnvironment& environment, PullRequest request,
                        OnProgress progress, PullTimes times, PullWatch watch)
    : wanted_spec_{request.shard, request.spec_json, request.tensors_regex, request.boxes},
      context_{.environment = environment,
               .request = request,
               .times = times,
               .finder = {environment, request.ref, request.from, wanted_spec_.to_string()},
               .silence = {times.silence, steady_now()},
               .progress = {request.ref.model, std::move(progress), environment.tracer}},
      sources_(context_),
      resolver_(context_, sources_, wanted_spec_),
      destination_(context_, std::move(watch)) {}

async::Task<Result<PullJob::Outcome>> PullJob::Driver::run() {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  PullTrace& spans = context_.progress.trace();
  context_.progress.start(context_.request, steady_now());
  context_.finder.belongs_to(spans.context());
  auto outcome = co_await run_phases();
  if (!outcome && co_await async::is_cancelled()) outcome = fail(interrupted());
  Result<TransferSummary> verdict;
  if (outcome) verdict = outcome->summary;
  if (!outcome) verdict = fail(outcome.error());
  const ModelVersion& id = context_.target.resolved.id;
  spans.end(verdict, id.model.empty() ? context_.request.ref.to_string() : id.to_string(),
            context_.finder.pull_id());
  Result<void> told;
  if (!outcome) told = fail(outcome.error());
  context_.finder.leave(spans.spans());
  co_await context_.finder.close(told);
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
    sources_.know_layout(context_.target.shared_layout());
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

// Tiles that are wanted while the rest is held come first. If they do not come, they are fetched
// with the rest.
async::Task<Result<void>> PullJob::Driver::transfer_all() {
  bool waited = false;
  for (;;) {
    const bool waits = co_await destination_.wait_while_held();
    waited = waited || waits;
    if (co_await async::is_cancelled()) co_return fail(interrupted());
    auto first = destination_.first_tiles();
    if (!first) break;
    first_tiles_ = std::make_shared<const FirstTiles>(std::move(*first));
    auto fetched = co_await fetch(waited);
    first_tiles_ = nullptr;
    if (co_await async::is_cancelled()) co_return fail(interrupted());
    if (!fetched) {
      log::warn("pull.first_tiles", "version", context_.target.resolved.id.to_string(), "error",
                fetched.error());
      destination_.fail_first_tiles(fetched.error());
    }
    waited = true;
  }
  co_return co_await fetch(waited);
}

// `waited`: the offers of the sources have become old.
async::Task<Result<void>> PullJob::Driver::fetch(bool waited) {
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
    CO_TRY_VOID(co_await sources_.add_local());
    const auto& direct = destination_.direct();
    if (first && direct != nullptr && !direct->is_over()) co_await serve_direct_reads();
    CO_TRY(const PlanRef plan, co_await this->plan());
    if (first_tiles_ == nullptr) {
      const std::uint64_t total = context_.progress.bytes_total();
      const std::uint64_t verified = total - std::min(total, plan->wanted_bytes());
      context_.progress.set_verified(verified);
      const std::uint64_t landed = counters_->landed_bytes;
      if (first) resumed_bytes_ = verified - std::min(verified, landed);
    }
    CO_TRY(const auto step, co_await next(plan));
    if (step == PullRounds::Next::kDone) co_return Result<void>();
    if (co_await async::is_cancelled()) co_return fail(interrupted());
    if (step == PullRounds::Next::kFindSources) {
      CO_TRY_VOID(co_await find_more_sources(plan));
      continue;
    }
    CO_TRY_VOID(co_await transfer_once(plan));
  }
}

// Whatever happens here, the pull goes on and fetches the bytes into host memory.
async::Task<void> PullJob::Driver::serve_direct_reads() {
  const std::shared_ptr<DirectReads> reads = destination_.direct();
  enter_phase("transfer");
  context_.silence.heard(steady_now());
  const std::string why = co_await read_directly(*reads);
  log::info("pull.direct_over", "version", context_.target.resolved.id.to_string(), "why", why);
  reads->finish(why);
  context_.silence.heard(steady_now());
  const bool cancelled = co_await async::is_cancelled();
  if (!cancelled && context_.finder.age(steady_now()) >= kOffersFreshFor) co_await sources_.look();
}

// Returns why no more is read. Wrong bytes count against no source of the pull: they may have come
// about between a NIC and the GPU, and the pull looks at the same bytes in host memory.
async::Task<std::string> PullJob::Driver::read_directly(DirectReads& reads) {
  if (destination_.verified()->count() > 0) co_return "this host has some of the bytes";
  const auto chosen = direct_sources(sources_.sources());
  if (!chosen) co_return chosen.error().message();
  // The coordinator takes a pull that says nothing for one that has ended.
  const auto report = [this] {
    context_.finder.report(context_.progress.report(sources_.sources()));
  };
  const TimePoint give_up = steady_now() + kSlotsWait;
  std::optional<DirectSlots> slots;
  while (!(slots = reads.take_slots())) {
    if (reads.ended()) co_return *reads.ended();
    const bool cancelled = co_await async::is_cancelled();
    if (cancelled || steady_now() >= give_up) co_return "the device has offered no slots";
    report();
    co_await reads.changed->wait_until(std::min(give_up, steady_now() + kDirectReport));
  }
  SourceTable sources;
  for (const auto index : *chosen) sources.push_back(sources_.sources()[index]);
  using Plan = std::shared_ptr<const DirectPlan>;
  std::function<Result<Plan>()> make = [checkpoint = context_.target.checkpoint,
                                        views = plan_sources(sources), buckets = slots->buckets,
                                        bytes = slots->bucket_bytes]() -> Result<Plan> {
    TRY(const auto wanted, buckets());
    return plan_direct(checkpoint, views, wanted, bytes);
  };
  auto plan = co_await compute(std::move(make));
  if (!plan) co_return plan.error().message();
  report();
  context_.silence.heard(steady_now());
  auto other_homes = slots->landing.other_homes;
  DirectTransfer transfer(context_.environment, context_.silence, reads,
                          {.plan = std::move(*plan),
                           .slots = std::move(*slots),
                           .sources = std::move(sources),
                           .paths = {.id = context_.target.resolved.id,
                                     .root = context_.target.resolved.root,
                                     .forced_transport = "verbs",
                                     .encrypted = context_.request.encrypt,
                                     .closed_homes = std::move(other_homes)},
                           .tick =
                               [report, told = steady_now()]() mutable {
                                 if (steady_now() - told < kDirectReport) return;
                                 told = steady_now();
                                 report();
                               },
                           .ask_again = [this] { return ask_again(); }});
  std::string why = co_await transfer.run();
  std::uint32_t wrong = 0;
  for (const WrongBytes& one : transfer.wrong()) wrong += one.slices;
  if (wrong > 0) why += fmt::format("; {} slice(s) were wrong on the device", wrong);
  co_return why;
}

async::Task<std::vector<proto::Source>> PullJob::Driver::ask_again() {
  co_await context_.finder.exchange(context_.progress.report(sources_.sources()));
  co_return context_.finder.sources();
}

async::Task<Result<PullJob::Driver::PlanRef>> PullJob::Driver::plan() {
  const PullTarget& target = context_.target;
  PlanInputs inputs;
  inputs.checkpoint = target.checkpoint;
  inputs.destination = target.shared_layout();
  inputs.sources = plan_sources(sources_.sources());
  if (const auto& verified = destination_.verified()) inputs.verified = verified->snapshot();
  if (first_tiles_ != nullptr) inputs.verified = first_tiles_->all_but(inputs.verified);
  inputs.trades = static_cast<bool>(context_.environment.share);
  auto planning = context_.environment.plans->plan(std::move(inputs));
  co_return co_await context_.wait_for(std::move(planning));
}

async::Task<Result<PullRounds::Next>> PullJob::Driver::next(PlanRef plan) {
  PullRounds::PlanFacts facts{.has_slices = plan->slice_count() > 0,
                              .has_missing = !plan->missing().empty(),
                              .any_growing = any_growing(sources_.sources())};
  if (facts.has_slices && facts.any_growing) {
    std::function<Result<bool>()> look = [plan, growing = growing_holds(sources_.sources())] {
      return nothing_readable(*plan, growing);
    };
    CO_TRY(facts.nothing_readable, co_await compute(std::move(look)));
  }
  co_return PullRounds::next(facts);
}

async::Task<Result<void>> PullJob::Driver::find_more_sources(PlanRef plan) {
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
  if (search == PullRounds::Search::kGiveUp) co_return fail(co_await no_source_error(plan));
  co_await sources_.wait_to_ask_again();
  co_await sources_.look();
  co_return Result<void>();
}

// Runs one transfer and prepares the next one. An error ends the pull.
async::Task<Result<void>> PullJob::Driver::transfer_once(PlanRef plan) {
  CO_TRY(auto options, co_await transfer_options(plan));
  enter_phase("transfer");
  options.trace = context_.progress.trace().phase();
  const VerifiedTiles& verified = *destination_.verified();
  const auto tiles = verified.count();
  const auto quarantined = sources_.faults().quarantined().size();
  context_.progress.begin_transfer(sources_.sources());
  Transfer transfer(context_.environment, context_.silence, std::move(options));
  auto done = co_await transfer_and_recruit(transfer);
  context_.progress.end_transfer(sources_.sources());
  if (auto wrong = transfer.wrong_together(); wrong.slices > 0) wrong_together_ = wrong.where;
  const bool grants_refused = sources_.judge();
  PullReport report = context_.progress.report(sources_.sources());
  if (done && first_tiles_ == nullptr) report.bytes_done = report.bytes_total;
  context_.finder.report(std::move(report));

  if (co_await async::is_cancelled()) co_return fail(interrupted());
  if (!done && done.error().code() != ErrorCode::kUnavailable) co_return done;
  const bool gained =
      verified.count() > tiles || sources_.faults().quarantined().size() > quarantined;
  // A NIC may have taken most of the patience to notice that its peer is gone.
  if (gained) context_.silence.leave(kSearch, steady_now());
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

// The tables of a transfer, from the plan.
struct PullJob::Driver::TransferTables {
  std::shared_ptr<swarm::SliceCandidates> candidates;
  std::vector<transport::SliceIndex> order;
};

async::Task<Result<Transfer::Options>> PullJob::Driver::transfer_options(PlanRef plan) {
  const PullTarget& target = context_.target;
  const bool serves = static_cast<bool>(context_.environment.share);
  const auto seed = serves ? swarm::order_seed(context_.environment.identity.incarnation) : 0;
  std::function<Result<TransferTables>()> make =
      [plan, serves, seed, suspicion = suspicion_, first = first_tiles_,
       growing = growing_sources(sources_.sources()), sources = plan_sources(sources_.sources())] {
        TransferTables tables;
        tables.candidates = std::make_shared<swarm::SliceCandidates>(plan, growing, suspicion);
        for (const PlanSource& source : sources) {
          if (!source.growing) continue;
          tables.candidates->prepare(
              swarm::join_tables(*plan, *source.layout, false, tables.candidates->slice_tiles()));
        }
        if (first != nullptr) {
          tables.order = first->order(*plan);
        } else if (serves) {
          tables.order = swarm::slice_order(*plan, seed);
        }
        return Result<TransferTables>(std::move(tables));
      };
  CO_TRY(auto tables, co_await compute(std::move(make)));
  Transfer::Options options{
      .work = {.candidates = std::move(tables.candidates),
               .destination = destination_.pending(),
               .verified = destination_.verified(),
               .counters = counters_},
      .sources = sources_.table(),
      .paths = {.id = target.resolved.id,
                .root = target.resolved.root,
                .forced_transport = context_.request.transport,
                .encrypted = context_.request.encrypt,
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
  options.order = std::move(tables.order);
  options.order_seed = seed;
  options.keeps_order = first_tiles_ != nullptr;
  co_return options;
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

async::Task<Error> PullJob::Driver::no_source_error(PlanRef plan) {
  const auto checkpoint = context_.target.checkpoint;
  using Boxes = std::vector<planner::MissingBox>;
  std::function<Result<Boxes>()> look = [plan, checkpoint,
                                         growing = growing_holds(sources_.sources())] {
    Boxes missing(plan->missing().begin(), plan->missing().end());
    const Boxes unread = held_by_nobody(*plan, *checkpoint, growing);
    missing.insert(missing.end(), unread.begin(), unread.end());
    return Result<Boxes>(std::move(missing));
  };
  const auto looked = co_await compute(std::move(look));
  if (!looked) co_return looked.error();
  const Boxes& missing = *looked;
  std::string quarantined;
  for (const auto& [name, why] : sources_.faults().quarantined()) {
    quarantined += fmt::format("source {} is {}; ", name, why);
  }
  if (!quarantined.empty()) quarantined += "check its copy with `rekindle verify`; ";
  co_return Error(
      ErrorCode::kNotFound,
      fmt::format("NO_SOURCE: no living source holds {} part(s) of {}: {}; {}start an "
                  "agent that holds it, or give --fallback DIR",
                  missing.size(), context_.target.resolved.id.to_string(),
                  planner::describe_missing(*checkpoint, missing, kMissingShown), quarantined));
}

TransferSummary PullJob::Driver::summarize(const store::StoredVersion& stored) {
  const Manifest& manifest = stored.manifest;
  TransferSummary summary;
  summary.id = context_.target.resolved.id;
  summary.root = manifest.checkpoint->root;
  summary.layout = manifest.layout.digest();
  summary.signatures = context_.target.checkpoint->signatures;
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
  CO_TRY_VOID(co_await sources_.add_local());
  CO_TRY(const PlanRef plan, co_await this->plan());
  std::function<Result<PlanSummary>()> summarize = [plan, target = context_.target,
                                                    named = named_sources(sources_.sources())] {
    return Result<PlanSummary>(summarize_plan(*plan, target, named));
  };
  CO_TRY(auto summary, co_await compute(std::move(summarize)));
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
