#include "recovery/pull/swarm_follower.h"

#include <utility>

#include <boost/asio/this_coro.hpp>

#include "recovery/swarm/availability.h"
#include "recovery/swarm/have_feed.h"
#include "src/base/log.h"

namespace rekindle::pull {

using transport::SourceIndex;

// Who hears of one source's bitmap. The call that brings it may outlive the follower.
struct SwarmFollower::Listener {
  SwarmFollower* follower = nullptr;  // null: nobody listens any more
  SourceIndex index = 0;
};

SwarmFollower::SwarmFollower(boost::asio::any_io_executor executor, SourceTable& sources,
                             PlanSliceSource& slices, Silence& silence)
    : executor_(std::move(executor)), sources_(sources), slices_(slices), silence_(silence) {}

void SwarmFollower::add(SourceIndex index) {
  const ActiveSource& source = sources_[index];
  const auto incarnation = Incarnation::from_bytes(source.record.node().incarnation());
  slices_.add_source(index, source.layout, source.proves_parts(),
                     incarnation ? swarm::order_seed(*incarnation) : 0);
  if (source.held) {
    slices_.extend(index, source.held->ranges());
  } else {
    slices_.complete(index);
  }
}

void SwarmFollower::follow(SourceIndex index) {
  const ActiveSource& source = sources_[index];
  if (!source.held || source.peer == nullptr || !source.session) return;
  cut(index);
  unwatchable_.erase(index);
  if (following_.size() >= swarm::kMaxNeighbours) return;
  Following& following = following_.try_emplace(index, executor_).first->second;
  following.listener = std::make_shared<Listener>(Listener{this, index});
  following.call.spawn("pull.have", watch(following.listener, source.peer, source.session->token,
                                          source.held->size()));
}

async::Task<void> SwarmFollower::watch(std::shared_ptr<Listener> listener,
                                       std::shared_ptr<SourcePeer> peer, SessionToken token,
                                       TileIndex tile_count) {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  SourcePeer::OnHave on_have = [listener](const swarm::TileRuns& held, bool) {
    if (listener->follower != nullptr) listener->follower->on_have(listener->index, held);
  };
  const auto outcome = co_await SourcePeer::watch_have(peer, token, tile_count, std::move(on_have));
  if (listener->follower == nullptr) co_return;
  std::exchange(listener->follower, nullptr)->ended(listener->index, outcome);
}

void SwarmFollower::ended(SourceIndex index, const Result<void>& outcome) {
  following_.erase(index);
  if (outcome) {
    on_complete(index);
  } else {
    log::info("pull.have_ended", "source", sources_[index].name, "cause", outcome.error());
    unwatchable_.insert(index);
  }
  fill_places();
}

// Waiting for a copy that grows is not silence: the fleet is alive.
void SwarmFollower::on_have(SourceIndex index, const swarm::TileRuns& held) {
  if (!sources_[index].learn_held(held)) return;
  silence_.heard(steady_now());
  if (!stopped_) slices_.extend(index, held);
}

void SwarmFollower::on_complete(SourceIndex index) {
  if (!sources_[index].held) return;
  sources_[index].learn_complete();
  if (!stopped_) slices_.complete(index);
}

// A free place goes to a connected source that was left out.
void SwarmFollower::fill_places() {
  if (stopped_) return;
  for (SourceIndex index = 0; index < sources_.size(); ++index) {
    if (following_.size() >= swarm::kMaxNeighbours) return;
    const ActiveSource& source = sources_[index];
    const bool connected = source.peer != nullptr && source.peer->connected();
    if (!connected || source.state.phase() != SourceState::Phase::kConnected) continue;
    if (!following_.contains(index) && !unwatchable_.contains(index)) follow(index);
  }
}

void SwarmFollower::cut(SourceIndex index) {
  const auto found = following_.find(index);
  if (found == following_.end()) return;
  found->second.listener->follower = nullptr;
  following_.erase(found);
}

void SwarmFollower::drop(SourceIndex index) {
  cut(index);
  fill_places();
}

void SwarmFollower::stop() {
  stopped_ = true;
  while (!following_.empty()) cut(following_.begin()->first);
}

}  // namespace rekindle::pull
