// PullJob: sources that are being filled, and sources that come while a transfer runs.
#include <algorithm>
#include <utility>

#include <boost/asio/bind_cancellation_slot.hpp>
#include <boost/asio/cancellation_signal.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/this_coro.hpp>

#include "recovery/pull/pull.h"
#include "recovery/pull/source_news.h"
#include "recovery/rpc/convert.h"
#include "recovery/swarm/availability.h"
#include "src/async/task.h"
#include "src/async/task_group.h"
#include "src/base/log.h"

namespace rekindle::pull {

namespace {

constexpr std::chrono::milliseconds kExchangeInterval{1000};
constexpr std::chrono::milliseconds kFirstExchanges{500};  // others have just begun, too
constexpr int kQuickExchanges = 6;
constexpr std::chrono::milliseconds kDialDeadline{1500};
constexpr std::chrono::milliseconds kDialAgain{5000};
constexpr std::size_t kMissingListed = 64;

}  // namespace

bool PullJob::any_growing() const {
  return std::any_of(sources_->begin(), sources_->end(),
                     [](const ActiveSource& source) { return source.held.has_value(); });
}

// Of the slices of a plan: boxes that no source holds as of now, some of them. `all`: that is every
// slice.
std::vector<planner::MissingBox> PullJob::held_by_nobody(const planner::Plan& plan,
                                                         bool& all) const {
  transport::SourceMask growing;
  for (transport::SourceIndex i = 0; i < sources_->size(); ++i) {
    if ((*sources_)[i].held) growing.set(i);
  }
  swarm::Availability availability(plan, growing);
  for (transport::SourceIndex i = 0; i < sources_->size(); ++i) {
    const ActiveSource& source = (*sources_)[i];
    if (!source.held) continue;
    availability.add_source(i, *source.layout);
    availability.extend(i, source.held->ranges());
  }
  std::vector<planner::MissingBox> missing;
  std::vector<TileIndex> tiles;
  all = true;
  for (transport::SliceIndex slice = 0; slice < plan.slice_count(); ++slice) {
    if (!availability.candidates(slice).empty()) {
      all = false;
      continue;
    }
    if (missing.size() >= kMissingListed) continue;
    plan.tiles_read(slice, tiles);
    for (const TileIndex tile : tiles) {
      missing.push_back({checkpoint_->tiles.tensor_of(tile), checkpoint_->tiles.tile_box(tile)});
    }
  }
  return missing;
}

// What the coordinator now says of sources that are known: fresh grants, and that they hold more,
// or all. `transfer`: the one that runs.
void PullJob::take_news_of_sources(Transfer* transfer) {
  refresh_grants(*sources_, finder_.sources());
  if (checkpoint_ == nullptr) return;
  for (transport::SourceIndex i = 0; i < sources_->size(); ++i) {
    ActiveSource& source = (*sources_)[i];
    if (source.peer == nullptr || !source.held || source.layout == nullptr || source.lost) continue;
    for (const auto& record : finder_.sources()) {
      if (!source.held || !same_source(record, source.record)) continue;
      if (record.complete()) {
        if (transfer != nullptr) transfer->on_complete(i);
        source.held.reset();
        source.record.set_complete(true);
        continue;
      }
      const auto runs = rpc::from_proto(record.held(), checkpoint_->tiles.tile_count());
      if (!runs) continue;
      if (transfer != nullptr) {
        transfer->on_have(i, *runs);
        continue;
      }
      const TileIndex before = source.held->count();
      for (const auto& [begin, end] : *runs) source.held->set_range(begin, end);
      if (source.held->count() > before) silence_.heard(std::chrono::steady_clock::now());
    }
  }
}

// Pullers of the same thing that begin at the same time do not know of each other: the coordinator
// tells, while they run.
async::Task<Result<void>> PullJob::transfer_and_recruit(Transfer& transfer) {
  if (!request_.from.empty()) co_return co_await transfer.run();
  struct Recruiting {
    boost::asio::cancellation_signal stop;
    bool runs = true;
  };
  const auto recruiting = std::make_shared<Recruiting>();
  boost::asio::co_spawn(environment_.executor, recruit(transfer),
                        boost::asio::bind_cancellation_slot(
                            recruiting->stop.slot(),
                            [recruiting](const std::exception_ptr&) { recruiting->runs = false; }));
  auto done = co_await transfer.run();
  recruiting->stop.emit(boost::asio::cancellation_type::terminal);
  while (recruiting->runs) co_await async::sleep_for(std::chrono::milliseconds(2));
  co_return done;
}

// Ends when it is cancelled.
async::Task<void> PullJob::recruit(Transfer& transfer) {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  for (int round = 0;; ++round) {
    co_await async::sleep_for(round < kQuickExchanges ? kFirstExchanges : kExchangeInterval);
    if (co_await async::is_cancelled()) co_return;
    co_await finder_.exchange(bytes_done_ + batch_bytes_, bytes_total_, source_reports());
    if (co_await async::is_cancelled()) co_return;
    take_news_of_sources(&transfer);
    const TimePoint now = std::chrono::steady_clock::now();
    std::vector<async::Task<void>> dials;
    for (const auto& record : finder_.sources()) {
      if (sources_->size() + dials.size() >= transport::kMaxSources) break;
      const auto incarnation = Incarnation::from_bytes(record.node().incarnation());
      if (!incarnation || banned_.contains(*incarnation)) continue;
      const PeerKey key(*incarnation, rpc::from_proto(record.layout()));
      const bool known = std::any_of(
          sources_->begin(), sources_->end(),
          [&](const ActiveSource& source) { return same_source(source.record, record); });
      const auto tried = recruited_.find(key);
      if (known || (tried != recruited_.end() && now - tried->second < kDialAgain)) continue;
      recruited_[key] = now;
      dials.push_back(recruit_peer(record, transfer));
    }
    co_await async::run_all(std::move(dials));
  }
}

// Into the table only when its layout is known: the transfer looks at all that is in there.
async::Task<void> PullJob::recruit_peer(proto::Source record, Transfer& transfer) {
  auto peer = co_await SourcePeer::connect(record, environment_.identity, kDialDeadline);
  if (!peer) {
    log::info("pull.recruit", "source", record.node().node_id(), "error", peer.error());
    co_return;
  }
  ActiveSource source;
  source.name = record.node().node_id();
  source.record = std::move(record);
  source.peer = std::move(*peer);
  const auto learned = co_await learn_layout_of(source);
  const bool cancelled = co_await async::is_cancelled();
  if (!learned || cancelled || sources_->size() >= transport::kMaxSources) {
    if (!learned) log::info("pull.recruit", "source", source.name, "error", learned.error());
    source.peer->close();
    co_return;
  }
  sources_->push_back(std::move(source));
  transfer.admit(static_cast<transport::SourceIndex>(sources_->size() - 1));
}

}  // namespace rekindle::pull
