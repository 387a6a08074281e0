#include "recovery/pull/source_pool.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <iterator>

#include <boost/asio/this_coro.hpp>

#include "recovery/pull/local_source.h"
#include "recovery/pull/pull_plans.h"
#include "recovery/rpc/convert.h"
#include "recovery/swarm/availability.h"
#include "src/async/offload.h"
#include "src/async/task_group.h"
#include "src/base/log.h"
#include "src/base/units.h"

namespace rekindle::pull {

namespace {

constexpr std::chrono::milliseconds kDialDeadline{1500};
// For an agent that has restarted to announce its copies. Once for each of its lives.
constexpr std::chrono::milliseconds kRestart{2500};
constexpr std::chrono::milliseconds kDialAgain{5000};
constexpr std::chrono::milliseconds kRefreshDeadline{1000};
constexpr std::chrono::milliseconds kAskDelay{250};
constexpr std::chrono::milliseconds kLongestAskDelay{1000};
// After so many timeouts a source is not asked again.
constexpr int kMostTimeouts = 4;
// Metadata is asked of a second source after this time, and a millisecond more for each GiB of the
// checkpoint.
constexpr std::chrono::milliseconds kHeadStart{250};
constexpr std::chrono::milliseconds kMostHeadStart{2000};
constexpr std::chrono::milliseconds kLeastPageTime{1000};
constexpr std::uint64_t kMetadataAtLeast = 64 * kMiB;
constexpr std::chrono::milliseconds kExchangeInterval{1000};
// The first exchanges come faster: other pullers have just begun as well.
constexpr std::chrono::milliseconds kFirstExchanges{500};
constexpr int kQuickExchanges = 6;

ActiveSource source_of(proto::Source record, std::shared_ptr<SourcePeer> peer) {
  ActiveSource source;
  source.name = record.node().node_id();
  source.record = std::move(record);
  source.peer = std::move(peer);
  return source;
}

}  // namespace

SourcePool::SourcePool(PullContext& context) : context_(context) {}

async::Task<void> SourcePool::connect() {
  dialled_.clear();
  co_await dial_listed();
  co_await learn_layouts();
}

// The coordinator may be as silent as the sources, so both are tried at once.
async::Task<void> SourcePool::look() {
  dialled_.clear();
  std::vector<async::Task<void>> both;
  both.push_back(dial_listed());
  both.push_back(ask_then_dial());
  co_await async::run_all(std::move(both));
  co_await learn_layouts();
}

async::Task<void> SourcePool::ask_then_dial() {
  co_await context_.finder.refresh(context_.silence.at_most(kRefreshDeadline, steady_now()));
  take_news(nullptr);
  co_await dial_listed();
}

// Waiting for a place in the coordinator's queue is not silence, unless there is something else to
// read from.
async::Task<void> SourcePool::wait_to_ask_again() {
  const auto queued = context_.finder.queued();
  context_.progress.trace().wait_for(queued ? "queue" : "source");
  if (!queued || has_fallback()) {
    queue_shown_ = false;
    co_await async::sleep_for(context_.silence.at_most(kAskDelay, steady_now()));
    co_return;
  }
  if (!std::exchange(queue_shown_, true)) {
    context_.progress.show("all sources are busy; waiting for the first that has a place");
  }
  co_await async::sleep_for(std::clamp(*queued, kAskDelay, kLongestAskDelay));
  context_.silence.heard(steady_now());
}

std::vector<proto::Source> SourcePool::to_dial(
    const std::function<bool(const PeerKey&)>& may_dial) const {
  std::vector<proto::Source> records;
  for (const auto& record : context_.finder.sources()) {
    if (table_->size() + records.size() >= transport::kMaxSources) break;
    const auto incarnation = Incarnation::from_bytes(record.node().incarnation());
    if (!incarnation || faults_.banned(*incarnation)) continue;
    const bool known = std::ranges::any_of(
        *table_, [&](const ActiveSource& source) { return same_source(source.record, record); });
    if (known || !may_dial({*incarnation, rpc::from_proto(record.layout())})) continue;
    records.push_back(record);
  }
  return records;
}

async::Task<void> SourcePool::dial_listed() {
  std::vector<async::Task<void>> dials;
  for (auto& record : to_dial([&](const PeerKey& key) { return dialled_.insert(key).second; })) {
    dials.push_back(dial(std::move(record)));
  }
  co_await async::run_all(std::move(dials));
}

async::Task<void> SourcePool::dial(proto::Source record) {
  const auto deadline = context_.silence.at_most(kDialDeadline, steady_now());
  auto peer = co_await SourcePeer::connect(record, context_.environment.identity, deadline);
  if (!peer) {
    log::info("pull.dial", "source", record.node().node_id(), "error", peer.error());
    const auto incarnation = Incarnation::from_bytes(record.node().incarnation());
    if (incarnation && peer.error().code() == ErrorCode::kStale && !faults_.banned(*incarnation)) {
      faults_.ban(*incarnation);
      // Its host is alive, and its next life is about to announce the same copies.
      context_.silence.leave(kRestart, steady_now());
    }
    if (peer.error().code() == ErrorCode::kTimeout) {
      context_.progress.no_answer_of(record, peer.error());
    }
    context_.progress.show(peer.error().message());
    co_return;
  }
  if (has_room()) table_->push_back(source_of(std::move(record), std::move(*peer)));
}

// No dial may run meanwhile: this keeps references to elements of the table.
async::Task<void> SourcePool::learn_layouts() {
  if (context_.target.checkpoint == nullptr) co_return;
  for (ActiveSource& source : *table_) {
    if (source.peer == nullptr || source.state.lost() || source.layout != nullptr) continue;
    auto learned = co_await learn_layout_of(source);
    if (learned || source.state.lost()) continue;
    log::warn("pull.layout", "source", source.name, "error", learned.error());
    lose(source, learned.error());
  }
  forget_lost();
}

async::Task<Result<void>> SourcePool::learn_layout_of(ActiveSource& source) {
  const Checkpoint& checkpoint = *context_.target.checkpoint;
  const Digest digest = rpc::from_proto(source.record.layout());
  if (!find_layout(digest)) {
    const auto turn = co_await context_.environment.plans->turns().take(digest, context_.silence);
    if (!find_layout(digest)) {
      const auto has_it = [&](const ActiveSource& other) {
        return rpc::from_proto(other.record.layout()) == digest;
      };
      const auto fetch = [&](const ActiveSource& other) {
        return fetch_layout(other.peer, digest, turn.get());
      };
      const auto failed = [&](ActiveSource& other, const Error& why) {
        log::warn("pull.layout", "source", other.name, "error", why);
        lose(other, why);
      };
      CO_TRY(layouts_[digest], co_await ask<std::shared_ptr<const Layout>>(has_it, fetch, failed));
    }
  }
  if (!source.record.complete()) {
    const TileIndex tiles = checkpoint.tiles.tile_count();
    CO_TRY(const auto runs, rpc::from_proto(source.record.held(), tiles));
    source.held.emplace(tiles);
    source.learn_held(runs);
  }
  source.layout = layouts_[digest];
  co_return Result<void>();
}

async::Task<Result<std::shared_ptr<const Layout>>> SourcePool::fetch_layout(
    std::shared_ptr<SourcePeer> peer, Digest digest, FetchTurns::Turn* turn) {
  CO_TRY(std::string bytes, co_await peer->fetch_layout(digest, paging(turn)));
  turn->arrived();
  auto parsing =
      context_.environment.plans->parse(context_.target.checkpoint, digest, std::move(bytes));
  co_return co_await context_.wait_for(std::move(parsing));
}

// Hosts that scale out at the same time do not all ask the same source, and those that are being
// filled are sources as well.
std::vector<ActiveSource*> SourcePool::able_to_tell() {
  std::vector<ActiveSource*> able;
  const std::size_t count = table_->size();
  const std::uint64_t first = swarm::order_seed(context_.environment.identity.incarnation);
  for (std::size_t i = 0; i < count; ++i) {
    ActiveSource& source = (*table_)[(first + i) % count];
    if (source.peer == nullptr || source.state.lost()) continue;
    if (timeouts_[source.name] < kMostTimeouts) able.push_back(&source);
  }
  std::ranges::stable_partition(
      able, [&](const ActiveSource* source) { return source->name == quickest_; });
  return able;
}

Duration SourcePool::head_start() const {
  const auto gibibytes = context_.target.resolved.checkpoint_bytes / kGiB;
  return kHeadStart + std::min<Duration>(std::chrono::milliseconds(gibibytes), kMostHeadStart);
}

// Among those of this pull, or in the tables of other pulls.
bool SourcePool::find_layout(const Digest& digest) {
  if (layouts_.contains(digest)) return true;
  const Digest& tensor_set = context_.target.checkpoint->tensors.digest();
  auto layout = context_.environment.plans->find_layout(tensor_set, digest);
  if (layout == nullptr) return false;
  know_layout(std::move(layout));
  return true;
}

void SourcePool::know_layout(std::shared_ptr<const Layout> layout) {
  layouts_[layout->digest()] = std::move(layout);
}

SourcePeer::Paging SourcePool::paging(FetchTurns::Turn* turn) {
  const TimePoint now = steady_now();
  const auto share = context_.silence.left(now) / std::max<std::int64_t>(1, std::ssize(*table_));
  const auto deadline = std::max<std::chrono::milliseconds>(share, kLeastPageTime);
  SourcePeer::Paging paging;
  paging.page_deadline = context_.silence.at_most(deadline, now);
  paging.on_page = [this, turn] {
    context_.silence.heard(steady_now());
    if (turn != nullptr) turn->progress(steady_now());
  };
  // Names, shapes and digests are small beside the weights. A source that says otherwise would only
  // take memory and time.
  paging.most_bytes = std::min(SourcePeer::kMaxPagedBytes,
                               kMetadataAtLeast + context_.target.resolved.checkpoint_bytes / 8);
  return paging;
}

// Takes in the coordinator's news of known sources: fresh grants, and gains of sources that are
// being filled. `follower`: of the transfer that runs.
void SourcePool::take_news(SwarmFollower* follower) {
  refresh_grants(*table_, context_.finder.sources());
  if (context_.target.checkpoint == nullptr) return;
  const TileIndex tiles = context_.target.checkpoint->tiles.tile_count();
  for (transport::SourceIndex i = 0; i < table_->size(); ++i) {
    ActiveSource& source = (*table_)[i];
    if (source.peer == nullptr || source.layout == nullptr || source.state.lost()) continue;
    for (const auto& record : context_.finder.sources()) {
      if (!source.held || !same_source(record, source.record)) continue;
      if (record.complete()) {
        if (follower != nullptr) follower->on_complete(i);
        source.learn_complete();
      } else if (const auto runs = rpc::from_proto(record.held(), tiles)) {
        if (follower != nullptr) follower->on_have(i, *runs);
        if (source.learn_held(*runs)) context_.silence.heard(steady_now());
      }
    }
  }
}

async::Task<void> SourcePool::recruit(Transfer& transfer) {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  for (int round = 0;; ++round) {
    co_await async::sleep_for(round < kQuickExchanges ? kFirstExchanges : kExchangeInterval);
    if (co_await async::is_cancelled()) co_return;
    co_await context_.finder.exchange(context_.progress.report(*table_));
    if (co_await async::is_cancelled()) co_return;
    take_news(&transfer.follower());
    const TimePoint now = steady_now();
    const auto may_dial = [&](const PeerKey& key) {
      const auto [tried, first] = recruited_.try_emplace(key, now);
      if (!first && now - tried->second < kDialAgain) return false;
      tried->second = now;
      return true;
    };
    std::vector<async::Task<void>> dials;
    for (auto& record : to_dial(may_dial)) {
      dials.push_back(recruit_peer(std::move(record), transfer));
    }
    co_await async::run_all(std::move(dials));
  }
}

// With many slices this takes long.
async::Task<Result<void>> SourcePool::prepare_join(std::shared_ptr<const Layout> layout,
                                                   bool proves_parts, Transfer& transfer) {
  swarm::SliceCandidates& candidates = *transfer.candidates();
  std::function<Result<swarm::JoinTables>()> make =
      [plan = candidates.shared_plan(), layout, proves_parts, tiles = candidates.slice_tiles()] {
        return Result<swarm::JoinTables>(swarm::join_tables(*plan, *layout, proves_parts, tiles));
      };
  CO_TRY(auto tables, co_await context_.environment.plans->run(std::move(make)));
  candidates.prepare(std::move(tables));
  co_return Result<void>();
}

// The source enters the table once its layout is known, because the transfer uses all that is
// there.
async::Task<void> SourcePool::recruit_peer(proto::Source record, Transfer& transfer) {
  auto peer = co_await SourcePeer::connect(record, context_.environment.identity, kDialDeadline);
  if (!peer) {
    log::info("pull.recruit", "source", record.node().node_id(), "error", peer.error());
    co_return;
  }
  ActiveSource source = source_of(std::move(record), std::move(*peer));
  auto learned = co_await learn_layout_of(source);
  if (learned) learned = co_await prepare_join(source.layout, source.proves_parts(), transfer);
  const bool cancelled = co_await async::is_cancelled();
  if (!learned) log::info("pull.recruit", "source", source.name, "error", learned.error());
  if (!learned || cancelled || !has_room()) {
    source.peer->close();
    co_return;
  }
  table_->push_back(std::move(source));
  transfer.admit(static_cast<transport::SourceIndex>(table_->size() - 1));
}

async::Task<Result<void>> SourcePool::add_local() {
  const PullTarget& target = context_.target;
  for (const auto& stored : context_.environment.store->find(target.resolved.id)) {
    if (stored->manifest.checkpoint->root != target.resolved.root) continue;
    ActiveSource source;
    source.name = "store:" + stored->directory.filename().string();
    const bool known = std::ranges::any_of(
        *table_, [&](const ActiveSource& other) { return other.name == source.name; });
    if (known || faults_.quarantined(source.name) || !has_room()) continue;
    auto copying = context_.environment.plans->layout_of(stored);
    CO_TRY(source.layout, co_await context_.wait_for(std::move(copying)));
    for (const auto& segment : stored->segments) source.local_segments.push_back(segment->bytes());
    source.keep_alive = stored;
    table_->push_back(std::move(source));
  }
  co_return Result<void>();
}

// The directory may be on a slow file system, and all of it may have to be digested.
async::Task<Result<void>> SourcePool::add_fallback() {
  fallback_used_ = true;
  const auto& directory = context_.request.fallback;
  PullTarget& target = context_.target;
  auto open = [&] {
    return target.checkpoint != nullptr ? open_file_source(directory, target.checkpoint)
                                        : adopt_file_source(directory, target.resolved.id,
                                                            *context_.environment.digest_pool);
  };
  CO_TRY(auto files, co_await async::offload(*context_.environment.blocking_pool, std::move(open)));
  const Digest& root = target.resolved.root;
  if (!root.is_nil() && files->checkpoint->root != root) {
    co_return fail(ErrorCode::kCorrupt, "{} holds other weights than {}: its root is {}, not {}",
                   directory.string(), target.resolved.id.to_string(),
                   files->checkpoint->root.hex(), root.hex());
  }
  target.checkpoint = files->checkpoint;
  ActiveSource source;
  source.name = directory.string();
  source.layout = files->layout;
  source.local_segments = files->segments();
  source.keep_alive = files;
  if (!has_room()) table_->pop_back();
  table_->push_back(std::move(source));
  co_return Result<void>();
}

void SourcePool::lose(ActiveSource& source, const Error& cause) {
  source.state.lose(SourceState::Loss::kFailed, cause.message());
  faults_.failed(source.peer->incarnation(), cause.code());
}

bool SourcePool::judge() {
  bool grants_refused = false;
  for (auto& source : *table_) {
    const bool too_many = faults_.add_wrong(source.name, source.wrong.slices);
    if (too_many && !source.state.quarantined()) {
      source.state.lose(SourceState::Loss::kWrongBytes, wrong_bytes_cause(source.wrong.where));
      log::warn("pull.source_lost", "source", source.name, "cause", source.state.cause());
      context_.progress.show(fmt::format("source {} lost: {}", source.name, source.state.cause()));
    }
    if (source.state.quarantined()) faults_.quarantine(source.name, source.state.cause());
    if (source.peer == nullptr || !source.state.lost()) continue;
    const auto loss = source.state.loss();
    faults_.lost(source.peer->incarnation(), loss, source.bytes > 0);
    if (loss == SourceState::Loss::kGrantRefused) grants_refused = true;
  }
  return grants_refused;
}

void SourcePool::forget_lost() {
  for (auto& source : *table_) {
    if (source.state.lost() && source.peer != nullptr) source.peer->close();
    source.session.reset();
    source.state.restart();
  }
  std::erase_if(*table_, [](const ActiveSource& source) { return source.state.lost(); });
}

void SourcePool::close() {
  for (auto& source : *table_) {
    if (source.peer != nullptr) source.peer->close();
  }
}

}  // namespace rekindle::pull
