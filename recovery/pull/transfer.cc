#include "recovery/pull/transfer.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/post.hpp>

#include "recovery/rpc/grants.h"
#include "src/async/offload.h"
#include "src/base/log.h"

namespace rekindle::pull {

using transport::SourceIndex;

namespace {

constexpr std::chrono::milliseconds kTick{200};
// When a tick is late by more than this, the process was stopped.
constexpr std::chrono::milliseconds kPause{500};
constexpr std::chrono::milliseconds kDrainDeadline{10000};

}  // namespace

std::string wrong_bytes_cause(const std::string& where) {
  return fmt::format("quarantined: it sent wrong bytes of {}", where);
}

Transfer::Transfer(const PullEnvironment& environment, Silence& silence, Options options)
    : environment_(environment),
      options_(std::move(options)),
      source_table_(options_.sources),
      sources_(*source_table_),
      silence_(silence),
      proofs_(
          std::make_shared<ProofCalls>(environment.executor, source_table_, options_.paths.root)),
      slices_(options_.work, *environment.digest_pool,
              [calls = proofs_](SourceIndex source, std::vector<planner::TileWork> items,
                                ProofCalls::Done done) {
                calls->ask(source, std::move(items), std::move(done));
              }),
      opener_(environment, silence, options_.paths),
      follower_(environment.executor, sources_, slices_, silence),
      moved_(environment.metrics),
      changed_(std::make_shared<async::Notifier>(environment.executor)),
      connects_(environment.executor) {}

Transfer::~Transfer() {
  follower_.stop();
  slices_.bind(nullptr);
  batch_.reset();  // cancels what still runs and waits for the drain
}

async::Task<Result<void>> Transfer::run() {
  last_look_ = steady_now();
  transport::BatchOptions options;
  options.order = options_.order;
  options.order_seed = options_.order_seed;
  options.keeps_order = options_.keeps_order;
  options.numa_node = slices_.numa_node();
  batch_ = environment_.engine->start(slices_, *this, options);
  slices_.bind(batch_.get());
  for (SourceIndex i = 0; i < sources_.size(); ++i) {
    if (sources_[i].held) follower_.add(i);
    start_connecting(i);
  }
  auto outcome = co_await run_batch();
  follower_.stop();
  slices_.bind(nullptr);
  batch_.reset();
  CO_TRY_VOID(co_await drain_verifications());
  co_await opener_.close_sessions(sources_);
  for (SourceIndex i = 0; i < sources_.size(); ++i) {
    sources_[i].wrong = slices_.verifier().wrong_bytes(i);
  }
  const bool unavailable = !outcome && outcome.error().code() == ErrorCode::kUnavailable;
  if (!unavailable || !policy_.starved()) co_return outcome;
  co_return fail(ErrorCode::kUnavailable, "no source is left for a part of {}",
                 options_.paths.id.to_string());
}

// Returns when the batch has ended and no connect is under way. Connects refer to this object, so
// they are cut short and awaited.
async::Task<Result<void>> Transfer::run_batch() {
  while (true) {
    auto finished = take_events();
    take_progress();
    const bool cancelled = co_await async::is_cancelled();
    const auto step = policy_.next(finished.has_value(), cancelled);
    if (step.ended) co_return std::move(*finished);
    if (step.stop_connecting) stop_connecting();
    if (step.cancel_batch) batch_->cancel();
    keep_peers_alive();
    if (step.join_rails) join_missing_rails();
    co_await changed_->wait_until(steady_now() + kTick);
  }
}

void Transfer::take_progress() {
  const TimePoint now = steady_now();
  const auto progress = batch_->progress();
  const Duration gap = now - std::exchange(last_look_, now);
  if (gap > kTick + kPause) silence_.forgive(gap);
  silence_.heard(progress.last_byte);
  moved_.look(progress);
  for (const auto& [source, rail] : rails_.update(progress)) {
    log::info("pull.rail_lost", "source", sources_[source].name, "rail", rail);
  }
  if (options_.tick) options_.tick(progress);
}

// Verifications read the destination and mark its tiles, and may still wait for a source's proofs.
// Closing the peers that are lost (all of them after a cancel) ends their calls.
async::Task<Result<void>> Transfer::drain_verifications() {
  const bool cancelled = co_await async::is_cancelled();
  for (const auto& source : sources_) {
    if (source.peer != nullptr && (cancelled || source.state.lost())) source.peer->close();
  }
  proofs_->close();
  SliceVerifier& verifier = slices_.verifier();
  verifier.when_idle([executor = environment_.executor, changed = changed_] {
    boost::asio::post(executor, [changed] { changed->notify(); });
  });
  const TimePoint give_up = steady_now() + kDrainDeadline;
  while (verifier.busy()) {
    if (steady_now() > give_up) {
      co_return fail(ErrorCode::kInternal, "verifications of {} do not end",
                     options_.paths.id.to_string());
    }
    co_await changed_->wait_until(give_up);
  }
  co_return Result<void>();
}

void Transfer::on_source_lost(SourceIndex source, const Error& cause) {
  report(SourceLost{source, cause});
}

void Transfer::on_starved(const transport::Starvation& starvation) { report(starvation); }

void Transfer::on_finished(const Result<void>& outcome) {
  {
    const std::lock_guard lock(mutex_);
    finished_ = outcome;
  }
  wake();
}

void Transfer::report(Event event) {
  {
    const std::lock_guard lock(mutex_);
    events_.push_back(std::move(event));
  }
  wake();
}

void Transfer::wake() {
  boost::asio::post(environment_.executor, [changed = changed_] { changed->notify(); });
}

// Returns the outcome of the batch once it has ended.
std::optional<Result<void>> Transfer::take_events() {
  std::deque<Event> events;
  std::optional<Result<void>> finished;
  {
    const std::lock_guard lock(mutex_);
    events.swap(events_);
    finished = finished_;
  }
  for (const Event& event : events) {
    std::visit([this](const auto& kind) { take(kind); }, event);
  }
  return finished;
}

void Transfer::take(const transport::Starvation& starvation) {
  if (!policy_.starved(starvation.additions)) return;
  for (SourceIndex i = 0; i < sources_.size(); ++i) {
    if (sources_[i].state.revive()) start_connecting(i);
  }
}

void Transfer::take(const SourceLost& loss) {
  const SourceIndex index = loss.source;
  const Error& cause = loss.cause;
  ActiveSource& source = sources_[index];
  const SourceState::Means means{.is_peer = source.peer != nullptr,
                                 .has_another_transport = opener_.has_another_transport(source)};
  const auto next = source.state.on_paths_lost(cause, means);
  if (next == SourceState::AfterLoss::kWait) {
    log::info("pull.source_slow", "source", source.name, "cause", cause);
    return;
  }
  if (next == SourceState::AfterLoss::kLose) {
    if (cause.code() != ErrorCode::kCorrupt) {
      return lose(index, SourceState::Loss::kFailed, cause.message());
    }
    const std::string where = slices_.verifier().wrong_bytes(index).where;
    return lose(index, SourceState::Loss::kWrongBytes,
                where.empty() ? cause.message() : wrong_bytes_cause(where));
  }
  if (next == SourceState::AfterLoss::kReconnectOverAnother) {
    opener_.give_up_transport(source, cause);
  }
  log::info("pull.reconnect", "source", source.name, "cause", cause);
  start_connecting(index);
}

void Transfer::keep_peers_alive() {
  const TimePoint now = steady_now();
  if (now - last_keep_alive_ < rpc::grant_times().renewal) return;
  last_keep_alive_ = now;
  for (const auto& source : sources_) {
    if (source.peer == nullptr || source.state.lost() || !source.peer->connected()) continue;
    boost::asio::co_spawn(environment_.executor, opener_.keep_alive(source), boost::asio::detached);
  }
}

void Transfer::admit(SourceIndex index) {
  // After the batch the source waits for the next transfer.
  if (batch_ == nullptr) return;
  log::info("pull.source_joined", "source", sources_[index].name, "complete",
            !sources_[index].held.has_value());
  follower_.add(index);
  start_connecting(index);
}

void Transfer::start_connecting(SourceIndex index) {
  policy_.connect_begins();
  sources_[index].state.connect();
  connects_.spawn("pull.connect", connect(index));
}

async::Task<void> Transfer::connect(SourceIndex index) {
  ActiveSource& source = sources_[index];
  auto loss = SourceState::Loss::kFailed;
  trace::RunningSpan span(environment_.tracer, "handshake", options_.trace);
  span.set(std::string(trace::kSource), source.name);
  Result<void> ready = co_await opener_.renew(source);
  if (ready) {
    ready = co_await opener_.open_session(source, span.context());
    const bool refused = !ready && ready.error().code() == ErrorCode::kDenied;
    if (refused) loss = SourceState::Loss::kGrantRefused;
  }
  Result<PathOpener::Opened> opened = fail(ErrorCode::kUnavailable, "");
  if (ready) {
    opened = co_await opener_.open_paths(source);
  } else {
    opened = fail(std::move(ready).error());
  }
  policy_.connect_ended();
  if (opened) span.set("rekindle.transport", source.transport);
  span.end(opened);
  if (opened) {
    slices_.set_regions(index, std::move(opened->regions));
    add_paths(index, std::move(opened->paths));
    source.state.connected();
    source.connected_at = steady_now();
    follower_.follow(index);
  } else {
    lose(index, loss, opened.error().message());
  }
  changed_->notify();
}

void Transfer::join_missing_rails() {
  for (SourceIndex index = 0; index < sources_.size(); ++index) {
    const ActiveSource& source = sources_[index];
    if (source.state.phase() != SourceState::Phase::kConnected) continue;
    const auto offer = opener_.rail_offer(source);
    if (!offer || !rails_.begin_join(index, steady_now())) continue;
    policy_.connect_begins();
    connects_.spawn("pull.join_rails", join_rails(index, *offer));
  }
}

async::Task<void> Transfer::join_rails(SourceIndex index, PeerSession::Offer offer) {
  ActiveSource& source = sources_[index];
  const SessionToken token = source.session->token;
  auto paths = co_await opener_.join_rails(source, token, offer, rails_.alive(index));
  auto outcome = RailKeeper::Join::kNothingMissing;
  const bool same_session =
      source.session && source.session->token == token && !source.state.lost();
  if (paths && same_session) {
    for (const auto& path : *paths) {
      log::info("pull.rail_joined", "source", source.name, "path", path->describe());
    }
    source.transport = offer.transport;
    source.used.insert(offer.transport);
    outcome = RailKeeper::Join::kJoined;
    add_paths(index, std::move(*paths));
  } else if (paths) {
    // The source was lost meanwhile, and is connected anew or gone.
    const auto late = std::make_shared<transport::Paths>(std::move(*paths));
    auto drop = [late] {
      late->clear();
      return true;
    };
    (void)co_await async::offload(*environment_.blocking_pool, std::move(drop));
  } else if (paths.error().code() != ErrorCode::kNotFound) {
    outcome = RailKeeper::Join::kFailed;
  }
  rails_.end_join(index, outcome, steady_now());
  policy_.connect_ended();
  changed_->notify();
}

void Transfer::stop_connecting() {
  for (SourceIndex index = 0; index < sources_.size(); ++index) {
    const ActiveSource& source = sources_[index];
    const bool under_way = source.state.connecting() || rails_.joining(index);
    if (under_way && source.peer != nullptr) source.peer->close();
  }
}

void Transfer::add_paths(SourceIndex index, transport::Paths paths) {
  policy_.paths_added();
  batch_->add_paths(index, std::move(paths));
}

void Transfer::lose(SourceIndex index, SourceState::Loss loss, const std::string& cause) {
  ActiveSource& source = sources_[index];
  source.state.lose(loss, cause);
  if (environment_.metrics != nullptr) environment_.metrics->lost_source(loss);
  const bool others =
      std::ranges::any_of(sources_, [](const ActiveSource& other) { return !other.state.lost(); });
  log::warn("pull.source_lost", "source", source.name, "cause", cause);
  if (options_.paths.note) {
    options_.paths.note(fmt::format("source {} lost: {}{}", source.name, cause,
                                    others ? "; continuing from the others" : ""));
  }
  follower_.drop(index);
}

}  // namespace rekindle::pull
