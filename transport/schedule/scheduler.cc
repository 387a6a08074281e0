#include "transport/schedule/scheduler.h"

#include <utility>

namespace rekindle::transport {

namespace {

// A longer time between ticks means that this process was stopped.
constexpr Duration kPauseBetweenTicks = std::chrono::milliseconds(400);

}  // namespace

Scheduler::Scheduler(SliceIndex slice_count, SliceTable::InfoOf info_of,
                     const BatchOptions& options, TimePoint now)
    : options_(options),
      slices_(slice_count, std::move(info_of)),
      sources_(options_),
      reroutes_(slices_, sources_),
      staging_(slices_, options_.starvation_timeout),
      picker_(slices_, sources_, reroutes_, staging_, options_),
      gate_(2 * options_.window_bytes),
      watch_(sources_, options_),
      stragglers_(slices_, sources_, reroutes_, options_),
      starvation_(slices_, sources_, options_),
      last_tick_(now) {
  if (slice_count == 0) finish({});
}

// --- sources and paths

PathId Scheduler::add_path(SourceIndex source, std::string description, TimePoint now,
                           std::string home, std::string transport) {
  const PathId id =
      sources_.add_path(source, std::move(description), std::move(home), std::move(transport));
  watch_.path_added(source, now);
  picker_.look_again(source);
  starvation_.path_added(now);
  return id;
}

void Scheduler::remove_source(SourceIndex source, const Error& cause) {
  if (sources_.source(source).presence == BatchSources::Presence::kPresent) {
    sources_.lose(source, cause);
  }
}

void Scheduler::path_progress(PathId path, std::uint64_t bytes_landed, TimePoint now) {
  if (sources_.bytes_landed(path, bytes_landed)) watch_.byte_landed(path, now);
}

void Scheduler::add_neighbour(SourceIndex source, std::uint64_t order_seed) {
  picker_.add_neighbour(source, order_seed);
  starvation_.prospects_changed();
}

void Scheduler::candidates_added(SourceIndex source, std::span<const SliceIndex> slices,
                                 TimePoint now) {
  picker_.candidates_added(source, slices);
  if (!slices.empty()) starvation_.candidates_gained(now);
  starvation_.prospects_changed();
}

// --- slices

void Scheduler::detach(PathId path, SliceIndex slice, TimePoint now) {
  sources_.unpost(path, slice, slices_.info(slice).bytes, now);
}

void Scheduler::slice_done(PathId id, SliceIndex slice, OpStatus status, TimePoint now,
                           const std::string& why) {
  detach(id, slice, now);
  if (status == OpStatus::kOk) {
    watch_.slice_landed(id, now);
    sources_.count_landed(id, slices_.info(slice).bytes);
    slices_.land(slice);
    gate_.landed(slice, slices_.info(slice).bytes, all_landed_bytes(), now);
    return;
  }
  sources_.count_failed(id);
  staging_.freed();
  const auto& path = sources_.path(id);
  const SourceIndex source = path.source();
  const std::string cause = fmt::format("{}: slice {}: {}", path.stats.description, slice,
                                        why.empty() ? to_string(status) : why);
  const Ruling ruling = rule_on(status, path.slow);
  reroute(slice, source, ruling, cause);
  if (ruling.blame == Ruling::Blame::kNobody || verdict_) return;
  sources_.count_fault(source);
  switch (ruling.blame) {
    case Ruling::Blame::kSourceIsLost:
      sources_.lose(source, {to_error_code(status), cause});
      break;
    case Ruling::Blame::kSource:
      sources_.strike(source, cause);
      break;
    case Ruling::Blame::kPath:
    case Ruling::Blame::kNobody:
      sources_.abort_path(
          id, to_error_code(status),
          why.empty() ? fmt::format("slice {}: {}", slice, to_string(status)) : why);
      break;
  }
}

void Scheduler::reroute(SliceIndex slice, SourceIndex source, const Ruling& ruling,
                        const std::string& cause) {
  const SliceInfo info = slices_.info(slice);
  slices_.reopen(slice);
  staging_.group_changed(info);
  starvation_.slice_reopened(info);
  const int attempts = reroutes_.failed(slice, source, ruling);
  if (!ruling.counts_as_attempt || attempts < options_.max_attempts) return;
  fail_batch({ErrorCode::kUnavailable,
              fmt::format("slice {} failed {} times, the last time: {}", slice, attempts, cause)});
}

void Scheduler::unpost(PathId path, SliceIndex slice, TimePoint now) {
  detach(path, slice, now);
  slices_.reopen(slice);
  staging_.group_changed(slices_.info(slice));
  staging_.refused(slice, now);
  reroutes_.put_back(slice);
}

void Scheduler::resolve(SliceIndex slice, Verdict verdict, TimePoint now) {
  if (slice >= slices_.count() || slices_.state(slice) != SliceTable::State::kLanded) return;
  const SourceIndex source = slices_.source_of(slice);
  staging_.freed();
  if (verdict == Verdict::kAccept) {
    slices_.accept(slice);
    gate_.resolved(slice, all_landed_bytes(), now);
    reroutes_.accepted(slice);
    sources_.count_accepted(source, slices_.info(slice).bytes);
    if (slices_.done() == slices_.count()) finish({});
    return;
  }
  gate_.resolved(slice, all_landed_bytes(), now);
  const bool wrong = verdict == Verdict::kRetry;
  const std::string cause = fmt::format("slice {} from source {} {}", slice, source,
                                        wrong ? "does not verify" : "could not be verified");
  if (wrong) sources_.count_fault(source);
  reroute(slice, source, rule_on(verdict), cause);
  if (wrong && !verdict_) sources_.strike(source, cause);
}

// --- what to post

std::optional<Scheduler::Post> Scheduler::post_from(SourceIndex source, TimePoint now) {
  if (!sources_.path_with_room(source, 0)) return std::nullopt;
  const auto slice = picker_.pick(source);
  if (!slice) return std::nullopt;
  const SliceInfo info = slices_.info(*slice);
  const auto path = sources_.path_with_room(source, info.bytes);
  if (!path || stragglers_.others_finish_sooner(source, *slice, info)) return std::nullopt;
  watch_.slice_will_be_posted(*path, now);
  sources_.post(*path, *slice, info.bytes, now);
  slices_.post(*slice, source);
  staging_.group_changed(info);
  starvation_.slice_posted();
  next_source_ = (source + 1) % kMaxSources;
  return Post{*slice, source, *path};
}

// Sources take turns. Neighbours come before sources that alone hold some slices.
std::optional<Scheduler::Post> Scheduler::next_post(TimePoint now) {
  if (verdict_ || slices_.open() == 0 || staging_.nothing_may_be_posted() || verification_lags()) {
    return std::nullopt;
  }
  const SourceMask neighbours = picker_.neighbours();
  for (const SourceMask group : {neighbours, sources_.living() & ~neighbours}) {
    const SourceMask before = group & SourceMask::first(next_source_);
    for (const SourceMask part : {group & ~before, before}) {
      for (SourceIndex source = part.next(); source < kMaxSources; source = part.next(source + 1)) {
        if (auto post = post_from(source, now)) return post;
      }
    }
  }
  return std::nullopt;
}

// --- time

void Scheduler::tick(TimePoint now) {
  const Duration elapsed = now - std::exchange(last_tick_, now);
  if (elapsed > kPauseBetweenTicks) {
    forgive_pause(elapsed);
    return;
  }
  sources_.sample_goodput(elapsed);
  if (verdict_) return;
  for (const auto& path : watch_.overdue(now)) sources_.abort_path(path.path, path.code, path.why);
  steal(now);
  if (auto error = staging_.tick(now)) fail_batch(std::move(*error));
  check_starvation(now);
}

// This process was stopped, not the peers: no deadline ran meanwhile.
void Scheduler::forgive_pause(Duration pause) {
  watch_.forgive(pause);
  staging_.forgive(pause);
  starvation_.forgive(pause);
}

void Scheduler::steal(TimePoint now) {
  if (staging_.is_short() || verification_lags()) return;  // sources idle for another reason
  // A trading puller waits for slices that its neighbours will gain.
  if (!picker_.neighbours().empty() && slices_.open() > 0) return;
  for (SourceIndex thief = 0; thief < kMaxSources; ++thief) {
    if (!stragglers_.can_steal(thief) || picker_.pick(thief)) continue;
    const auto victim = stragglers_.find_victim(thief);
    if (!victim) continue;
    const auto& path = sources_.path(*victim);
    stolen_ += path.slices.size();
    // A source that still sends is only slow. A silent one would have missed its deadline soon.
    if (watch_.is_sending(path.source(), now)) {
      sources_.abort_slow_path(*victim, ErrorCode::kUnavailable,
                               "slower than an idle source: its last slices were taken");
    } else {
      sources_.abort_slow_path(*victim, ErrorCode::kTimeout,
                               "silent while another source is idle: its last slices were taken");
    }
    return;
  }
}

void Scheduler::check_starvation(TimePoint now) {
  const bool waiting = slices_.open() > 0 && !slices_.any_under_way() && !staging_.is_short() &&
                       !picker_.neighbours().empty();
  if (auto error = starvation_.tick(waiting, now)) fail_batch(std::move(*error));
}

std::optional<std::uint64_t> Scheduler::take_starved() {
  const auto starving = starvation_.take();
  return verdict_ ? std::nullopt : starving;
}

// --- the end

void Scheduler::fail_batch(Error error) {
  if (!verdict_) finish(fail(std::move(error)));
}

void Scheduler::finish(Result<void> outcome) {
  verdict_ = std::move(outcome);
  sources_.end_batch();
}

std::optional<Result<void>> Scheduler::outcome() const {
  return slices_.posted() == 0 ? verdict_ : std::nullopt;
}

BatchProgress Scheduler::progress() const {
  BatchProgress progress;
  progress.slices_done = slices_.done();
  progress.bytes_done = slices_.done_bytes();
  progress.retried_slices = reroutes_.count();
  progress.stolen_slices = stolen_;
  progress.last_byte = watch_.last_byte();
  sources_.report(progress, last_tick_);
  return progress;
}

}  // namespace rekindle::transport
