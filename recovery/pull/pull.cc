#include "recovery/pull/pull.h"

#include <algorithm>
#include <utility>

#include <boost/asio/this_coro.hpp>

#include "recovery/swarm/order.h"
#include "src/async/offload.h"
#include "src/async/task.h"
#include "src/base/clock.h"
#include "src/base/log.h"
#include "src/base/units.h"

namespace rekindle::pull {

namespace {

constexpr std::chrono::milliseconds kRefreshDelay{250};
constexpr std::chrono::milliseconds kLongestAskDelay{1000};
constexpr std::chrono::seconds kOffersFreshFor{20};  // a grant lives for a minute
constexpr int kFruitlessTransfers = 5;               // in a row, without one more verified tile
constexpr std::uint64_t kMaxSegmentBytes = 5 * kGiB;

Error interrupted() {
  return {ErrorCode::kUnavailable,
          "cancelled; what has verified is kept, the same command goes on from there"};
}

}  // namespace

PullJob::PullJob(const PullEnvironment& environment, PullRequest request, OnProgress progress,
                 PullTimes times, PullWatch watch)
    : environment_(environment),
      request_(std::move(request)),
      wanted_spec_{request_.shard, request_.spec_json, request_.tensors_regex, request_.boxes},
      on_progress_(std::move(progress)),
      times_(times),
      watch_(std::move(watch)),
      finder_(environment, request_.ref, request_.from, wanted_spec_.to_string()),
      silence_(times.silence, steady_now()),
      sources_(std::make_shared<SourceTable>()) {}

async::Task<Result<PullJob::Outcome>> PullJob::run() {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  started_ = phase_started_ = steady_now();
  auto outcome = co_await run_phases();
  if (!outcome && co_await async::is_cancelled()) outcome = fail(interrupted());
  Result<void> verdict;
  if (!outcome) verdict = fail(outcome.error());
  co_await finder_.close(verdict);
  for (auto& source : *sources_) {
    if (source.peer != nullptr) source.peer->close();
  }
  if (!outcome)
    co_return fail(std::move(outcome).error().with_context("pull " + request_.ref.to_string()));
  co_return outcome;
}

async::Task<Result<PullJob::Outcome>> PullJob::run_phases() {
  CO_TRY_VOID(co_await resolve());
  CO_TRY_VOID(check_root());
  if (co_await async::is_cancelled()) co_return fail(interrupted());
  CO_TRY_VOID(co_await find_wanted());
  std::shared_ptr<const store::StoredVersion> stored;
  if (request_.mend == nullptr) {
    CO_TRY(stored, co_await verified_here());
  }
  if (stored != nullptr) {
    summary_.resumed_bytes = stored->manifest.layout.payload_bytes();
  } else {
    CO_TRY_VOID(co_await begin());
    auto transferred = co_await transfer_all();
    co_await release_memory();
    if (!transferred) {
      co_await unshare();
      leave_pending();
      co_return fail(std::move(transferred).error());
    }
    auto committed = co_await commit();
    if (!committed) {
      co_await unshare();
      co_return fail(std::move(committed).error());
    }
    stored = std::move(*committed);
  }
  enter_phase("ready");
  CO_TRY(auto summary, summarize(*stored));
  co_return Outcome{std::move(summary), std::move(stored)};
}

async::Task<Result<void>> PullJob::resolve() {
  show({}, "");
  // With something else to read from there is no reason to wait for holders.
  const bool has_fallback = !request_.fallback.empty() && request_.ref.version;
  const SourceFinder::Patience patience{times_.resolve,
                                        has_fallback ? times_.resolve : times_.verifying};
  const auto tell = [this](const Error& why) { show({}, "waiting: " + why.message()); };
  auto resolved = co_await finder_.resolve(patience, tell);
  if (resolved) {
    resolved_ = std::move(*resolved);
    co_return Result<void>();
  }
  // Who was asked and said no (that it is retired, say) knows better than the own store. Without
  // anybody to ask a copy in the own store, or the fallback directory, may still do.
  const bool asked = has_been_asked(resolved.error());
  for (const auto& stored : environment_.store->versions()) {
    const auto& known = *stored->manifest.checkpoint;
    if (asked || known.id.model != request_.ref.model) continue;
    if (request_.ref.version ? known.id.version != *request_.ref.version
                             : known.id.version < resolved_.id.version) {
      continue;
    }
    resolved_ = {known.id, known.root, known.tensors.digest(), known.tensors.total_bytes()};
  }
  if (!resolved_.root.is_nil()) {
    show({}, fmt::format("{}; using what this host holds", resolved.error().message()));
    co_return Result<void>();
  }
  if (request_.fallback.empty() || !request_.ref.version)
    co_return fail(std::move(resolved).error());
  show({}, fmt::format("{}; reading {}", resolved.error().message(), request_.fallback.string()));
  resolved_.id = {request_.ref.model, *request_.ref.version};
  CO_TRY_VOID(co_await add_fallback());
  resolved_.root = checkpoint_->root;
  resolved_.tensor_set = checkpoint_->tensors.digest();
  resolved_.checkpoint_bytes = checkpoint_->tensors.total_bytes();
  co_return Result<void>();
}

Result<void> PullJob::check_root() const {
  if (request_.root.is_nil() || request_.root == resolved_.root) return {};
  return fail(ErrorCode::kCorrupt, "{} has root {} there, and not {}: nothing was fetched",
              resolved_.id.to_string(), resolved_.root.hex(), request_.root.hex());
}

bool PullJob::has_been_asked(const Error& answer) const {
  if (answer.code() == ErrorCode::kPeerLost || answer.code() == ErrorCode::kTimeout) return false;
  if (answer.code() == ErrorCode::kDenied) return true;
  return !request_.from.empty() || environment_.coordinator() != nullptr;
}

async::Task<Result<void>> PullJob::find_wanted() {
  enter_phase("plan");
  show({}, "");
  silence_.heard(steady_now());
  if (request_.mend != nullptr) co_return take_layout(*request_.mend);
  CO_TRY_VOID(co_await learn_checkpoint());
  std::string config;
  if (wanted_spec_.needs_config()) {
    CO_TRY(config, co_await read_config());
  }
  CO_TRY(wanted_, wanted_boxes(wanted_spec_, *checkpoint_, config));
  CO_TRY(packed_, pack_layout(checkpoint_->tensors, wanted_, kMaxSegmentBytes));
  bytes_total_ = packed_->layout.payload_bytes();
  co_return Result<void>();
}

Result<void> PullJob::take_layout(const store::SetAside& copy) {
  if (copy.checkpoint->root != resolved_.root) {
    return fail(ErrorCode::kCorrupt, "{} has root {} in the fleet, the copy here has {}",
                resolved_.id.to_string(), resolved_.root.hex(), copy.checkpoint->root.hex());
  }
  checkpoint_ = copy.checkpoint;
  packed_ = copy.packed;
  wanted_.clear();
  for (const LayoutEntry& entry : packed_->layout.entries()) {
    wanted_.push_back({entry.tensor, entry.box});
  }
  bytes_total_ = packed_->layout.payload_bytes();
  return {};
}

// One that does not verify is left to whoever finds that out, and not kept by this pull meanwhile.
// What is there instead is tried next, or the version is fetched anew.
async::Task<Result<std::shared_ptr<const store::StoredVersion>>> PullJob::verified_here() {
  while (auto stored = already_here()) {
    if (!environment_.require_verified) co_return stored;
    const std::weak_ptr<const store::StoredVersion> copy = stored;
    auto verified = co_await environment_.require_verified(std::move(stored));
    auto left = copy.lock();
    if (verified && left != nullptr) co_return left;
    if (verified) continue;  // retired
    if (verified.error().code() != ErrorCode::kCorrupt) co_return fail(std::move(verified).error());
    show({}, verified.error().message());
    if (left != nullptr && left->verification->state() != store::CopyState::kQuarantined) break;
  }
  co_return nullptr;
}

std::shared_ptr<const store::StoredVersion> PullJob::already_here() const {
  for (const auto& stored : environment_.store->find(resolved_.id)) {
    if (stored->manifest.checkpoint->root == resolved_.root &&
        stored->verification->state() != store::CopyState::kQuarantined &&
        covers(stored->manifest.layout, wanted_)) {
      return stored;
    }
  }
  return nullptr;
}

// Where the budget is too small, room is made once.
async::Task<Result<void>> PullJob::begin() {
  auto begun = co_await begin_copy();
  const auto missing = [this] {
    return environment_.store->missing_bytes(resolved_.id, packed_->layout);
  };
  if (begun || begun.error().code() != ErrorCode::kExhausted || missing() == 0) co_return begun;
  if (!request_.make_room || !environment_.make_room) co_return begun;
  show({}, "the budget is too small for it beside older versions: making room");
  if (auto made = co_await environment_.make_room(resolved_.id, missing); !made) {
    co_return fail(ErrorCode::kExhausted, "{}; {}", begun.error().message(),
                   made.error().message());
  }
  co_return co_await begin_copy();
}

async::Task<Result<void>> PullJob::begin_copy() {
  auto begun = co_await async::offload(*environment_.blocking_pool, [this] {
    using Held = std::shared_ptr<std::unique_ptr<store::PendingVersion>>;
    auto pending = environment_.store->begin(checkpoint_, *packed_);
    if (!pending) return Result<Held>(fail(std::move(pending).error()));
    return Result<Held>(
        std::make_shared<std::unique_ptr<store::PendingVersion>>(std::move(*pending)));
  });
  // All that the store calls unavailable is a copy that somebody else is writing.
  if (!begun && begun.error().code() == ErrorCode::kUnavailable && watch_.on_place_taken) {
    watch_.on_place_taken();
  }
  CO_TRY(pending_, std::move(begun));
  verified_ = std::make_shared<VerifiedTiles>((*pending_)->verified());
  layouts_[packed_->layout.digest()] = std::make_shared<const Layout>(packed_->layout);
  if (environment_.share) {
    environment_.share(**pending_, verified_, watch_.held && watch_.held());
  }
  if (watch_.on_begun) {
    Arriving arriving{checkpoint_, (*pending_)->manifest().layout, verified_, {}, placing_};
    for (std::uint32_t i = 0; i < arriving.layout.segments().size(); ++i) {
      arriving.segments.push_back((*pending_)->mapped(i));
    }
    watch_.on_begun(std::move(arriving));
  }
  co_return Result<void>();
}

// Before what is pending is let go of: its bytes may be written again by whoever resumes it.
async::Task<void> PullJob::unshare() {
  if (!environment_.unshare) co_return;
  co_await environment_.unshare(resolved_.id, resolved_.root, packed_->layout.digest());
}

// What has verified stays on disk, to be resumed; files without any of it do not.
void PullJob::leave_pending() {
  const bool in_use = pending_.use_count() > 1;  // by verifications that did not end
  if (!in_use && verified_->snapshot().count() == 0) {
    environment_.store->discard(std::move(*pending_));
  }
  pending_.reset();
}

// Registered once for all transfers of the pull, and only when a transport asks for it.
void PullJob::use_memory(transport::HandshakeConnector& connector) {
  if (!landing_used_by_.insert(&connector).second) return;
  const std::size_t segments = (*pending_)->manifest().layout.segments().size();
  for (std::uint32_t i = 0; i < segments; ++i) {
    landing_->push_back(connector.use_memory((*pending_)->segment(i), -1, 0));
  }
}

// Letting go of registered memory takes as long as pinning it.
async::Task<void> PullJob::release_memory() {
  landing_used_by_.clear();
  auto work = [landing = std::exchange(landing_, std::make_shared<Landing>())] {
    landing->clear();
    return true;
  };
  co_await async::offload(*environment_.blocking_pool, std::move(work));
}

async::Task<Result<std::shared_ptr<const store::StoredVersion>>> PullJob::commit() {
  enter_phase("commit");
  show({}, "");
  co_return co_await async::offload(*environment_.blocking_pool, [this] {
    return environment_.store->commit(std::move(*pending_));
  });
}

async::Task<Result<void>> PullJob::transfer_all() {
  const bool waited = co_await wait_while_held();
  if (co_await async::is_cancelled()) co_return fail(interrupted());
  enter_phase("connect");
  silence_.heard(steady_now());
  if (!waited && finder_.age(steady_now()) < kOffersFreshFor) {
    co_await connect_peers();
  } else {  // making room for the copy, or being held, may take long
    co_await look_for_sources();
  }
  int fruitless = 0;
  bool first = true;
  while (true) {
    add_local_sources();
    CO_TRY(std::shared_ptr<const planner::Plan> plan, make_plan());
    bytes_done_ = bytes_total_ - std::min(bytes_total_, plan->wanted_bytes());
    if (std::exchange(first, false)) summary_.resumed_bytes = bytes_done_;
    if (plan->slice_count() == 0 && plan->missing().empty()) co_return Result<void>();
    if (co_await async::is_cancelled()) co_return fail(interrupted());
    // With sources that are being filled what there is is fetched first: meanwhile they get more.
    const bool part_first = plan->slice_count() > 0 && any_growing();
    bool nothing_yet = false;
    if (part_first) (void)held_by_nobody(*plan, nothing_yet);
    if (nothing_yet || (!plan->missing().empty() && !part_first)) {
      CO_TRY_VOID(co_await find_more_sources(*plan));
      continue;
    }
    const auto verified = verified_->snapshot().count();
    const auto quarantined = quarantined_.size();
    auto done = co_await transfer_once(plan);
    if (co_await async::is_cancelled()) co_return fail(interrupted());
    if (!done && done.error().code() != ErrorCode::kUnavailable) co_return done;
    if (verified_->snapshot().count() > verified || quarantined_.size() > quarantined) {
      fruitless = 0;
    } else if (grants_denied_ && !silence_.over(steady_now())) {
      co_await async::sleep_for(kRefreshDelay);  // the coordinator has fresh ones, when it is back
    } else if (++fruitless == kFruitlessTransfers) {
      co_return fail(
          done ? Error(ErrorCode::kCorrupt,
                       fmt::format("bytes of {}, put together from several sources, do not verify: "
                                   "check each source's copy with `rekindle verify`",
                                   wrong_together_))
               : std::move(done).error());
    }
    forget_lost_sources();
    if (done && plan->missing().empty()) {
      ++suspicion_;  // counts when it was not the last round: all slices came, not all tiles
                     // verified
    } else if (!done) {
      co_await look_for_sources();
    }
  }
}

async::Task<Result<void>> PullJob::find_more_sources(const planner::Plan& plan) {
  // Sources that are only behind are waited for; so is a place at those that are busy.
  const bool behind = any_growing() || finder_.queued();
  const bool has_fallback = !request_.fallback.empty() && !fallback_used_;
  if (has_fallback && (!behind || silence_.over(steady_now()))) {
    CO_TRY_VOID(co_await add_fallback());
    show({},
         fmt::format("no source is left; reading the rest from {}", request_.fallback.string()));
    co_return Result<void>();
  }
  if (silence_.over(steady_now())) co_return fail(no_source_error(plan));
  co_await wait_to_ask_again(kRefreshDelay);
  co_await look_for_sources();
  co_return Result<void>();
}

// A place in the coordinator's queue is nobody's silence, unless there is something else to read.
async::Task<void> PullJob::wait_to_ask_again(std::chrono::milliseconds delay) {
  const auto queued = finder_.queued();
  const bool has_fallback = !request_.fallback.empty() && !fallback_used_;
  if (!queued || has_fallback) {
    queue_shown_ = false;
    co_await async::sleep_for(silence_.at_most(delay, steady_now()));
    co_return;
  }
  if (!std::exchange(queue_shown_, true)) {
    show({}, "all sources are busy; waiting for the first that has a place");
  }
  co_await async::sleep_for(std::clamp(*queued, delay, std::max(delay, kLongestAskDelay)));
  silence_.heard(steady_now());
}

async::Task<Result<void>> PullJob::transfer_once(std::shared_ptr<const planner::Plan> plan) {
  enter_phase("transfer");
  lines_before_ = lines_;
  batch_bytes_ = 0;
  for (auto& source : *sources_) source.bytes = 0;
  Transfer::Hooks hooks;
  hooks.tick = [this](const transport::BatchProgress& batch) {
    add_stats(batch);
    show(batch, "");
    batch_bytes_ = batch.bytes_done;
  };
  hooks.use_memory = [this](transport::HandshakeConnector& connector) { use_memory(connector); };
  hooks.note = [this](std::string note) { show({}, std::move(note)); };
  hooks.first_failure_of = [this](const std::string& transport) {
    return failed_transports_.insert(transport).second;
  };
  const std::shared_ptr<store::PendingVersion> destination(pending_, pending_->get());
  const std::shared_ptr<const planner::Plan> order_of = plan;
  Transfer transfer(environment_, resolved_.id, resolved_.root, std::move(plan), destination,
                    verified_, sources_, request_.transport, counters_, suspicion_, silence_,
                    std::move(hooks));
  if (environment_.share) {
    const std::uint64_t salt = swarm::salt_of(environment_.identity.incarnation);
    transfer.set_order(swarm::slice_order(*order_of, salt), salt);
  }
  auto done = co_await transfer_and_recruit(transfer);
  if (auto wrong = transfer.wrong_together(); wrong.slices > 0) wrong_together_ = wrong.where;
  judge_sources();
  finder_.report(done ? bytes_total_ : bytes_done_ + batch_bytes_, bytes_total_, source_reports());
  co_return done;
}

Result<TransferSummary> PullJob::summarize(const store::StoredVersion& stored) {
  const Manifest& manifest = stored.manifest;
  summary_.id = resolved_.id;
  summary_.root = manifest.checkpoint->root;
  summary_.layout = manifest.layout.digest();
  summary_.path = stored.directory;
  summary_.bytes = manifest.layout.payload_bytes();
  summary_.fetched_bytes = counters_->landed_bytes;
  summary_.refetched_bytes = counters_->rejected_bytes;
  summary_.tensors = count_tensors(manifest.checkpoint->tensors, manifest.layout);
  summary_.elapsed = std::chrono::duration_cast<std::chrono::milliseconds>(
      std::chrono::steady_clock::now() - started_);
  for (const auto& [key, line] : lines_) summary_.sources.push_back(line);
  return summary_;
}

}  // namespace rekindle::pull
