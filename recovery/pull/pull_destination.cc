#include "recovery/pull/pull_destination.h"

#include <algorithm>
#include <chrono>
#include <span>
#include <utility>

#include "recovery/pull/wanted.h"
#include "src/async/offload.h"
#include "src/base/log.h"

namespace rekindle::pull {

namespace {

// For a watch without a notifier, and with one.
constexpr std::chrono::milliseconds kLookWhileHeld{20};
constexpr std::chrono::milliseconds kLongestHeldWait{1000};
constexpr std::size_t kPlacedAtOnce = 512;

}  // namespace

PullDestination::PullDestination(PullContext& context, PullWatch watch)
    : context_(context),
      environment_(context.environment),
      target_(context.target),
      watch_(std::move(watch)),
      released_(watch_.held_changed != nullptr
                    ? watch_.held_changed
                    : std::make_shared<async::Notifier>(environment_.executor)),
      placing_(std::make_shared<Placing>([released = released_] { released->notify(); })) {}

// This pull does not keep a copy alive while it is verified: the verifier sets a wrong copy aside.
// Then another copy is tried, or the version is fetched anew.
async::Task<Result<std::shared_ptr<const store::StoredVersion>>> PullDestination::find_here() {
  while (auto stored = covering_copy()) {
    if (!environment_.require_verified) co_return stored;
    const std::weak_ptr<const store::StoredVersion> copy = stored;
    auto verified = co_await environment_.require_verified(std::move(stored));
    auto left = copy.lock();
    if (verified && left != nullptr) co_return left;
    if (verified) continue;  // retired
    if (verified.error().code() != ErrorCode::kCorrupt) co_return fail(std::move(verified).error());
    context_.progress.show(verified.error().message());
    if (left != nullptr && left->verification->state() != store::CopyState::kQuarantined) break;
  }
  co_return nullptr;
}

std::shared_ptr<const store::StoredVersion> PullDestination::covering_copy() const {
  for (const auto& stored : environment_.store->find(target_.resolved.id)) {
    if (stored->manifest.checkpoint->root == target_.resolved.root &&
        stored->verification->state() != store::CopyState::kQuarantined &&
        covers(stored->manifest.layout, target_.layout())) {
      return stored;
    }
  }
  return nullptr;
}

async::Task<Result<void>> PullDestination::begin() {
  context_.progress.enter_phase("allocate", steady_now());
  context_.progress.show();
  auto begun = co_await begin_once();
  const auto missing = [this] {
    return environment_.store->missing_bytes(target_.resolved.id, target_.layout());
  };
  if (begun || begun.error().code() != ErrorCode::kExhausted || missing() == 0) co_return begun;
  if (!context_.request.make_room || !environment_.make_room) co_return begun;
  context_.progress.show("the budget is too small for it beside older versions: making room");
  if (auto made = co_await environment_.make_room(target_.resolved.id, missing); !made) {
    co_return fail(ErrorCode::kExhausted, "{}; {}", begun.error().message(),
                   made.error().message());
  }
  co_return co_await begin_once();
}

async::Task<Result<void>> PullDestination::begin_once() {
  using Pending = std::shared_ptr<std::unique_ptr<store::PendingVersion>>;
  auto work = [this]() -> Result<Pending> {
    const int node = environment_.numa_node ? environment_.numa_node(context_.request) : -1;
    TRY(auto pending, environment_.store->begin(target_.checkpoint, *target_.wanted, node));
    return std::make_shared<std::unique_ptr<store::PendingVersion>>(std::move(pending));
  };
  auto begun = co_await async::offload(*environment_.blocking_pool, std::move(work));
  // The store calls nothing else unavailable than files that another pull fills, or has just
  // filled.
  if (!begun && begun.error().code() == ErrorCode::kUnavailable && watch_.on_place_taken) {
    watch_.on_place_taken();
  }
  CO_TRY(pending_, std::move(begun));
  const store::PendingVersion& copy = **pending_;
  verified_ = std::make_shared<VerifiedTiles>(copy.verified());
  if (environment_.share) environment_.share(copy, verified_, watch_.held && watch_.held());
  if (watch_.on_begun) {
    Arriving arriving{target_.checkpoint, target_.shared_layout(), verified_, {}, placing_};
    for (std::uint32_t i = 0; i < target_.layout().segments().size(); ++i) {
      arriving.segments.push_back(copy.mapped(i));
    }
    watch_.on_begun(std::move(arriving));
  }
  co_return Result<void>();
}

bool PullDestination::held() const { return (watch_.held && watch_.held()) || placing_->busy(); }

// The pull gives its place at the sources back before it waits. Otherwise the coordinator would
// take its silence for its end.
async::Task<bool> PullDestination::wait_while_held() {
  const bool waits = held();
  if (waits) {
    context_.progress.trace().wait_for("hold");
    co_await context_.finder.pause();
  }
  const bool must_look = watch_.held && watch_.held_changed == nullptr;
  while (held() && !placing_->wants_now() && !co_await async::is_cancelled()) {
    co_await released_->wait_until(steady_now() + (must_look ? kLookWhileHeld : kLongestHeldWait));
  }
  context_.progress.trace().go_on();
  if (held()) co_return waits;
  auto landed = placing_->close();
  if (!landed.empty()) co_await take_placed(std::move(landed));
  co_return waits;
}

std::optional<FirstTiles> PullDestination::first_tiles() {
  auto lists = placing_->take_wanted_now();
  if (lists.empty() || !held()) return std::nullopt;
  return FirstTiles(target_.checkpoint->tiles.tile_count(), lists);
}

// Tiles that others have written count once they have verified; the rest is fetched.
async::Task<void> PullDestination::take_placed(Placing::TileRuns landed) {
  std::vector<TileIndex> tiles;
  const TileSet before = verified_->snapshot();
  for (const auto& [begin, end] : landed) {
    for (TileIndex tile = begin; tile < std::min(end, before.size()); ++tile) {
      if (!before.test(tile)) tiles.push_back(tile);
    }
  }
  context_.progress.enter_phase("verify", steady_now());
  context_.progress.show();
  const TileVerifier verifier(pending(), verified_);
  std::size_t good = 0;
  for (std::size_t at = 0; at < tiles.size() && !co_await async::is_cancelled();
       at += kPlacedAtOnce) {
    const auto some =
        std::span<const TileIndex>(tiles).subspan(at, std::min(kPlacedAtOnce, tiles.size() - at));
    auto verify = [&verifier, some, this] {
      return verifier.verify_in_place(some, *environment_.digest_pool);
    };
    good += co_await async::offload(*environment_.blocking_pool, std::move(verify));
  }
  log::info("pull.placed", "version", target_.resolved.id.to_string(), "tiles", tiles.size(),
            "verified", good);
}

void PullDestination::use_memory(transport::HandshakeConnector& connector) {
  if (!registered_with_.insert(&connector).second) return;
  const std::size_t segments = (*pending_)->manifest().layout.segments().size();
  for (std::uint32_t i = 0; i < segments; ++i) {
    registrations_.push_back(
        connector.use_memory((*pending_)->segment(i), (*pending_)->mapped(i)->life()));
  }
}

// Letting go of registered memory takes as long as pinning it, unless the connector keeps it.
async::Task<void> PullDestination::release_memory() {
  registered_with_.clear();
  const auto released =
      std::make_shared<std::vector<std::shared_ptr<const void>>>(std::exchange(registrations_, {}));
  auto work = [released] {
    released->clear();
    return true;
  };
  co_await async::offload(*environment_.blocking_pool, std::move(work));
}

async::Task<Result<std::shared_ptr<const store::StoredVersion>>> PullDestination::commit() {
  context_.progress.enter_phase("commit", steady_now());
  context_.progress.show();
  auto work = [this] { return environment_.store->commit(std::move(*pending_)); };
  auto committed = co_await async::offload(*environment_.blocking_pool, std::move(work));
  if (!committed) co_await unshare();
  co_return committed;
}

async::Task<void> PullDestination::abandon() {
  co_await unshare();
  // By verifications that did not end.
  const bool in_use = pending_.use_count() > 1;
  const bool empty = !in_use && verified_->count() == 0;
  // It waits for the threads that still allocate its pages.
  const auto pending = std::make_shared<decltype(pending_)>(std::exchange(pending_, nullptr));
  auto work = [store = environment_.store, empty, pending] {
    if (empty) store->discard(std::move(**pending));
    pending->reset();
    return true;
  };
  co_await async::offload(*environment_.blocking_pool, std::move(work));
}

// Must end before this pull releases the files: the next pull may write to them.
async::Task<void> PullDestination::unshare() {
  if (!environment_.unshare) co_return;
  co_await environment_.unshare(target_.resolved.id, target_.resolved.root,
                                target_.layout().digest());
}

}  // namespace rekindle::pull
