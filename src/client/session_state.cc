#include "src/client/session_state.h"

namespace rekindle::client {

SessionState::SessionState(AttachedReply attached, bool for_device)
    : version_(std::move(attached.id)),
      for_device_(for_device),
      rung_(intern(std::move(attached.rung))) {
  apply_tiles({std::move(attached.ready), false, {}});
}

void SessionState::describe(bucket::Contents contents) {
  contents_ = std::move(contents);
  contents_->take_empty(complete_);
  mark(std::exchange(early_, {}));
}

Result<void> SessionState::check_alive() const {
  if (ended_) return fail(*ended_);
  return {};
}

void SessionState::handed_out(std::size_t count) {
  complete_.erase(complete_.begin(), complete_.begin() + static_cast<std::ptrdiff_t>(count));
}

void SessionState::apply(AgentMessage message) {
  if (message.call == 0) return apply_event(std::move(message));
  if (!commit.apply(message) && !update.apply(message)) order.apply(message);
}

void SessionState::apply_event(AgentMessage message) {
  if (message.error) {
    if (!ended_) ended_ = std::move(message.error);
  } else if (auto* const ready = std::get_if<TilesReady>(&message.reply)) {
    apply_tiles(std::move(*ready));
  } else if (auto* const committed = std::get_if<CommittedReply>(&message.reply)) {
    commit.answered(std::move(*committed));
  } else if (auto* const newer = std::get_if<NewVersion>(&message.reply)) {
    update.answered(std::move(*newer));
  }
}

namespace {

void add(VerifiedTiles& tiles, const TilesReady& more) {
  tiles.ready.insert(tiles.ready.end(), more.ready.begin(), more.ready.end());
  tiles.all = tiles.all || more.complete;
}

}  // namespace

void SessionState::apply_tiles(TilesReady ready) {
  if (for_device_) add(verified_, ready);
  if (contents_) {
    mark({std::move(ready.ready), ready.complete});
  } else {
    add(early_, ready);
  }
  if (!ready.rung.empty()) rung_ = intern(std::move(ready.rung));
}

void SessionState::mark(const VerifiedTiles& tiles) {
  if (auto ok = contents_->mark_ready(tiles.ready, complete_); !ok && !ended_) {
    ended_ = std::move(ok).error();
  }
  if (tiles.all) contents_->mark_all_ready(complete_);
}

}  // namespace rekindle::client
