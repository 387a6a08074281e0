#include "recovery/pull/transfer.h"

#include <algorithm>
#include <utility>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>

#include "src/async/task.h"
#include "src/base/log.h"

namespace rekindle::pull {

using transport::SourceIndex;

namespace {

constexpr std::chrono::milliseconds kTick{200};
constexpr std::chrono::milliseconds kPause{500};  // beyond a tick: this process was stopped
constexpr std::chrono::milliseconds kKeepAliveInterval{10000};
constexpr std::chrono::milliseconds kDrainDeadline{10000};
constexpr int kReconnectsPerSource = 1;  // and one more over another transport

transport::SourceMask being_filled(const SourceTable& sources) {
  transport::SourceMask mask;
  for (SourceIndex i = 0; i < sources.size(); ++i) {
    if (sources[i].held) mask.set(i);
  }
  return mask;
}

}  // namespace

Transfer::Transfer(const PullEnvironment& environment, const ModelVersion& id, const Digest& root,
                   std::shared_ptr<const planner::Plan> plan,
                   std::shared_ptr<store::PendingVersion> destination,
                   std::shared_ptr<VerifiedTiles> verified, std::shared_ptr<SourceTable> sources,
                   std::string forced_transport, std::shared_ptr<PullCounters> counters,
                   std::uint32_t suspicion, Silence& silence, Hooks hooks)
    : environment_(environment),
      id_(id),
      root_(root),
      source_table_(std::move(sources)),
      sources_(*source_table_),
      forced_transport_(std::move(forced_transport)),
      silence_(silence),
      hooks_(std::move(hooks)),
      proofs_(std::make_shared<ProofCalls>(environment.executor, source_table_, root)),
      slices_(std::make_unique<PlanSliceSource>(
          SliceWork{std::move(plan), std::move(destination), std::move(verified),
                    std::move(counters), suspicion, being_filled(sources_)},
          *environment.digest_pool,
          [calls = proofs_](SourceIndex source, std::vector<planner::TileWork> items,
                            ProofCalls::Done done) {
            calls->ask(source, std::move(items), std::move(done));
          })),
      timer_(std::make_shared<boost::asio::steady_timer>(environment.executor)) {}

Transfer::~Transfer() {
  stop_following();
  slices_->bind(nullptr);
  batch_.reset();  // cancels what still runs and waits for the drain
}

async::Task<Result<void>> Transfer::run() {
  last_look_ = std::chrono::steady_clock::now();
  transport::BatchOptions options;
  options.order = order_;
  options.salt = salt_;
  batch_ = environment_.engine->start(*slices_, *this, options);
  slices_->bind(batch_.get());
  for (SourceIndex i = 0; i < sources_.size(); ++i) {
    if (sources_[i].held) take_in(i);
    start_connecting(i);
  }
  auto outcome = co_await watch_batch();
  stop_following();
  slices_->bind(nullptr);
  batch_.reset();
  CO_TRY_VOID(co_await drain_verifications());
  co_await close_sessions();
  for (SourceIndex i = 0; i < sources_.size(); ++i)
    sources_[i].wrong = slices_->verifier().wrong_bytes(i);
  const bool tried_all = !outcome && outcome.error().code() == ErrorCode::kUnavailable && starved();
  if (!tried_all) co_return outcome;
  co_return fail(ErrorCode::kUnavailable, "no source is left for a part of {}", id_.to_string());
}

// Until the batch has ended and no connect is under way: they refer to this object, so they are cut
// short, then waited for.
async::Task<Result<void>> Transfer::watch_batch() {
  while (true) {
    handle_events();
    note_progress();
    std::optional<Result<void>> outcome;
    {
      const std::lock_guard lock(mutex_);
      outcome = finished_;
    }
    if (outcome && connecting_ == 0) co_return std::move(*outcome);
    const bool cancelled = co_await async::is_cancelled();
    if (outcome || cancelled) stop_connecting();
    if (cancelled || (starved() && connecting_ == 0)) batch_->cancel();
    keep_peers_alive();
    if (!outcome && !cancelled) join_missing_rails();
    timer_->expires_after(kTick);
    boost::system::error_code woken;
    co_await timer_->async_wait(boost::asio::redirect_error(boost::asio::use_awaitable, woken));
  }
}

void Transfer::note_progress() {
  const auto now = std::chrono::steady_clock::now();
  const auto progress = batch_->progress();
  const Duration gap = now - std::exchange(last_look_, now);
  if (gap > kTick + kPause) silence_.forgive(gap);
  silence_.heard(progress.last_byte);
  note_lost_rails(progress);
  if (hooks_.tick) hooks_.tick(progress);
}

// They read the destination and mark its tiles, and may still wait for a source's proofs: peers
// that are lost, or all after a cancel, are closed, which ends their calls.
async::Task<Result<void>> Transfer::drain_verifications() {
  const bool cancelled = co_await async::is_cancelled();
  for (const auto& source : sources_) {
    if (source.peer != nullptr && (cancelled || source.lost)) source.peer->close();
  }
  proofs_->close();
  const auto give_up = std::chrono::steady_clock::now() + kDrainDeadline;
  while (slices_->verifier().busy()) {
    if (std::chrono::steady_clock::now() > give_up) {
      co_return fail(ErrorCode::kInternal, "verifications of {} do not end", id_.to_string());
    }
    co_await async::sleep_for(std::chrono::milliseconds(2));
  }
  co_return Result<void>();
}

void Transfer::on_source_lost(SourceIndex source, const Error& cause) {
  {
    const std::lock_guard lock(mutex_);
    events_.push_back({Event::Kind::kLost, source, cause, 0});
  }
  wake();
}

void Transfer::on_starved(const transport::Starvation& starvation) {
  {
    const std::lock_guard lock(mutex_);
    events_.push_back({Event::Kind::kStarved, 0, std::nullopt, starvation.additions});
  }
  wake();
}

void Transfer::on_finished(const Result<void>& outcome) {
  {
    const std::lock_guard lock(mutex_);
    finished_ = outcome;
  }
  wake();
}

void Transfer::wake() {
  boost::asio::post(environment_.executor, [timer = timer_] { timer->cancel(); });
}

void Transfer::handle_events() {
  std::deque<Event> events;
  {
    const std::lock_guard lock(mutex_);
    events.swap(events_);
  }
  for (const auto& event : events) {
    if (event.kind == Event::Kind::kLost) {
      handle_lost(event.source, *event.cause);
      continue;
    }
    starved_at_ = event.additions;
    if (!starved()) continue;  // paths are on their way to it
    for (SourceIndex i = 0; i < sources_.size(); ++i) {
      if (std::exchange(sources_[i].slow, false)) start_connecting(i);
    }
  }
}

void Transfer::handle_lost(SourceIndex index, const Error& cause) {
  ActiveSource& source = sources_[index];
  if (cause.code() == ErrorCode::kUnavailable) {
    // Others finish sooner what it had. It has done nothing wrong, and may be needed again.
    log::info("pull.source_slow", "source", source.name, "cause", cause);
    source.slow = true;
    return;
  }
  source.quarantined = cause.code() == ErrorCode::kCorrupt;
  const bool may_reconnect = source.peer != nullptr && !source.quarantined;
  const bool has_another = forced_transport_.empty() && source.transport == "verbs";
  if (may_reconnect && source.reconnects >= kReconnectsPerSource && has_another) {
    // It broke, was made again and proved itself with a read, and broke again.
    source.avoid.insert(source.transport);
    warn_of_fallback(source, source.transport, cause);
  } else if (!may_reconnect || source.reconnects >= kReconnectsPerSource) {
    const std::string where =
        source.quarantined ? slices_->verifier().wrong_bytes(index).where : "";
    return lose(index, where.empty() ? cause.message() : wrong_bytes_cause(where));
  }
  ++source.reconnects;
  log::info("pull.reconnect", "source", source.name, "cause", cause);
  start_connecting(index);
}

void Transfer::keep_peers_alive() {
  const auto now = std::chrono::steady_clock::now();
  if (now - last_keep_alive_ < kKeepAliveInterval) return;
  last_keep_alive_ = now;
  for (const auto& source : sources_) {
    if (source.peer == nullptr || source.lost || !source.peer->connected()) continue;
    boost::asio::co_spawn(environment_.executor, SourcePeer::keep_alive(source.peer),
                          boost::asio::detached);
  }
}

void Transfer::lose(SourceIndex index, const std::string& cause) {
  ActiveSource& source = sources_[index];
  source.lost = true;
  source.cause = cause;
  const bool others = std::any_of(sources_.begin(), sources_.end(),
                                  [](const ActiveSource& other) { return !other.lost; });
  log::warn("pull.source_lost", "source", source.name, "cause", cause);
  if (hooks_.note) {
    hooks_.note(fmt::format("source {} lost: {}{}", source.name, cause,
                            others ? "; continuing from the others" : ""));
  }
  stop_following(index);
  if (batch_ != nullptr) follow_another();
}

void Transfer::stop_connecting() {
  for (const auto& source : sources_) {
    const bool under_way = source.connecting || source.joining;
    if (under_way && source.peer != nullptr) source.peer->close();
  }
}

}  // namespace rekindle::pull
