#include "recovery/pull/direct_transfer.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/this_coro.hpp>

#include "src/base/log.h"
#include "src/tensor/canonical.h"

namespace rekindle::pull {

using transport::SliceIndex;
using transport::SourceIndex;
using transport::Verdict;

namespace {

constexpr std::chrono::milliseconds kTick{200};
constexpr std::chrono::milliseconds kConnectsEnd{5'000};
// Without a word of the session for so long, its host's copy is fetched.
constexpr std::chrono::seconds kSessionSilence{60};
// A layout has files only. No such file is made.
constexpr const char* kSlotFile = "slot.safetensors";
// Each bucket has a table of the tensors.
constexpr std::uint64_t kMostTableEntries = std::uint64_t{1} << 26;

}  // namespace

Result<std::shared_ptr<const DirectPlan>> plan_direct(
    std::shared_ptr<const Checkpoint> checkpoint, const std::vector<PlanSource>& sources,
    const std::vector<bucket::DirectBucket>& buckets, std::uint64_t bucket_bytes) {
  const TensorSet& tensors = checkpoint->tensors;
  if (buckets.size() * tensors.size() > kMostTableEntries) {
    return fail(ErrorCode::kUnavailable, "{} buckets of {} tensors are too many", buckets.size(),
                tensors.size());
  }
  auto plan = std::make_shared<DirectPlan>();
  for (const auto& bucket : buckets) {
    TRY(auto layout, Layout::create(tensors, {{kSlotFile, bucket_bytes}}, bucket.entries));
    PlanInputs inputs;
    inputs.checkpoint = checkpoint;
    inputs.destination = std::make_shared<const Layout>(std::move(layout));
    inputs.sources = sources;
    TRY(auto made, plan_over(inputs));
    if (!made->missing().empty()) {
      return fail(ErrorCode::kUnavailable, "no source holds all tiles of bucket {}", bucket.bucket);
    }
    for (SliceIndex slice = 0; slice < made->slice_count(); ++slice) {
      if (made->kind(slice) == planner::SliceKind::kDirect) continue;
      return fail(ErrorCode::kUnavailable, "no source holds a tile of bucket {} in one piece",
                  bucket.bucket);
    }
    const SliceIndex count = made->slice_count();
    plan->buckets.push_back({bucket.bucket, std::move(made), plan->slices});
    plan->slices += count;
  }
  return std::shared_ptr<const DirectPlan>(std::move(plan));
}

Result<std::vector<SourceIndex>> direct_sources(const SourceTable& sources) {
  std::vector<SourceIndex> chosen;
  for (SourceIndex i = 0; i < sources.size(); ++i) {
    const ActiveSource& source = sources[i];
    if (source.peer == nullptr) {
      return fail(ErrorCode::kUnavailable, "this host has some of the bytes: {}", source.name);
    }
    if (source.held) {
      return fail(ErrorCode::kUnavailable, "{} is being filled, and trades with this host",
                  source.name);
    }
    chosen.push_back(i);
  }
  if (chosen.empty()) return fail(ErrorCode::kUnavailable, "there is no source");
  return chosen;
}

DirectTransfer::DirectTransfer(const PullEnvironment& environment, Silence& silence,
                               DirectReads& reads, Options options)
    : environment_(environment),
      reads_(reads),
      plan_(std::move(options.plan)),
      slots_(std::move(options.slots)),
      sources_(std::move(options.sources)),
      opener_(environment, silence, std::move(options.paths)),
      wrong_(sources_.size()),
      tick_(std::move(options.tick)),
      ask_again_(std::move(options.ask_again)),
      renew_every_(options.renew_every),
      moved_(environment.metrics, Landing::kGpu),
      connects_(environment.executor),
      renewals_(environment.executor),
      buckets_(plan_->buckets.size()),
      regions_(sources_.size()),
      senders_(plan_->slices) {}

DirectTransfer::~DirectTransfer() { batch_.reset(); }

// --- the engine's thread

std::size_t DirectTransfer::bucket_of(SliceIndex slice) const {
  const auto after =
      std::ranges::upper_bound(plan_->buckets, slice, {}, &DirectPlan::Bucket::first_slice);
  return static_cast<std::size_t>(after - plan_->buckets.begin()) - 1;
}

SliceIndex DirectTransfer::slices_in(std::size_t bucket) const {
  return plan_->buckets[bucket].plan->slice_count();
}

// Before its bucket has a slot, a slice has no candidate. Batch::candidates_added() tells of them.
transport::SliceInfo DirectTransfer::info(SliceIndex slice) const {
  const std::size_t bucket = bucket_of(slice);
  const auto& [number, plan, first] = plan_->buckets[bucket];
  transport::SliceInfo info;
  info.bytes = plan->slice_bytes(slice - first);
  const auto candidates = plan->candidates(slice - first);
  const std::lock_guard lock(mutex_);
  const bool waits = buckets_[bucket].state == BucketState::State::kWaiting;
  (waits ? info.prospects : info.candidates) = candidates;
  info.group_first = slice;
  info.key = slice;
  return info;
}

Result<void> DirectTransfer::expand(SliceIndex slice, SourceIndex source,
                                    std::vector<transport::ReadOp>& out) {
  const std::size_t bucket = bucket_of(slice);
  const auto& [number, plan, first] = plan_->buckets[bucket];
  plan->expand(slice - first, source, scratch_);
  const std::lock_guard lock(mutex_);
  std::byte* const slot =
      slots_.landing.addresses.data() + buckets_[bucket].slot * slots_.bucket_bytes;
  for (const auto& read : scratch_.reads) {
    if (read.remote_segment >= regions_[source].size()) {
      return fail(ErrorCode::kInternal, "bucket {} reads segment {} of a source that serves {}",
                  number, read.remote_segment, regions_[source].size());
    }
    out.push_back({.wr_id = 0,
                   .remote = regions_[source][read.remote_segment],
                   .remote_offset = read.copy.src_offset,
                   .local = slot + read.copy.dst_offset,
                   .run_bytes = read.copy.run_bytes,
                   .count = read.copy.count,
                   .remote_stride = read.copy.src_stride,
                   .local_stride = read.copy.dst_stride,
                   .in_device = true});
  }
  return {};
}

void DirectTransfer::landed(SliceIndex slice, SourceIndex source) {
  {
    const std::lock_guard lock(mutex_);
    senders_[slice] = source;
    const std::size_t bucket = bucket_of(slice);
    if (--buckets_[bucket].missing > 0) return;
    events_.push_back(Landed{bucket});
  }
  wake();
}

Error DirectTransfer::local_fault(SliceIndex slice) {
  return Error(ErrorCode::kUnavailable,
               fmt::format("a path does not reach the GPU's memory for bucket {}: the source is "
                           "staged, or its rail is not near",
                           plan_->buckets[bucket_of(slice)].number));
}

void DirectTransfer::on_source_lost(SourceIndex source, const Error& cause) {
  {
    const std::lock_guard lock(mutex_);
    events_.push_back(SourceLost{source, cause.message()});
  }
  wake();
}

void DirectTransfer::on_finished(const Result<void>& outcome) {
  {
    const std::lock_guard lock(mutex_);
    finished_ = outcome;
  }
  wake();
}

void DirectTransfer::wake() {
  boost::asio::post(environment_.executor, [changed = reads_.changed] { changed->notify(); });
}

// --- the control thread

async::Task<std::string> DirectTransfer::run() {
  transport::BatchOptions options;
  // Two buckets may have landed and not verified: a session wants the next one before it knows
  // about the last one.
  options.window_bytes = std::max(options.window_bytes, slots_.bucket_bytes * slots_.slots);
  options.prospect_timeout = kSessionSilence;
  options.idle_timeout = kSessionSilence;
  batch_ = environment_.engine->start(*this, *this, options);
  last_word_ = steady_now();
  for (SourceIndex i = 0; i < sources_.size(); ++i) {
    batch_->add_neighbour(i, i + 1);
    connects_.spawn("pull.direct_connect", connect(i));
  }
  renewals_.spawn("pull.direct_renew", renew_sessions());
  std::optional<std::string> why;
  for (;;) {
    auto finished = take_events();
    moved_.look(batch_->progress());
    if (finished) {
      if (!why) why = *finished ? "every bucket was read" : finished->error().message();
      break;
    }
    const bool cancelled = co_await async::is_cancelled();
    if (!why) {
      why = reason_to_stop(cancelled);
      if (why) batch_->cancel();
    }
    if (tick_) tick_();
    co_await reads_.changed->wait_until(steady_now() + kTick);
  }
  // Connects and renewals refer to this object. They end by their own deadlines.
  while (!co_await connects_.close(kConnectsEnd)) {
  }
  while (!co_await renewals_.close(kConnectsEnd)) {
  }
  batch_.reset();
  co_await opener_.close_sessions(sources_);
  co_return *why;
}

// nullopt: the reads go on.
std::optional<std::string> DirectTransfer::reason_to_stop(bool cancelled) {
  if (auto wrong = take_wishes()) return wrong;
  if (reads_.ended()) return *reads_.ended();
  if (cancelled) return "the pull was cancelled";
  if (living_.empty() && connects_.size() == 0) return last_loss_;
  if (steady_now() - last_word_ > kSessionSilence) return "the session wants nothing";
  return std::nullopt;
}

async::Task<void> DirectTransfer::connect(SourceIndex index) {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  ActiveSource& source = sources_[index];
  Result<void> ready = co_await opener_.renew(source);
  if (ready) ready = co_await opener_.open_session(source);
  Result<PathOpener::Opened> opened = fail(ErrorCode::kUnavailable, "");
  if (ready) {
    opened = co_await opener_.open_paths(source);
  } else {
    opened = fail(std::move(ready).error());
  }
  if (!opened) {
    log::info("pull.direct_source_lost", "source", source.name, "cause", opened.error());
    last_loss_ = opened.error().message();
    reads_.changed->notify();
    co_return;
  }
  {
    const std::lock_guard lock(mutex_);
    regions_[index] = std::move(opened->regions);
  }
  living_.set(index);
  batch_->add_paths(index, std::move(opened->paths));
}

async::Task<void> DirectTransfer::renew_sessions() {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  for (;;) {
    co_await async::sleep_for(renew_every_);
    if (co_await async::is_cancelled()) co_return;
    if (ask_again_) {
      auto asking = ask_again_();
      const auto news = co_await std::move(asking);
      if (co_await async::is_cancelled()) co_return;
      refresh_grants(sources_, news);
    }
    for (const ActiveSource& source : sources_) {
      if (!source.session || !source.peer->connected()) continue;
      boost::asio::co_spawn(environment_.executor, opener_.keep_alive(source),
                            boost::asio::detached);
    }
  }
}

// Returns the outcome of the batch once it has ended.
std::optional<Result<void>> DirectTransfer::take_events() {
  std::deque<Event> events;
  std::optional<Result<void>> finished;
  {
    const std::lock_guard lock(mutex_);
    events.swap(events_);
    finished = finished_;
  }
  for (const Event& event : events) {
    if (const auto* const landed = std::get_if<Landed>(&event)) {
      last_word_ = steady_now();
      reads_.landed(plan_->buckets[landed->bucket].number);
    } else {
      const auto& lost = std::get<SourceLost>(event);
      living_.reset(lost.source);
      last_loss_ = lost.cause;
      log::info("pull.direct_source_lost", "source", sources_[lost.source].name, "cause",
                lost.cause);
    }
  }
  return finished;
}

std::optional<std::string> DirectTransfer::take_wishes() {
  while (const auto wish = reads_.take_wish()) {
    last_word_ = steady_now();
    const auto found = std::ranges::find(plan_->buckets, wish->bucket, &DirectPlan::Bucket::number);
    if (found == plan_->buckets.end() || wish->slot >= slots_.slots) {
      return fmt::format("bucket {} in slot {} is none that was offered", wish->bucket, wish->slot);
    }
    const auto bucket = static_cast<std::size_t>(found - plan_->buckets.begin());
    // The session counts only buckets before this one.
    if (wish->verified > bucket) {
      return fmt::format("bucket {} is wanted after it has verified", wish->bucket);
    }
    accept_before(wish->verified);
    BucketState state;
    {
      const std::lock_guard lock(mutex_);
      state = buckets_[bucket];
    }
    const bool waits = state.state == BucketState::State::kWaiting;
    if (waits != wish->wrong.empty() || (!waits && state.missing > 0)) {
      return fmt::format("bucket {} is wanted out of turn", wish->bucket);
    }
    if (waits) {
      assign(bucket, wish->slot);
    } else if (!read_again(bucket, wish->wrong)) {
      return fmt::format("bucket {} has none of the wrong tiles", wish->bucket);
    }
  }
  return std::nullopt;
}

void DirectTransfer::accept_before(std::uint64_t count) {
  for (; accepted_ < std::min<std::uint64_t>(count, buckets_.size()); ++accepted_) {
    {
      const std::lock_guard lock(mutex_);
      buckets_[accepted_].state = BucketState::State::kVerified;
    }
    const SliceIndex first = plan_->buckets[accepted_].first_slice;
    for (SliceIndex i = 0; i < slices_in(accepted_); ++i) {
      batch_->resolve(first + i, Verdict::kAccept);
    }
  }
}

void DirectTransfer::assign(std::size_t bucket, std::uint32_t slot) {
  const auto& [number, plan, first] = plan_->buckets[bucket];
  {
    const std::lock_guard lock(mutex_);
    buckets_[bucket] = {BucketState::State::kReading, slot, plan->slice_count()};
  }
  for (SourceIndex source = 0; source < sources_.size(); ++source) {
    std::vector<SliceIndex> gained;
    for (SliceIndex i = 0; i < plan->slice_count(); ++i) {
      if (plan->candidates(i).test(source)) gained.push_back(first + i);
    }
    if (!gained.empty()) batch_->candidates_added(source, std::move(gained));
  }
}

// The slices of a group bring parts of the same tiles. If several sources sent them, nobody can
// tell whose part was wrong.
bool DirectTransfer::read_again(std::size_t bucket, std::vector<TileIndex> wrong) {
  const auto& [number, plan, first] = plan_->buckets[bucket];
  std::ranges::sort(wrong);
  std::vector<std::pair<SliceIndex, Verdict>> verdicts;
  std::vector<planner::TileWork> works;
  {
    const std::lock_guard lock(mutex_);
    for (SliceIndex i = 0; i < plan->slice_count(); ++i) {
      plan->tiles(i, works);
      const auto bad = std::ranges::find_if(works, [&wrong](const planner::TileWork& work) {
        return std::ranges::binary_search(wrong, work.tile);
      });
      if (bad == works.end()) continue;
      const SliceIndex begin = plan->group_first(i);
      const SliceIndex end = begin + plan->group_size(i);
      const SourceIndex sender = senders_[first + begin];
      bool one_sender = true;
      for (SliceIndex k = begin; k < end; ++k) one_sender &= senders_[first + k] == sender;
      for (SliceIndex k = begin; k < end; ++k) {
        verdicts.emplace_back(first + k, one_sender ? Verdict::kRetry : Verdict::kUndecided);
      }
      log::warn("pull.direct_wrong", "bucket", number, "tile", bad->tile, "source",
                one_sender ? sources_[sender].name : "several together");
      if (!one_sender) continue;
      ++wrong_[sender].slices;
      wrong_[sender].where = fmt::format("tile {}", bad->tile);
    }
    buckets_[bucket].missing = static_cast<SliceIndex>(verdicts.size());
  }
  for (const auto& [slice, verdict] : verdicts) batch_->resolve(slice, verdict);
  return !verdicts.empty();
}

}  // namespace rekindle::pull
