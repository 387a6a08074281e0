#include "recovery/device/process/spreading.h"

#include <algorithm>
#include <utility>

#include "src/base/clock.h"
#include "src/base/log.h"

namespace rekindle::device {

namespace {

constexpr std::chrono::milliseconds kPinTick{1};
constexpr std::chrono::hours kIdle{1};

void add_tiles(const bucket::Plan& plan, TileSet& tiles) {
  for (std::size_t index = 0; index < plan.size(); ++index) {
    for (const auto& [begin, end] : plan.tiles(index)) tiles.set_range(begin, end);
  }
}

std::chrono::microseconds between(TimePoint from, TimePoint to) {
  return std::chrono::duration_cast<std::chrono::microseconds>(to - from);
}

}  // namespace

Spreading::Spreading(const SessionMeans& means, SpreadOrder order)
    : means_(means),
      order_(std::move(order)),
      deliver_(means_.worker, means_.slots.count(), means_.times.round_release, means_.version),
      ordered_(steady_now()) {}

// The queued work must end before the pipeline does.
Spreading::~Spreading() {
  if (collective_ != nullptr) collective_->abort();
}

Result<bool> Spreading::begin() {
  auto begun = plan();
  if (begun) begun = want_share();
  if (begun) begun = meet();
  if (begun) begun = start();
  if (begun) return true;
  if (collective_ != nullptr) collective_->abort();
  spreading_ = false;
  say_over(std::move(begun).error());
  if (deliver_.lost()) return fail(*deliver_.lost());
  return false;
}

Result<void> Spreading::plan() {
  if (order_.bucket_bytes > means_.slots.bucket_bytes) {
    return fail(ErrorCode::kInvalid, "buckets of {} bytes are ordered, there is room for {}",
                order_.bucket_bytes, means_.slots.bucket_bytes);
  }
  const auto shares = static_cast<std::uint32_t>(order_.owners.size());
  const auto pieces = means_.contents.pieces();
  if (!order_.pieces.empty() && order_.pieces.back().second > pieces.size()) {
    return fail(ErrorCode::kInvalid, "piece {} is ordered, the session has {}",
                order_.pieces.back().second - 1, pieces.size());
  }
  const auto share_of = bucket::share_out(pieces, shares, order_.pieces);
  TRY(plan_, bucket::RoundPlan::create(means_.contents, share_of, shares, order_.bucket_bytes,
                                       bucket::kSealRoom, means_.slots.bucket_bytes));
  return {};
}

// Has this host fetch the bytes of the own share. They come while the ranks meet.
Result<void> Spreading::want_share() {
  const auto own = std::ranges::find(order_.owners, order_.rank);
  if (own == order_.owners.end()) return {};
  const auto share = static_cast<std::uint32_t>(own - order_.owners.begin());
  if (std::ranges::find(order_.fetched, share) == order_.fetched.end()) return {};
  TileSet wanted(means_.contents.tiles().tile_count());
  add_tiles(plan_->plan_of(share), wanted);
  means_.say(ShareWanted{order_.session, wanted.ranges()});
  return {};
}

// Fetches from this host's copy, as far as its tiles have verified.
Result<std::unique_ptr<bucket::SegmentFetch>> Spreading::fetch_of(const bucket::Plan& plan) const {
  auto fetch = std::make_unique<bucket::SegmentFetch>(plan, means_.pinner, means_.segments,
                                                      means_.contents.tiles().tile_count());
  TRY_VOID(fetch->mark_ready(means_.told.ready));
  if (means_.told.complete) fetch->mark_all_ready();
  return fetch;
}

Result<void> Spreading::meet() {
  TRY(collective_, means_.communicators->take(means_.device, order_));
  const TimePoint give_up = ordered_ + means_.times.meet;
  for (;;) {
    const TimePoint now = steady_now();
    TRY_VOID(hear(now));
    TRY(const bool met, collective_->settled());
    if (met) break;
    if (now >= give_up) {
      return fail(ErrorCode::kTimeout, "not all {} ranks of communicator {} have met in {} ms",
                  order_.ranks, order_.communicator, means_.times.meet.count());
    }
    deliver_.send(now);
    if (const auto pause = pause_before_asking(now - ordered_)) {
      sleep_for(std::min<Duration>(*pause, give_up - now), deliver_.worker(), means_.mailbox);
    }
  }
  met_ = steady_now();
  return {};
}

Result<void> Spreading::start() {
  std::optional<bucket::RoundFetch::Own> own;
  for (std::uint32_t share = 0; share < plan_->shares(); ++share) {
    if (order_.owners[share] != order_.rank) continue;
    TRY(auto fetch, fetch_of(plan_->plan_of(share)));
    fetch->wait_for_no_pins();
    fetches_.push_back(std::move(fetch));
    TRY(seal_,
        bucket::RoundSeal::create(means_.device, *plan_, means_.contents, means_.segments, share));
    own.emplace(bucket::RoundFetch::Own{share, *fetches_.back(), seal_.get()});
  }
  fetch_.emplace(*plan_, own);
  const auto fill = order_.owners_fetch ? means_.times.round_fetch : means_.times.round_fill;
  spread_.emplace(
      *collective_, plan_->share_bytes(), order_.owners,
      bucket::RoundSpread::Patience{fill, [this] { return means_.mailbox.told_to_stop(); }});
  means_.worker.bring([this](std::size_t index) { return plan_->parts(index); });
  pipeline_ = std::make_unique<bucket::Pipeline>(
      means_.device, plan_->size(), means_.slots, *fetch_, &*spread_, deliver_,
      bucket::PipelineOptions{means_.times.release, fill});
  TRY_VOID(start_verifying());
  TRY_VOID(pipeline_->start());
  return start_keeping();
}

Result<void> Spreading::start_verifying() {
  TRY(verify_, bucket::RoundVerify::create({means_.device, *plan_, means_.contents, means_.leaves},
                                           means_.slots.count(), [this] { return own_copy(); }));
  return pipeline_->verify_with(*verify_);
}

// Fetches each share from this host's copy, and the pieces without a share.
Result<bucket::RoundTail::Fetches> Spreading::own_copy() const {
  bucket::RoundTail::Fetches fetches;
  for (std::uint32_t share = 0; share < plan_->shares(); ++share) {
    TRY(auto fetch, fetch_of(plan_->plan_of(share)));
    fetches.push_back(std::move(fetch));
  }
  if (plan_->rest() != nullptr) {
    TRY(auto fetch, fetch_of(*plan_->rest()));
    fetches.push_back(std::move(fetch));
  }
  return fetches;
}

// Tiles that have verified are final: others may read them, so they are not written again.
Result<void> Spreading::start_keeping() {
  const std::uint64_t rate = means_.times.keep_bytes_per_second;
  if (order_.keep_count == 0 || rate == 0 || means_.told.complete) return {};
  TileSet final_tiles(means_.contents.tiles().tile_count());
  for (const auto& [begin, end] : means_.told.ready) {
    if (begin >= end || end > final_tiles.size()) return {};
    final_tiles.set_range(begin, end);
  }
  // This host fetches these, and writes them meanwhile.
  for (const std::uint32_t share : order_.fetched) add_tiles(plan_->plan_of(share), final_tiles);
  // The round brings only a part of these.
  if (plan_->rest() != nullptr) add_tiles(*plan_->rest(), final_tiles);
  bucket::SegmentKeep::Limits limits{bucket::Allowance(rate, met_)};
  if (order_.ranks_here < order_.ranks) {
    // A ring of n ranks sends n - 1 of n bytes from host to host. The devices here share that.
    const std::uint64_t sent = plan_->bucket_bytes() / order_.ranks * (order_.ranks - 1);
    limits.link.emplace(bucket::SegmentKeep::Link{
        bucket::Allowance(means_.times.link_bytes_per_second, met_), sent / order_.ranks_here});
  }
  keep_.emplace(means_.device, *plan_, means_.pinner, means_.segments, std::move(final_tiles),
                bucket::SegmentKeep::Which{order_.keep_index, order_.keep_count}, limits,
                means_.slots.count());
  TRY_VOID(keep_->start());
  pipeline_->keep_with(*keep_);
  return {};
}

// Must happen before the agent hears that the round is over, because others write there afterwards.
Result<void> Spreading::end_keeping() {
  if (!keep_) return {};
  auto drained = keep_->drain(steady_now() + means_.times.drain);
  if (drained) return {};
  return fail(ErrorCode::kInternal, "{} does not end what it copies to host memory: {}",
              means_.device.name(), drained.error().message());
}

// An error ends the round for this rank.
Result<void> Spreading::hear(TimePoint now) {
  auto news = means_.mailbox.take();
  means_.told.ready.insert(means_.told.ready.end(), news.ready.begin(), news.ready.end());
  means_.told.complete = means_.told.complete || news.complete;
  for (auto& fetch : fetches_) {
    // The agent's message is wrong, so the worker cannot be served. The round can go on.
    if (auto marked = fetch->mark_ready(news.ready); !marked) {
      deliver_.lose(std::move(marked).error());
    }
    if (news.complete) fetch->mark_all_ready();
  }
  if (news.ended) deliver_.lose(std::move(*news.ended));
  deliver_.hear(now);
  if (spreading_ && news.stop) return fail(Error(ErrorCode::kStale, std::move(*news.stop)));
  return {};
}

Result<void> Spreading::deliver_all() {
  for (;;) {
    const TimePoint now = steady_now();
    const bool had_worker = !deliver_.lost();
    auto state = advance(now);
    if (!state && !spreading_) return fail(std::move(state).error());
    if (!state) {
      TRY_VOID(leave(std::move(state).error()));
      continue;
    }
    if (deliver_.lost() && !spreading_) return fail(*deliver_.lost());
    if (!spreading_ && !tail_ && plan_->rest() != nullptr) {
      TRY_VOID(start_tail());
      continue;
    }
    if (*state == bucket::Pipeline::State::kDone) return {};
    tell_progress(now);
    // The buckets of a lost worker are free now.
    if (had_worker && deliver_.lost()) continue;
    wait(*state, now);
  }
}

Result<bucket::Pipeline::State> Spreading::advance(TimePoint now) {
  TRY_VOID(hear(now));
  TRY(const auto state, pipeline_->step(now));
  TRY_VOID(check_share(state, now));
  if (spreading_) {
    // `now` is older than the worker's messages that were just read.
    deliver_.check(now);
    if (pipeline_->handed_over() == plan_->size() && !pipeline_->awaits_keep()) finish();
  }
  deliver_.send(now);
  return state;
}

// Without a bucket on its way no other deadline runs.
Result<void> Spreading::check_share(bucket::Pipeline::State state, TimePoint now) {
  const bool lacks = spreading_ && !order_.fetched.empty() &&
                     state == bucket::Pipeline::State::kFetching &&
                     pipeline_->handed_over() < plan_->size();
  if (!lacks || lacking_since_ == TimePoint{}) lacking_since_ = lacks ? now : TimePoint{};
  if (!lacks || now - lacking_since_ < means_.times.round_fetch) return {};
  return fail(ErrorCode::kTimeout,
              "this host has not fetched the next bucket of its share in {} ms",
              means_.times.round_fetch.count());
}

// The communicator is kept before the agent hears of the end: the next round may need it at once.
void Spreading::finish() {
  means_.communicators->keep(means_.device.id(), order_.communicator, std::move(collective_));
  spreading_ = false;
  say_over(std::nullopt);
}

// The remaining buckets come from the segments. If nobody tells the other ranks that this one
// aborts, their deadlines do.
Result<void> Spreading::leave(Error why) {
  collective_->abort();
  spreading_ = false;
  log::warn("device.round_left", "communicator", order_.communicator, "delivered",
            pipeline_->handed_over(), "of", plan_->size(), "why", why.message());
  TRY_VOID(end_keeping());
  say_over(std::move(why));
  if (deliver_.lost()) return fail(*deliver_.lost());
  return start_tail();
}

// Goes on with what the round has not brought.
Result<void> Spreading::start_tail() {
  // Lost buckets of the own share are fetched again.
  const auto own = std::exchange(fetches_, {});
  TRY(fetches_, own_copy());
  tail_.emplace(*plan_, fetches_, pipeline_->handed_over());
  deliver_.leave_round();
  means_.worker.bring([this](std::size_t index) { return tail_->parts(index); });
  auto alone =
      pipeline_->go_on_without_spread(tail_->size(), *tail_, steady_now() + means_.times.drain);
  if (!alone) {
    return fail(ErrorCode::kInternal, "{} does not end what a round has queued: {}",
                means_.device.name(), alone.error().message());
  }
  collective_.reset();
  if (means_.verify_upload) TRY_VOID(start_verifying_tail());
  return {};
}

// The round's digests are freed first, because the device may lack memory for both.
Result<void> Spreading::start_verifying_tail() {
  refilled_in_round_ = verify_->refilled();
  verify_.reset();
  std::size_t tiles = 0;
  for (std::uint32_t share = 0; share < plan_->shares(); ++share) {
    tiles = std::max(tiles, plan_->plan_of(share).most_tiles());
  }
  if (plan_->rest() != nullptr) tiles = std::max(tiles, plan_->rest()->most_tiles());
  auto verify = bucket::UploadVerify::create(
      {means_.device, *tail_, means_.contents, means_.leaves, means_.segments},
      means_.slots.count(), tiles, [this](std::size_t index) { return tail_->parts(index); });
  if (!verify) return fail(cannot_verify(means_.device, verify.error()));
  tail_verify_ = std::move(*verify);
  return pipeline_->verify_with(*tail_verify_);
}

std::uint64_t Spreading::refilled() const {
  const std::uint64_t of_round = verify_ != nullptr ? verify_->refilled() : refilled_in_round_;
  return of_round + (tail_verify_ != nullptr ? tail_verify_->refilled() : 0);
}

void Spreading::say_over(std::optional<Error> error) {
  SpreadOver over;
  over.session = order_.session;
  over.error = std::move(error);
  if (pipeline_ != nullptr) {
    over.buckets = pipeline_->handed_over();
    over.verify = std::chrono::duration_cast<std::chrono::microseconds>(pipeline_->verifying());
  }
  over.bytes = means_.worker.bytes();
  over.worker_lost = deliver_.lost();
  over.more = !over.error && plan_ && plan_->rest() != nullptr;
  const TimePoint now = steady_now();
  const bool met = met_ != TimePoint{};
  if (met) over.elapsed = between(met_, now);
  over.meet = between(ordered_, met ? met_ : now);
  if (keep_) {
    over.kept = keep_->kept();
    over.kept_bytes = keep_->kept_bytes();
  }
  means_.say(std::move(over));
}

void Spreading::tell_progress(TimePoint now) {
  const std::uint64_t bytes = means_.worker.bytes();
  if (!spreading_ || bytes == told_bytes_ || now - told_at_ < means_.times.progress) return;
  told_at_ = now;
  told_bytes_ = bytes;
  means_.say(SpreadProgress{order_.session, bytes});
}

void Spreading::wait(bucket::Pipeline::State state, TimePoint now) const {
  Duration pause = kIdle;
  const auto at_most = [&](std::optional<TimePoint> due) {
    if (due) pause = std::min<Duration>(pause, *due - now);
  };
  at_most(pipeline_->deadline());
  if (spreading_) at_most(deliver_.deadline());
  if (lacking_since_ != TimePoint{}) at_most(lacking_since_ + means_.times.round_fetch);
  if (deliver_.worker() != nullptr) at_most(means_.worker.channel().receive_deadline());
  if (deliver_.awaits_device() || pipeline_->awaits_hand_over() || pipeline_->awaits_keep()) {
    const auto asked = pause_before_asking(now - deliver_.last_change());
    if (!asked) return;
    pause = std::min(pause, *asked);
  } else if (state == bucket::Pipeline::State::kFetching &&
             !all_settled(means_.pinner, means_.segments)) {
    pause = std::min<Duration>(pause, kPinTick);
  }
  sleep_for(pause, deliver_.worker(), means_.mailbox);
}

}  // namespace rekindle::device
