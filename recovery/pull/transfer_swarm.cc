// Transfer: sources that are being filled, and those that come while it runs.
#include <utility>

#include <boost/asio/bind_cancellation_slot.hpp>
#include <boost/asio/cancellation_signal.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/this_coro.hpp>

#include "recovery/pull/transfer.h"
#include "recovery/swarm/order.h"
#include "src/base/log.h"

namespace rekindle::pull {

using transport::SourceIndex;

// One source's bitmap as it grows. Outlives the transfer until the call that brings it has ended.
struct Transfer::Following {
  Transfer* transfer = nullptr;  // null: it has ended, or the source has another session
  SourceIndex index = 0;
  boost::asio::cancellation_signal stop;
};

// The batch knows it from here on; its paths come later.
void Transfer::take_in(SourceIndex index) {
  const ActiveSource& source = sources_[index];
  const auto incarnation = Incarnation::from_bytes(source.record.node().incarnation());
  slices_->add_source(index, source.layout, incarnation ? swarm::salt_of(*incarnation) : 0);
  if (source.held) {
    slices_->extend(index, source.held->ranges());
  } else {
    slices_->complete(index);
  }
}

void Transfer::admit(SourceIndex index) {
  if (batch_ == nullptr) return;  // the next one has it from the start
  log::info("pull.source_joined", "source", sources_[index].name, "complete",
            !sources_[index].held.has_value());
  take_in(index);
  start_connecting(index);
}

// With each session anew.
void Transfer::follow(SourceIndex index) {
  const ActiveSource& source = sources_[index];
  if (!source.held || source.peer == nullptr || !source.session) return;
  stop_following(index);
  unwatchable_.erase(index);
  // What the coordinator says of the others has to do.
  if (following_.size() >= swarm::kMaxNeighbours) return;
  const auto following = std::make_shared<Following>();
  following->transfer = this;
  following->index = index;
  following_[index] = following;
  boost::asio::co_spawn(
      environment_.executor,
      watch(following, source.peer, source.session->token, source.held->size()),
      boost::asio::bind_cancellation_slot(following->stop.slot(), boost::asio::detached));
}

async::Task<void> Transfer::watch(std::shared_ptr<Following> following,
                                  std::shared_ptr<SourcePeer> peer, SessionToken token,
                                  TileIndex tile_count) {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  SourcePeer::OnHave on_have = [following](const swarm::TileRuns& held, bool) {
    if (following->transfer != nullptr) following->transfer->on_have(following->index, held);
  };
  auto ended = co_await SourcePeer::watch_have(peer, token, tile_count, std::move(on_have));
  if (following->transfer == nullptr) co_return;
  Transfer& transfer = *std::exchange(following->transfer, nullptr);
  transfer.following_.erase(following->index);  // its place is another's
  if (ended) {
    transfer.on_complete(following->index);
  } else {
    log::info("pull.have_ended", "source", peer->name(), "cause", ended.error());
    transfer.unwatchable_.insert(following->index);
  }
  transfer.follow_another();
}

// The fleet is alive while some copy of it grows: a pull that waits for that is not in silence.
void Transfer::on_have(SourceIndex index, const swarm::TileRuns& held) {
  ActiveSource& source = sources_[index];
  if (!source.held) return;
  const TileIndex before = source.held->count();
  for (const auto& [begin, end] : held) source.held->set_range(begin, end);
  if (source.held->count() == before) return;
  silence_.heard(std::chrono::steady_clock::now());
  if (batch_ != nullptr) slices_->extend(index, held);
}

void Transfer::on_complete(SourceIndex index) {
  ActiveSource& source = sources_[index];
  if (!source.held) return;
  source.held.reset();
  source.record.set_complete(true);
  source.record.clear_held();
  if (batch_ != nullptr) slices_->complete(index);
}

// A place is free: for one that is connected and was left out.
void Transfer::follow_another() {
  for (SourceIndex index = 0; index < sources_.size(); ++index) {
    if (following_.size() >= swarm::kMaxNeighbours) return;
    const ActiveSource& source = sources_[index];
    const bool connected = source.peer != nullptr && source.peer->connected() && source.session;
    if (!connected || !source.held || source.lost || source.slow || source.connecting) continue;
    if (!following_.contains(index) && !unwatchable_.contains(index)) follow(index);
  }
}

void Transfer::stop_following(SourceIndex index) {
  const auto found = following_.find(index);
  if (found == following_.end()) return;
  const auto following = found->second;
  following_.erase(found);
  following->transfer = nullptr;
  following->stop.emit(boost::asio::cancellation_type::terminal);
}

void Transfer::stop_following() {
  for (auto& [index, following] : following_) {
    following->transfer = nullptr;
    following->stop.emit(boost::asio::cancellation_type::terminal);
  }
  following_.clear();
}

}  // namespace rekindle::pull
